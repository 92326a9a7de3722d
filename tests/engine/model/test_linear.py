"""Products with frozen weights, packed and not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model.cpu import few_rows
from tinsmith.engine.local.model.linear import Linear, add_product, plain_product


def new_linear(
    outputs: int,
    inputs: int,
    *,
    has_bias: bool = False,
    packs: bool = True,
    is_exact: bool = False,
) -> Linear:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    bias = torch.randn(outputs, generator=generator) if has_bias else None
    linear = Linear(weight, bias, is_exact=is_exact)
    if packs:
        linear.allow_packing()
    return linear


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(520, 264), (300, 513), (264, 576), (8, 16)])
def test_products_are_those_of_torch(
    outputs: int, inputs: int, has_bias: bool, packs: bool, is_exact: bool
) -> None:
    """Within 1e-5."""
    linear = new_linear(outputs, inputs, has_bias=has_bias, packs=packs, is_exact=is_exact)
    for num_rows in (0, 1, 2, 16, 128, 300):
        x, grad = torch.randn(num_rows, inputs), torch.randn(num_rows, outputs)
        with torch.no_grad():
            y, grad_x = linear.product(x), linear.product_back(grad)
        torch.testing.assert_close(y, F.linear(x, linear.weight, linear.bias), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(grad_x, grad @ linear.weight, atol=1e-5, rtol=1e-5)


def test_a_head_is_made_of_parts_and_so_are_its_rows() -> None:
    head = new_linear(8200, 200, has_bias=True, is_exact=True)
    x = torch.randn(300, 200)
    expected = F.linear(x, head.weight, head.bias)
    torch.testing.assert_close(head.product(x), expected, atol=1e-5, rtol=1e-5)


def test_packed_products_take_rows_and_columns_of_larger_matrices() -> None:
    linear = new_linear(520, 264)
    x = torch.randn(20, 3, 264)[:, 1]
    grad = torch.randn(20, 600)[:, 40:560]
    torch.testing.assert_close(linear.product(x), x @ linear.weight.t(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        linear.product_back(grad), grad @ linear.weight, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(("outputs", "inputs"), [(520, 264), (264, 576)])
def test_a_row_does_not_depend_on_those_beside_it(outputs: int, inputs: int) -> None:
    """One row of another sequence that is not finite must not spoil the rest."""
    linear = new_linear(outputs, inputs)
    x = torch.randn(16, inputs)
    clean = linear.product(x)
    x[3] = torch.nan
    spoiled = linear.product(x)
    rest = torch.arange(16) != 3
    assert torch.equal(spoiled[rest], clean[rest])
    assert spoiled[3].isnan().all()


def test_what_was_packed_while_sampling_serves_training() -> None:
    linear = new_linear(520, 264)
    with torch.inference_mode():
        linear.product(torch.randn(4, 264))
        linear.product_back(torch.randn(4, 520))
    x = torch.randn(4, 264, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(linear.product(x), x @ linear.weight.t(), atol=1e-5, rtol=1e-5)


def test_memory_is_counted_from_the_moment_it_is_allowed() -> None:
    linear = new_linear(520, 264, has_bias=True, packs=False)
    own = 4 * (520 * 264 + 520)
    assert linear.nbytes == own
    assert linear.packed_bytes in (0, 2 * 4 * 520 * 264)
    linear.allow_packing()
    assert linear.nbytes == own + linear.packed_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_large_float32_weights_are_packed(dtype: torch.dtype) -> None:
    for linear in (Linear(torch.zeros(520, 264, dtype=dtype)), Linear(torch.zeros(16, 16))):
        linear.allow_packing()
        assert linear.packed_bytes == 0
        y = linear.product(torch.ones(3, linear.weight.shape[1], dtype=linear.weight.dtype))
        assert y.dtype == linear.weight.dtype


def test_an_exact_product_errs_no_more_packed_than_plain() -> None:
    """Against float64; the mean error may be a tenth larger."""
    plain = new_linear(1152, 1152, packs=False)
    packed = new_linear(1152, 1152, is_exact=True)
    x = torch.randn(16, 1152, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ plain.weight.double().t()
    errors = [(linear.product(x) - expected).abs().mean() for linear in (plain, packed)]
    assert errors[1] <= 1.1 * errors[0]


def test_where_rounding_would_show_a_packed_product_errs_no_more_than_the_plain_one() -> None:
    """Forward with more inputs than outputs, and in the head; the mean error may be a tenth
    larger."""
    generator = torch.Generator().manual_seed(1)
    cases = [(576, 1536, False, 16), (576, 1536, False, 300), (640, 576, True, 300)]
    for outputs, inputs, is_exact, num_rows in cases:
        plain = new_linear(outputs, inputs, packs=False)
        packed = new_linear(outputs, inputs, is_exact=is_exact)
        x = torch.randn(num_rows, inputs, generator=generator)
        expected = x.double() @ plain.weight.double().t()
        errors = [(linear.product(x) - expected).abs().mean() for linear in (plain, packed)]
        assert errors[1] <= 1.1 * errors[0]


def test_few_rows_of_many_inputs_are_quicker_plain_and_stay_so() -> None:
    plain, packed = new_linear(264, 520, packs=False), new_linear(264, 520)
    x = torch.randn(8, 520)
    assert torch.equal(packed.product(x), plain.product(x))


@pytest.mark.parametrize("inputs", [192 * pieces for pieces in (3, 16, 17, 32, 47)])
def test_pieces_of_few_rows_in_one_call_have_the_bits_of_piece_after_piece(inputs: int) -> None:
    """Of many pieces torch by itself would make several sums."""
    with_bias, without = new_linear(264, inputs, has_bias=True), new_linear(264, inputs)
    for linear in (with_bias, without):
        groups = few_rows.Groups(linear.weight, linear.bias, 192)
        for num_rows in (2, 9, 16, 40):
            assert few_rows.can_group(linear.shape, 192, num_rows)
            x = torch.randn(num_rows, inputs)
            y = linear_by_pieces(x, linear)
            assert torch.equal(groups.product(x), y)


def linear_by_pieces(x: Tensor, linear: Linear) -> Tensor:
    """x (N, inputs) times 192 columns of the weight at a time, by oneDNN."""
    pack, multiply = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    y, bias = torch.zeros(()), linear.bias
    for piece, weight in zip(x.split(192, 1), linear.weight.split(192, 1), strict=True):
        y = y + multiply(piece, pack(weight.contiguous(), 16), bias, "none", [], "")
        bias = None
    return y


@pytest.mark.parametrize("num_rows", [3, 300])
def test_plain_products_take_transposed_matrices_and_columns_of_larger_ones(num_rows: int) -> None:
    """Of few rows and of many, which go different ways; relative 1e-5."""
    wide, weights = torch.randn(num_rows, 3 * 96), torch.randn(3 * 96, 256)
    x = wide[:, 96:192]
    for weight in (weights[:256, :96], weights[:96].t(), weights[100:196, 20:220].t()):
        expected = (x.double() @ weight.double().t()).float()
        torch.testing.assert_close(plain_product(x, weight), expected, atol=1e-4, rtol=1e-5)
    for right in (weights[:96], weights.t()[:96, 96:280]):
        into = torch.randn(num_rows, right.shape[1])
        expected = (into.double() + x.double() @ right.double()).float()
        add_product(into, x, right)
        torch.testing.assert_close(into, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_half_precision_can_be_left_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x, bias = (torch.randn(shape).to(dtype) for shape in ((8, 40), (5, 40), (8,)))
    y = Linear(weight, bias).product(x, torch.float32)
    expected = F.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(y, y.to(dtype).float())
    assert torch.equal(Linear(weight, bias).product(x, dtype), Linear(weight, bias).product(x))
