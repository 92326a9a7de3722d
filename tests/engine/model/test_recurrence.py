"""The recurrences by chunks and by steps, against the plain loop over tokens in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tinsmith.engine.local.model.recurrent import delta_rule, mamba
from tinsmith.engine.local.model.recurrent.delta_rule import DeltaWeights, mix, step_in_place
from tinsmith.engine.local.model.recurrent.recurrence import StateShape, Walk, convolve, recur

HEADS, KEYS, VALUES = 3, 8, 5
RELATIVE = 1e-5


def delta_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """One head of one sequence: (T, …) each, and its memory (K, V)."""
    outputs = []
    for t in range(len(q)):
        memory = memory * g[t].exp()
        memory = memory + beta[t] * torch.outer(k[t], v[t] - k[t] @ memory)
        outputs.append(q[t] @ memory)
    return torch.stack(outputs), memory


def mamba_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(len(q)):
        memory = memory * g[t].exp() + torch.outer(k[t], v[t])
        outputs.append(q[t] @ memory)
    return torch.stack(outputs), memory


def delta_inputs(num_rows: int, generator: torch.Generator) -> list[Tensor]:
    def normal(size: int) -> Tensor:
        return torch.randn(num_rows, HEADS, size, generator=generator)

    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (normal(KEYS), normal(KEYS)))
    # From memories that last to memories that are gone with the next token.
    g = -torch.rand(num_rows, HEADS, 1, generator=generator) * torch.tensor([0.01, 1, 40])[:, None]
    return [q, k, normal(VALUES), g, normal(1).sigmoid()]


def mamba_inputs(num_rows: int, generator: torch.Generator) -> list[Tensor]:
    return delta_inputs(num_rows, generator)[:4]


RULES = {
    "delta_rule": (delta_rule, delta_inputs, delta_reference),
    "mamba": (mamba, mamba_inputs, mamba_reference),
}
LENGTHS = [1, 7, 64, 130, 1, 65, 2]


def expected(
    reference: Callable[..., tuple[Tensor, Tensor]],
    inputs: list[Tensor],
    lengths: list[int],
    memory: Tensor,
) -> tuple[Tensor, Tensor]:
    parts = zip(memory, *(x.split(lengths) for x in inputs), strict=True)
    found = [
        [reference(*(x[:, head] for x in rows), before[head]) for head in range(HEADS)]
        for before, *rows in parts
    ]
    outputs = [torch.stack([y for y, _ in heads], dim=1) for heads in found]
    after = [torch.stack([state for _, state in heads]) for heads in found]
    return torch.cat(outputs), torch.stack(after)


@pytest.mark.parametrize("name", RULES)
def test_packed_sequences_run_as_each_does_token_by_token(name: str) -> None:
    """From a memory each, outputs, memories and all gradients within 1e-5."""
    rule, make_inputs, reference = RULES[name]
    generator = torch.Generator().manual_seed(3)
    inputs = make_inputs(sum(LENGTHS), generator)
    memory = torch.randn(len(LENGTHS), HEADS, KEYS, VALUES, generator=generator)
    leaves = [x.clone().requires_grad_() for x in (*inputs, memory)]
    exact = [x.double().requires_grad_() for x in (*inputs, memory)]

    y, after = recur(rule.step, rule.terms, leaves[:-1], Walk(LENGTHS), leaves[-1])
    wanted_y, wanted_after = expected(reference, exact[:-1], LENGTHS, exact[-1])
    weights = torch.randn(y.shape, generator=generator)
    for found, wanted in ((y, wanted_y), (after, wanted_after)):
        assert (found - wanted).abs().max() <= RELATIVE * wanted.abs().max()
    ((y * weights).sum() + after.sum()).backward()
    ((wanted_y * weights).sum() + wanted_after.sum()).backward()
    for leaf, wanted in zip(leaves, exact, strict=True):
        assert leaf.grad is not None and wanted.grad is not None
        assert (leaf.grad - wanted.grad).norm() <= RELATIVE * wanted.grad.norm()


@pytest.mark.parametrize("name", RULES)
def test_reading_in_pieces_leaves_the_memory_of_reading_at_once(name: str) -> None:
    rule, make_inputs, _ = RULES[name]
    inputs = make_inputs(150, torch.Generator().manual_seed(4))
    memory = torch.zeros(1, HEADS, KEYS, VALUES)
    whole, after = recur(rule.step, rule.terms, inputs, Walk([150]), memory)
    outputs, lengths = [], [70, 1, 1, 78]
    for piece in zip(*(x.split(lengths) for x in inputs), strict=True):
        y, memory = recur(rule.step, rule.terms, piece, Walk([len(piece[0])]), memory)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(memory, after, atol=1e-5, rtol=1e-5)


def test_a_convolution_sees_its_own_sequence_only_and_goes_on_from_what_was_kept() -> None:
    generator = torch.Generator().manual_seed(5)
    lengths, channels, taps = [5, 1, 2, 9], 6, 4
    x = torch.randn(sum(lengths), channels, generator=generator)
    weight = torch.randn(channels, taps, generator=generator)
    bias = torch.randn(channels, generator=generator)
    conv = torch.nn.Conv1d(channels, channels, taps, groups=channels, padding=taps - 1)
    conv.weight.data, conv.bias.data = weight[:, None], bias

    y, kept = convolve(x, weight, bias, Walk(lengths), None)
    for sequence, found in zip(x.split(lengths), y.split(lengths), strict=True):
        wanted = conv(sequence.t()[None])[0, :, : len(sequence)].t()
        torch.testing.assert_close(found, wanted)

    more = torch.randn(4 * 2, channels, generator=generator)
    later, _ = convolve(more, weight, bias, Walk([2, 2, 2, 2]), kept)
    for first, second, found in zip(x.split(lengths), more.split(2), later.split(2), strict=True):
        together = torch.cat([first, second])
        wanted = conv(together.t()[None])[0, :, : len(together)].t()[-2:]
        torch.testing.assert_close(found, wanted)


def test_kernels_find_rows_chunks_and_sequences_in_tables() -> None:
    tables = Walk([2, 130, 64]).tables(torch.device("cpu"))
    assert tables.rows.t()[[0, 1, 2, 131, 132]].tolist() == [
        [0, 0],
        [1, 0],
        [0, 1],
        [129, 1],
        [0, 2],
    ]
    assert tables.chunks.t().tolist() == [[0, 2], [2, 64], [66, 64], [130, 2], [132, 64]]
    assert tables.sequences.t().tolist() == [[2, 130, 1, 1], [132, 64, 2, 4], [0, 2, 0, 0]]
    assert all(table.dtype == torch.int32 and table.is_contiguous() for table in tables)


def test_a_state_is_one_vector_that_splits_into_inputs_and_memory() -> None:
    shape = StateShape(num_layers=3, taps=4, channels=10, num_heads=2, key_dim=4, value_dim=5)
    inputs, memory = shape.split(torch.arange(2.0 * shape.size).view(2, -1))
    assert inputs.shape == (2, 3, 10) and memory.shape == (2, 2, 4, 5)
    assert shape.size == 70 and shape.nbytes == 3 * 70 * 4
    assert memory[0, 0, 0, 0] == 30 and memory[1, 1, 3, 4] == 139


class OneState:
    """A sequence whose states are those of a pool of one."""

    def __init__(self, state: Tensor, num_rows: int) -> None:
        self.walk = Walk([num_rows])
        self.state = state

    def read(self, layer: int) -> Tensor:
        return self.state

    def write(self, layer: int, inputs: Tensor, memory: Tensor) -> None:
        self.state = torch.cat([inputs.flatten(1), memory.flatten(1)], dim=1)


def test_a_step_in_place_is_that_of_each_sequence_and_leaves_the_others_alone() -> None:
    """The states of rows in any order, of which some are padding."""
    generator = torch.Generator().manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    heads, channels = 4, 2 * 2 * KEYS + 4 * VALUES
    weights = DeltaWeights(normal(channels, 3), normal(heads), normal(heads), 2, KEYS, VALUES)
    states = normal(6, weights.state_shape.size)
    before = states.clone()
    mixed, a, b = normal(4, channels), normal(4, heads), normal(4, heads)
    numbers = torch.tensor([3, -1, 0, -1])
    found = step_in_place(mixed, a, b, weights, states, numbers)
    for row, number in ((0, 3), (2, 0)):
        one = OneState(before[number : number + 1], 1)
        rows = slice(row, row + 1)
        wanted = mix(mixed[rows], a[rows], b[rows], weights, one, 0)
        torch.testing.assert_close(found[rows], wanted)
        torch.testing.assert_close(states[number : number + 1], one.state)
    assert torch.equal(states[[1, 2, 4]], before[[1, 2, 4]]), "the last one is for padding"
