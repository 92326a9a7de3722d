"""The quick forms of a product give the product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tinsmith.engine.local.model.cpu.few_rows import linear


@pytest.mark.parametrize("num_rows", [0, 1, 2, 4, 5, 16, 128, 129])
@pytest.mark.parametrize(("outputs", "inputs"), [(512, 256), (516, 256), (8, 16)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_form_equals_the_plain_product(
    num_rows: int, outputs: int, inputs: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    bias = torch.randn(outputs, generator=generator) if has_bias else None
    with torch.inference_mode():
        found = linear(x, weight, bias)
    assert found.is_contiguous()
    torch.testing.assert_close(found, F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)


def test_rows_of_a_larger_matrix_are_accepted() -> None:
    x = torch.randn(20, 3, 256)[:, 1]
    weight = torch.randn(512, 256) / 16
    for rows in (x[:1], x[:3], x):
        torch.testing.assert_close(linear(rows, weight), F.linear(rows, weight))
