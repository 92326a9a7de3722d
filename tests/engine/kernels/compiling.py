"""Compiles the kernels for a GPU that need not be there, at the sizes of published models.

Run with a compute capability ("90") and the bytes of shared memory that a program may have there,
it prints what it found as JSON: how many variants it compiled, which were compiled again with fewer
stages than they ask for, and which cannot be launched, with kernel and sizes. Nothing runs: tensors
only say what types, alignment and shapes are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tinsmith.engine.local.kernels import (
    clamped_swiglu,
    decode_attention,
    decode_choice,
    decode_joins,
    decode_lora,
    delta_rule,
    delta_step,
    experts,
    few_bits,
    gated_norm,
    latent_attention,
    low_rank,
    ordered_attention,
    pointwise,
    routing,
    scores,
    short_convolution,
)
from tinsmith.engine.local.model.experts.routing import Routing, TokenAdapters
from tinsmith.engine.local.model.families import AttentionSpec, Projection
from tinsmith.engine.local.model.recurrent.delta_rule import DeltaWeights
from tinsmith.engine.local.model.recurrent.recurrence import Walk
from tinsmith.engine.local.model.rope import Rotation

CPU = torch.device("cpu")
HALF, FULL = torch.bfloat16, torch.float32
VOCABULARY = 151_936


class Dense(NamedTuple):
    hidden: int
    num_heads: int
    num_kv_heads: int
    intermediate: int
    head_dim: int = 128

    @property
    def projections(self) -> dict[str, Projection]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {
            "qkv": (self.hidden, (queries, keys, keys)),
            "o": (queries, (self.hidden,)),
            "gate_up": (self.hidden, (self.intermediate,) * 2),
            "down": (self.intermediate, (self.hidden,)),
        }
        return {
            name: Projection(
                layer=0,
                name=name,
                part="attn" if name in ("qkv", "o") else "mlp",
                inputs=inputs,
                modules=tuple(f"module_{number}" for number in range(len(outputs))),
                outputs=outputs,
            )
            for name, (inputs, outputs) in sizes.items()
        }


QWEN3 = {
    "Qwen3-0.6B": Dense(1024, 16, 8, 3072),
    "Qwen3-4B": Dense(2560, 32, 8, 9728),
    "Qwen3-8B": Dense(4096, 32, 8, 12288),
}
GPT_OSS = Dense(2880, 64, 8, 2880, 64)
"""gpt-oss-20b. Its heads have sinks, and no norms."""


class Sparse(NamedTuple):
    """Experts in place of an MLP."""

    hidden: int
    inner: int
    num_experts: int
    per_token: int
    is_biased: bool = False


A3B = Sparse(2048, 768, 128, 8)
GPT_OSS_EXPERTS = Sparse(2880, 2880, 32, 4, is_biased=True)


class Pretended:
    """What Triton asks its driver when it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


class Findings:
    def __init__(self, capability: int, max_shared: int) -> None:
        self.case: Case
        self.compiled: set[str] = set()
        self.staged: list[str] = []
        self.failed: list[str] = []
        self._max_shared = max_shared
        self._compile = JITFunction.run
        driver.set_active(Pretended(capability))

    def take_launches(self) -> None:
        """Whatever is launched from now on is compiled."""

        def launch(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self._launch(function, arguments, options)

        JITFunction.run = launch

    def _launch(self, function: Any, arguments: Any, options: dict[str, Any]) -> None:
        if self.case.only not in ("", function.__name__):
            return
        what = f"{function.module.rpartition('.')[2]}.{function.__name__}, {self.case.sizes}"
        stages = options["num_stages"]
        try:
            kernel = self._compile(function, *arguments, grid=None, warmup=True, **options)
        except Exception as error:  # whatever breaks the compiler is what is looked for
            self.failed.append(f"{what}: {type(error).__name__}: {str(error)[-500:]}")
            return
        self.compiled.add(kernel.hash)
        shared = kernel.metadata.shared
        if shared <= self._max_shared:
            return
        if stages == 1:
            self.failed.append(f"{what}: {shared} bytes")
            return
        self.staged.append(f"{what}: {shared} bytes with {stages} stages")
        raise triton.OutOfResources(shared, self._max_shared, "shared memory")


def empty(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def numbers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def decode_adapters(model: Dense, rank: int, dtype: torch.dtype, names: list[str]) -> None:
    adapters = decode_lora.TiledAdapters(
        numbers(3, 4), numbers(8), numbers(2, 4, 4), empty(2, 2, dtype=FULL), dtype, rank, True
    )
    projections = model.projections
    for name in names:
        projection = projections[name]
        x, y = empty(8, projection.inputs, dtype=dtype), empty(8, sum(projection.outputs))
        inner = adapters.new_inner(x, projection)
        adapters.shrink(inner, x, 1, projection)
        part = decode_lora.Part(adapters, inner, 1, projection)
        if name == "gate_up":
            down = projections["down"]
            decode_joins.swiglu(empty(8, 2 * model.intermediate, dtype=dtype), part, True, 2, down)
        elif name in ("o", "down"):
            stream = empty(8, model.hidden, dtype=FULL)
            weight = empty(model.hidden, dtype=dtype)
            decode_joins.add_rms_norm(stream, y.float(), part, weight, 1e-6)
        else:
            part.add_to(y.to(dtype))


def rotation_of(num_rows: int, head_dim: int, dtype: torch.dtype = HALF) -> Rotation:
    angles = empty(num_rows, 1, head_dim // 2, dtype=dtype)
    return Rotation(angles, angles, head_dim // 2)


def attention(model: Dense, num_rows: int) -> None:
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    cache = empty(2, 3, kv_heads, 16, dim)
    table = torch.zeros(num_rows * 4, dtype=torch.int32)
    rows = decode_attention.RowBlocks(cache, cache, numbers(num_rows) + 1, numbers(num_rows), table)
    has_sinks = model is GPT_OSS
    norms = None if has_sinks else (empty(dim), empty(dim))
    sinks = empty(heads, dtype=FULL) if has_sinks else None
    spec = AttentionSpec(scale=dim**-0.5, rope=None, window=128 if has_sinks else None)
    qkv = empty(num_rows, (heads + 2 * kv_heads) * dim)
    shape = decode_attention.Heads(heads, kv_heads, dim)
    rotation = rotation_of(num_rows, dim)
    decode_attention.attend(qkv, rows, rotation, norms, 1e-6, spec, 1, shape, sinks)
    if has_sinks:
        return
    # The attention of the exact mode.
    q, k, v = qkv.view(num_rows, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    group = heads // kv_heads
    spans = [ordered_attention.Span(0, num_rows, 0, 0)]
    tiles = ordered_attention.tiles_of(spans, group, CPU)
    ordered_attention.attend_packed(spec, q, k, v, tiles)
    ordered_attention.append(k, v, rows, 1)
    ordered_attention.attend_cached(spec, q, cache, cache, table, 1, tiles)


def latent(num_rows: int, dtype: torch.dtype) -> None:
    """Of DeepSeek-V3.1; blocks are as large as on CUDA."""
    cache, table = (
        empty(2, 3, 1, 32, 576, dtype=dtype),
        torch.zeros(num_rows * 4, dtype=torch.int32),
    )
    rows = decode_attention.RowBlocks(cache, cache, numbers(num_rows), numbers(num_rows), table)
    q, latents = empty(num_rows, 128, 576, dtype=dtype), empty(num_rows, 576, dtype=dtype)
    latent_attention.attend(q, latents, rows, 0.1, 1, 512)


def training_adapters(model: Dense, rank: int, num_rows: int, dtype: torch.dtype) -> None:
    projection = model.projections["qkv"]
    inputs, outputs = projection.inputs, projection.outputs
    columns = low_rank.divide_columns(0, rank, inputs, outputs, CPU)
    rows = low_rank.divide_rows([(0, num_rows, 0)], CPU, True)
    vectors = low_rank.Vectors(numbers(1), True)
    x, y = empty(num_rows, inputs, dtype=dtype), empty(num_rows, sum(outputs), dtype=dtype)
    inner = low_rank.shrink_by_a(x, vectors, rows, columns, 1.0)
    low_rank.expand_by_b(inner, vectors, rows, columns, y, y)
    inner_grad = low_rank.shrink_by_b(y, vectors, rows, columns, 1.0)
    low_rank.expand_by_a(inner_grad, vectors, rows, columns, x)
    low_rank.add_gradient_of_a(inner_grad, x, vectors, rows, columns)
    low_rank.add_gradient_of_b(inner, y, vectors, rows, columns)


def of_experts(model: Sparse, rank: int, num_tokens: int) -> None:
    hidden, inner, num_experts, per_token, is_biased = model
    choices = torch.arange(num_tokens * per_token).view(num_tokens, per_token) % num_experts
    of_tokens = TokenAdapters(numbers(num_tokens), 3)
    sorted_rows = experts.Sorted(Routing(choices, num_experts), of_tokens)
    of_rows, tiles = sorted_rows.routing, sorted_rows.tiles
    x, y = empty(num_tokens, hidden), empty(of_rows.num_rows, 2 * inner)
    weight = empty(num_experts, 2 * inner, hidden).transpose(1, 2)
    biases = empty(num_experts, 2 * inner) if is_biased else None
    experts.product(x, weight, y, of_rows.experts, 0, tiles, of_rows.tokens, biases)
    if biases is not None:
        clamped_swiglu.add_biases(y, biases, of_rows.experts)
        gated = clamped_swiglu.forward(y, 1.702, 7.0)
        clamped_swiglu.backward(gated, y, 1.702, 7.0)
    edges = numbers(num_experts, 2)
    facts, segments = empty(2, 2, dtype=FULL), (edges, edges, numbers(2))
    narrow = empty(of_rows.num_rows, rank)
    for size, is_b in ((hidden, False), (inner, True)):
        wide = empty(of_rows.num_rows, size)
        matrices = experts.Matrices(numbers(2), 0, facts, size, is_b, rank, True)
        experts.shrink(wide, matrices, sorted_rows, narrow, scales=is_b)
        experts.expand(wide, narrow, matrices, sorted_rows, scales=not is_b)
        grads = low_rank.Vectors(numbers(2), True)
        experts.add_gradients(wide, narrow, grads, 0, size, rank, segments, is_b)
    logits = empty(num_tokens, num_experts)
    routing.choose(logits, per_token, True)
    if num_tokens * per_token <= routing.MAX_SORTED:
        routing.sort(choices)
        runs = (numbers(num_tokens), 3)
        count = tiles.table.shape[1]
        routing.tiles(of_rows.experts, of_rows.tokens, runs, tiles.num_rows, count)
    shares = empty(num_tokens, per_token, dtype=FULL)
    rows = empty(of_rows.num_rows, hidden)
    routing.sums(rows, of_rows.experts, per_token, shares, FULL)
    routing.weigh(rows, rows, shares.flatten())


def of_delta_rule(dtype: torch.dtype) -> None:
    """Of Qwen3.5-4B: 16 heads of keys, 32 of values."""
    key_heads, heads, dim = 16, 32, 128
    channels = (2 * key_heads + heads) * dim
    weights = DeltaWeights(
        conv=empty(channels, 4, dtype=dtype),
        a_log=empty(heads, dtype=FULL),
        dt_bias=empty(heads, dtype=FULL),
        num_key_heads=key_heads,
        key_dim=dim,
        value_dim=dim,
    )
    tables = Walk([70, 3]).tables(CPU)
    mixed, a, b = (empty(73, size, dtype=dtype) for size in (channels, heads, heads))
    grad = empty(73, heads, dim, dtype=FULL)
    past, memory = empty(2, 3, channels, dtype=FULL), empty(2, heads, dim, dim, dtype=FULL)
    delta_rule.forward(mixed, a, b, weights, tables, past, memory)
    delta_rule.backward(grad, mixed, a, b, weights, tables, None, None)
    short_convolution.last_inputs(mixed, tables.sequences, past, 3)
    states = empty(5, weights.state_shape.size, dtype=FULL)
    delta_step.step_in_place(mixed[:4], a[:4], b[:4], weights, states, numbers(4), 0)
    y, gate = empty(73, heads * dim, dtype=dtype), empty(73, heads * dim, dtype=dtype)
    gated_norm.gated_norm(y, gate, empty(dim, dtype=FULL), 1e-6)
    gated_norm.gated_norm_backward(y, y, gate, empty(dim, dtype=FULL), 1e-6)


def of_layers(model: Dense, dtype: torch.dtype) -> None:
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    x, weight = empty(4, model.hidden, dtype=FULL), empty(model.hidden, dtype=dtype)
    grad = empty(4, model.hidden, dtype=dtype)
    pointwise.rms_norm(x, weight, 1e-6, dtype)
    pointwise.add_rms_norm(x, x, weight, 1e-6, dtype)
    pointwise.rms_norm_backward(grad, x, weight, 1e-6, grad, FULL)
    qkv = empty(4, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms, rotation = (empty(dim, dtype=dtype),) * 2, rotation_of(4, dim, dtype)
    pointwise.apply_rope(qkv, norms, rotation, heads, kv_heads, 1e-6)
    q, k, v = qkv.view(4, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    pointwise.apply_rope_backward((q, k, v), qkv, norms, rotation, 1e-6)
    gate_up = empty(4, 2 * model.intermediate, dtype=dtype)
    pointwise.swiglu(gate_up, True)
    pointwise.swiglu_backward(empty(4, model.intermediate, dtype=dtype), gate_up, True)
    logits, sums = empty(4, VOCABULARY, dtype=FULL), empty(4, dtype=FULL)
    scores.target_logprobs(logits, numbers(4))
    scores.gradient(logits, numbers(4), sums, sums, dtype)
    decode_choice.draw(logits, empty(4, dtype=torch.float64), empty(4, dtype=torch.float64))


def of_few_bits(inputs: int, outputs: int, num_rows: int) -> None:
    x, bias = empty(num_rows, inputs), empty(outputs)
    for kind, code, per_byte in (
        ("int8", torch.int8, 1),
        ("fp8", torch.float8_e4m3fn, 1),
        ("nf4", torch.uint8, 2),
    ):
        codes = empty(outputs, inputs // per_byte, dtype=code)
        scales = empty(inputs // 64 if kind == "nf4" else 1, outputs, dtype=FULL).t()
        values = empty(16, dtype=FULL)
        few_bits.product(x, kind, codes, scales, values, bias, HALF)
        few_bits.dense(kind, codes, scales, values, inputs, HALF)


class Case(NamedTuple):
    sizes: str
    call: Callable[..., None]
    arguments: tuple[Any, ...]
    only: str = ""
    """The one kernel that is compiled, where the others say nothing new and take long."""


def cases() -> Iterator[Case]:
    every = ["qkv", "o", "gate_up", "down"]
    small, middle, large = QWEN3.values()
    yield Case("Qwen3-0.6B, rank 8", decode_adapters, (small, 16, HALF, every))
    yield Case("Qwen3-4B, rank 32", decode_adapters, (middle, 32, HALF, every))
    yield Case("Qwen3-8B, rank 128", decode_adapters, (large, 128, HALF, every))
    yield Case("Qwen3-8B, rank 128, float32", decode_adapters, (large, 128, FULL, ["o"]))
    yield Case("Qwen3-8B, rank 512", decode_adapters, (large, 512, HALF, ["o"]), "_shrink_kernel")
    yield Case("Qwen3-0.6B, 1 row", attention, (small, 1))
    yield Case("Qwen3-8B, 200 rows", attention, (large, 200))
    yield Case("DeepSeek-V3.1, 1 row", latent, (1, HALF))
    yield Case("DeepSeek-V3.1, 200 rows", latent, (200, HALF))
    yield Case("DeepSeek-V3.1, 200 rows, float32", latent, (200, FULL))
    yield Case("Qwen3-0.6B, rank 8, 64 rows", training_adapters, (small, 8, 64, HALF))
    yield Case("Qwen3-4B, rank 32, 2,100 rows", training_adapters, (middle, 32, 2_100, HALF))
    yield Case("Qwen3-8B, rank 128, 9,000 rows", training_adapters, (large, 128, 9_000, HALF))
    yield Case("Qwen3-4B, rank 32, 64 rows, float32", training_adapters, (middle, 32, 64, FULL))
    yield Case("Qwen3-30B-A3B, rank 32, 4 tokens", of_experts, (A3B, 32, 4))
    yield Case("Qwen3-30B-A3B, rank 128, 2,000 tokens", of_experts, (A3B, 128, 2_000))
    yield Case("gpt-oss-20b, 1 row", attention, (GPT_OSS, 1))
    yield Case("gpt-oss-20b, 200 rows", attention, (GPT_OSS, 200))
    yield Case("gpt-oss-20b, rank 32, 64 tokens", of_experts, (GPT_OSS_EXPERTS, 32, 64))
    yield Case("gpt-oss-20b, rank 32, 2,000 tokens", of_experts, (GPT_OSS_EXPERTS, 32, 2_000))
    yield Case("Qwen3.5-4B", of_delta_rule, (HALF,))
    yield Case("Qwen3.5-4B, float32", of_delta_rule, (FULL,), "_walk_back_kernel")
    yield Case("Qwen3-4B", of_layers, (middle, HALF))
    yield Case("Qwen3-4B, 1 row", of_few_bits, (2560, 19_456, 1))
    yield Case("Qwen3-4B, 64 rows", of_few_bits, (9728, 2560, 64))
    yield Case("Qwen3-4B, 200 rows", of_few_bits, (2560, 6144, 200))


def main() -> None:
    findings = Findings(int(sys.argv[1]), int(sys.argv[2]))
    findings.take_launches()
    for findings.case in cases():
        findings.case.call(*findings.case.arguments)
    found = {
        "compiled": len(findings.compiled),
        "staged": findings.staged,
        "failed": findings.failed,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
