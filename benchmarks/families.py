"""Models with experts or linear attention: training, tenants and sampling of each family.

    python benchmarks/families.py --device cuda --shape qwen3-30b-a3b --parts training tenants 64

Weights are random and made on the device. Each side has the device to itself: ours is measured and
dropped, then `transformers` with PEFT (or its `generate`) is, with as many rounds of the same data.
A fraction of the matmul rate counts four operations for each base weight that a token meets: of
experts, those that it is sent to. The floor of a decoding step reads every weight that is met once.
Where a pass does not fit, micro-batches are halved until it does, and the report says how many
tokens they have. Without --device cuda the shapes are tiny, to try the program itself.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import machine
from sampling import Generate, Side
from shapes import SHAPES
from tinsmith.engine.local.config import BaseWeights, LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder, build
from tinsmith.engine.local.model.foreign.building import transformers_config
from tinsmith.engine.local.model.foreign.decoder import ForeignDecoder
from tinsmith.engine.local.model.foreign.describing import read_foreign_config
from tinsmith.engine.local.model.lora import AdapterPool
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.settings import read_config
from tinsmith.engine.local.sample.kvcache import CacheShape
from tinsmith.engine.local.train.passes import graphs_of
from trainers import RANK, Ours, Peft, RandomWeights, make_data
from training import make_case, peaks_on_cuda

_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "sliding_window": 16,
}
_EXPERT_PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")


def main() -> None:
    machine.let_threads_wait_passively()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), required=True)
    parser.add_argument(
        "--parts", nargs="+", default=["training", "tenants", "64"], help="numbers are sequences"
    )
    parser.add_argument("--sides", nargs="+", choices=("ours", "theirs"), default=["ours"])
    parser.add_argument("--base-weights", nargs="+", default=["full"], help="full int8 fp8 nf4")
    parser.add_argument("--layers", type=int, help="so many of the shape's layers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    settings = SHAPES[arguments.shape]
    if arguments.device == "cpu":
        settings = {**settings, **{n: v for n, v in _TINY.items() if n in settings}}
    if arguments.layers:
        settings = {**settings, "num_hidden_layers": arguments.layers}
    result: dict[str, Any] = {"shape": arguments.shape, "layers": settings["num_hidden_layers"]}
    kinds = arguments.base_weights if "ours" in arguments.sides else []
    for kind in kinds:
        result[kind] = _of_ours(device, settings, kind, arguments)
        _free()
    if "theirs" in arguments.sides:
        result["theirs"] = _of_theirs(device, settings, arguments)
    for kind in kinds:
        result[kind]["compared"] = _compared(result, kind)
    print(json.dumps(result, indent=2))
    machine.write_report(arguments.out, device, result)


class Family(Ours):
    """The engine's passes on a model of random weights."""

    def __init__(self, device: torch.device, settings: dict[str, Any], kind: BaseWeights) -> None:
        self.config = LocalEngineConfig(device="cuda" if device.type == "cuda" else "cpu")
        with _folder(settings) as folder:
            sizes = _sizes(_random_model(folder, torch.device("meta"), eager=True))
            self.decoder = _random_decoder(folder, device, kind)
        self.active = _active_weights(sizes, settings)
        self.met = lambda count: _weights_met(sizes, settings, count)
        _free()
        self.pool = AdapterPool(self.decoder.config, device, self.decoder.dtype)
        self.adapters = {}
        self.graphs = graphs_of(self.decoder)

    def base_flops_a_token(self) -> float:
        return 4.0 * self.active

    def base_weights(self) -> list[torch.Tensor]:
        return []


def _of_ours(
    device: torch.device,
    settings: dict[str, Any],
    kind: BaseWeights,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    ours = Family(device, settings, kind)
    shape = CacheShape.of(ours.decoder.config, device, ours.decoder.dtype)
    found: dict[str, Any] = {
        "weights_gib": round(ours.decoder.nbytes / 2**30, 2),
        "active_weights": round(ours.active),
        "cache_bytes_a_token": shape.bytes_per_token,
        "state_bytes_a_sequence": shape.state_bytes,
    }
    for part in arguments.parts:
        try:
            if part == "training":
                found[part] = _training(ours, device, arguments.rounds)
            elif part == "tenants":
                found[part] = _tenants(ours, device, arguments.rounds)
            else:
                found[part] = _sampling(ours, device, int(part), arguments)
        except torch.OutOfMemoryError:
            found[part] = "out of memory"
        print(json.dumps({kind: {part: found[part]}}), flush=True)
        for adapter in ours.adapters.values():
            ours.pool.release(adapter)
        ours.adapters.clear()
        _free()
    return found


def _training(ours: Family, device: torch.device, rounds: int) -> dict[str, Any]:
    case = "16x1024" if device.type == "cuda" else "4x64"
    data = {"0": make_case(case, ours.vocab_size)}
    ours.add_adapters(1)
    work = _in_pieces_that_fit(ours, lambda: ours.forward_backward(data))
    rates: list[float] = []
    works: dict[str, Callable[[], object]] = {
        "pass": work,
        "matmul": lambda: rates.append(machine.matmul_once(device)),
    }
    times = machine.interleaved(works, device, rounds)
    num_tokens = sum(datum.model_input.length for datum in data["0"])
    floors = [num_tokens * ours.base_flops_a_token() / rate for rate in rates[-rounds:]]
    return {
        "case": case,
        "tokens_per_s": round(num_tokens / statistics.median(times["pass"]), 1),
        "ms": round(statistics.median(times["pass"]) * 1e3, 1),
        "of_matmul_rate": round(machine.median_ratio(floors, times["pass"]), 4),
        "matmul_tflops": round(statistics.median(rates[-rounds:]) / 1e12, 2),
        "micro_batch_tokens": ours.config.micro_batch_tokens,
        **(peaks_on_cuda({"pass": work}) if device.type == "cuda" else {}),
    }


def _tenants(ours: Family, device: torch.device, rounds: int) -> dict[str, Any]:
    """Eight adapters in one call, and one after another."""
    sequences, length = (2, 256) if device.type == "cuda" else (1, 32)
    data = {
        name: make_data([length] * sequences, ours.vocab_size, seed=int(name))
        for name in ours.add_adapters(8)
    }

    def one_by_one() -> None:
        for name, own in data.items():
            ours.forward_backward({name: own})

    together = _in_pieces_that_fit(ours, lambda: ours.forward_backward(data))
    times = machine.interleaved({"together": together, "one_by_one": one_by_one}, device, rounds)
    num_tokens = 8 * sequences * length
    return {
        "together_ms": round(statistics.median(times["together"]) * 1e3, 1),
        "tokens_per_s": round(num_tokens / statistics.median(times["together"]), 1),
        "times_faster_than_one_by_one": round(
            machine.median_ratio(times["one_by_one"], times["together"]), 2
        ),
        "micro_batch_tokens": ours.config.micro_batch_tokens,
    }


def _in_pieces_that_fit(ours: Family, work: Callable[[], object]) -> Callable[[], object]:
    for tokens in (None, 8192, 4096, 2048, 1024):
        ours.config = replace(ours.config, micro_batch_tokens=tokens)
        try:
            work()
        except torch.OutOfMemoryError:
            _free()
        except RuntimeError as error:  # the engine's own word for it
            if "memory" not in str(error):
                raise
            _free()
        else:
            return work
    raise torch.OutOfMemoryError("micro-batches of 1,024 tokens do not fit")


def _sampling(
    ours: Family, device: torch.device, count: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    side = Side(
        ours,
        prompt_tokens=128 if is_cuda else 16,
        new_tokens=arguments.new_tokens if is_cuda else 8,
    )
    times = machine.interleaved({"ours": lambda: side.decode(count)}, device, 1)["ours"]
    step = statistics.median(side.steps)
    item = ours.decoder.dtype.itemsize
    floor = ours.met(count) * item / machine.bandwidth(device)
    return {
        "tokens_per_s": round(count * side.new_tokens / statistics.median(times), 1),
        "decode_tokens_per_s": round(count / step, 1),
        "step_ms": round(step * 1e3, 2),
        "floor_ms": round(floor * 1e3, 2),
        "of_floor": round(floor / step, 3),
    }


class TheirFamily(Peft):
    """PEFT on a model of random weights: attention, and experts where it can adapt them."""

    def __init__(self, device: torch.device, settings: dict[str, Any]) -> None:
        import peft

        self.device = device
        with _folder(settings) as folder:
            model = _random_model(folder, device, eager=False)
        names = [name for name, _ in model.named_parameters()]
        experts = [each for each in _EXPERT_PARAMETERS if any(n.endswith(each) for n in names)]
        ends = {name.split(".")[-2] for name in names if name.endswith("proj.weight")}
        lora = peft.LoraConfig(
            r=RANK,
            lora_alpha=32,
            target_modules=sorted(ends),
            target_parameters=experts or None,
            lora_dropout=0.0,
        )
        self._lora = lora
        self.model = peft.get_peft_model(model, lora, "0")
        self._names = {"0"}
        self.model.train()


def _of_theirs(
    device: torch.device, settings: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in arguments.parts:
        if part == "tenants":
            continue
        try:
            if part == "training":
                found[part] = _their_training(device, settings, arguments.rounds)
            else:
                found[part] = _their_sampling(device, settings, int(part), arguments)
        except Exception as error:  # foreign code: that it does not run is the finding
            found[part] = f"{type(error).__name__}: {str(error)[:200]}"
        print(json.dumps({"theirs": {part: found[part]}}), flush=True)
        _free()
    return found


def _their_training(device: torch.device, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    theirs = TheirFamily(device, settings)
    case = "16x1024" if device.type == "cuda" else "4x64"
    data = make_case(case, settings["vocab_size"])
    for size in (16, 8, 4, 2, 1):
        batches = [{"0": data[start : start + size]} for start in range(0, len(data), size)]

        def work(batches: list[Any] = batches) -> None:
            for batch in batches:
                theirs.forward_backward(batch)

        try:
            work()
        except torch.OutOfMemoryError:
            _free()
            continue
        times = machine.interleaved({"pass": work}, device, rounds)["pass"]
        num_tokens = sum(datum.model_input.length for datum in data)
        rate = round(num_tokens / statistics.median(times), 1)
        return {"case": case, "tokens_per_s": rate, "sequences_at_once": size}
    raise torch.OutOfMemoryError("a single sequence does not fit")


def _their_sampling(
    device: torch.device, settings: dict[str, Any], count: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    with _folder(settings) as folder:
        model = _random_model(folder, device, eager=False)
    prompts = _Prompts(device, settings["vocab_size"], arguments)
    generate = Generate(model, prompts)
    times = machine.interleaved({"theirs": lambda: generate.decode(count)}, device, 1)["theirs"]
    return {"tokens_per_s": round(count * generate.new_tokens / statistics.median(times), 1)}


class _Prompts:
    """What `Generate` asks of our side."""

    def __init__(self, device: torch.device, vocab: int, arguments: argparse.Namespace) -> None:
        is_cuda = device.type == "cuda"
        self.device = device
        self.prompt_tokens = 128 if is_cuda else 16
        self.new_tokens = arguments.new_tokens if is_cuda else 8
        self._vocab = vocab

    def prompts(self, count: int, length: int) -> Any:
        return torch.randint(3, self._vocab, (count, length)).numpy()


def _compared(result: dict[str, Any], kind: str) -> dict[str, float]:
    """Ours over theirs, and in few bits over in full, in tokens a second."""
    found = {}
    for other in ("theirs", "full"):
        for part, rate in _rates(result.get(other, {})).items():
            own = _rates(result[kind]).get(part)
            if other != kind and own is not None:
                found[f"{part}_times_{other}"] = round(own / rate, 3)
    return found


def _rates(side: dict[str, Any]) -> dict[str, float]:
    return {
        part: found["tokens_per_s"]
        for part, found in side.items()
        if isinstance(found, dict) and "tokens_per_s" in found
    }


@contextlib.contextmanager
def _folder(settings: dict[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(settings), "utf-8")
        yield Path(name)


def _random_decoder(folder: Path, device: torch.device, kind: BaseWeights) -> Decoder:
    """Our own decoder where it runs the type, else `transformers`' modules."""
    try:
        config = read_config(folder)
    except UnsupportedModelError as error:
        foreign = read_foreign_config(folder, error)
        decoder = ForeignDecoder(foreign, _random_model(folder, device, eager=True))
        decoder.quantize(kind, device)
        return decoder
    ours = build(config, RandomWeights(device, _dtype(device), is_tied=config.is_tied), kind)
    ours.allow_packing()
    return ours


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _random_model(folder: Path, device: torch.device, *, eager: bool) -> Any:
    from transformers import AutoModelForCausalLM

    own = {"attn_implementation": "eager", "experts_implementation": "eager"} if eager else {}
    with device:
        torch.manual_seed(0)
        config = transformers_config(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=_dtype(device), **own)
    return model.eval().requires_grad_(False)


def _sizes(model: Any) -> list[tuple[int, bool]]:
    """Numbers of each matrix that tokens are multiplied with, and whether experts share it."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return [
        (weight.numel(), weight.ndim == 3 and "conv" not in name)
        for name, weight in model.named_parameters()
        if weight.ndim > 1 and (weight is head or weight is not embedding)
    ]


def _active_weights(sizes: list[tuple[int, bool]], settings: dict[str, Any]) -> float:
    share = settings.get("num_experts_per_tok", 1) / _num_experts(settings)
    return sum(size * (share if is_shared else 1) for size, is_shared in sizes)


def _weights_met(sizes: list[tuple[int, bool]], settings: dict[str, Any], count: int) -> float:
    """By a step of `count` sequences, if routers choose evenly."""
    missed = (1 - settings.get("num_experts_per_tok", 1) / _num_experts(settings)) ** count
    return sum(size * ((1 - missed) if is_shared else 1) for size, is_shared in sizes)


def _num_experts(settings: dict[str, Any]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(settings[name]) for name in names if name in settings), 1)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
