"""Passes of tiny models, and the slow, obvious reference that they are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import Failure, Pass
from tinsmith.engine.local.adapter_files import checkpoints
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.train.adamw import adamw_step
from tinsmith.engine.local.train.losses import datum_loss
from tinsmith.engine.local.train.passes import run_passes
from tinsmith.types import AdamParams, Datum, ForwardBackwardOutput, ModelInput

CPU = LocalEngineConfig(device="cpu")
RELATIVE = 1e-5


def make_datum(length: int, seed: int, *, targets_a_position: int = 0, **inputs: Any) -> Datum:
    generator = np.random.default_rng(seed)
    shape = (length, targets_a_position) if targets_a_position else (length,)
    return Datum(
        model_input=ModelInput.from_ints(generator.integers(0, 97, length)),
        loss_fn_inputs={
            "target_tokens": generator.integers(0, 97, shape),
            "weights": generator.normal(size=shape).astype(np.float32),
            **inputs,
        },
    )


def policy_datum(length: int, seed: int, loss_fn: str) -> Datum:
    """A datum for a policy-gradient loss, with log-probabilities near a uniform policy's."""
    generator = np.random.default_rng(seed)
    datum = make_datum(length, seed)
    inputs: dict[str, Any] = {
        "target_tokens": datum.loss_fn_inputs["target_tokens"],
        "logprobs": (generator.normal(size=length) - 5).astype(np.float32),
        "advantages": generator.normal(size=length).astype(np.float32),
    }
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = (generator.random(length) < 0.7).astype(np.float32)
    return Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


RAGGED = [make_datum(length, seed) for seed, length in enumerate((17, 1, 30, 9, 30))]


def run(
    decoder: Decoder,
    passes: Sequence[Pass],
    adapters: dict[str, Adapter],
    config: LocalEngineConfig = CPU,
) -> list[ForwardBackwardOutput | Failure]:
    results = {p.index: p.result for p in run_passes(passes, adapters, decoder, config) if p}
    return [results[index] for index in range(len(passes))]


def succeed(
    decoder: Decoder,
    data: Sequence[Datum],
    adapter: Adapter,
    config: LocalEngineConfig = CPU,
    loss_fn: str = "cross_entropy",
    **options: Any,
) -> ForwardBackwardOutput:
    request = Pass(adapter_id="a", data=data, loss_fn=loss_fn, **options)
    (result,) = run(decoder, [request], {"a": adapter}, config)
    assert isinstance(result, ForwardBackwardOutput), result
    return result


def assert_saved_adapter_continues(
    decoder: Decoder, data: Sequence[Datum], adapter: Adapter, restored: Adapter, folder: Path
) -> None:
    """Train, save, load into another adapter, train both on: they stay the same bit for bit."""
    config = LocalEngineConfig(device="cpu", deterministic=True)
    adam = AdamParams(learning_rate=0.01)
    succeed(decoder, data, adapter, config)
    adamw_step(adapter, adam)
    checkpoints.save(adapter, folder, "exact")
    checkpoints.load(restored, folder, "exact")
    for one in (adapter, restored):
        succeed(decoder, data, one, config)
        adamw_step(one, adam)
    assert torch.equal(adapter.flat, restored.flat)


class Reference:
    """The `transformers` model under an adapter's weights, by autograd."""

    def __init__(self, model: Any, adapter: Adapter, dtype: torch.dtype = torch.float32) -> None:
        self.model = model.to(dtype)
        self.dtype = dtype
        self.adapter = adapter
        self.leaves = {
            name: tensor.detach().clone().requires_grad_()
            for name, tensor in adapter.named_tensors()
        }
        self.rows = fused_rows(adapter)
        # Tied models list the matrix once, under the embedding's name.
        self.weights = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}

    def logits(self, tokens: Tensor) -> Tensor:
        weights = dict(self.weights)
        for name, b in self.leaves.items():
            if name.endswith("lora_B.weight"):
                a = self.leaves[name.replace("lora_B", "lora_A")]
                module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
                # Of experts (E, out, in), whichever of the two factors they share.
                update = self.adapter.scale * b @ a
                if update.ndim == 3:
                    self._add_to_experts(weights, module, update)
                    continue
                if module.endswith((".w13", ".w2")):
                    self._add_to_fused(weights, module, update)
                    continue
                weight, first = self.rows.get(module, (module, 0))
                whole = weights[weight + ".weight"].float().clone()
                whole[first : first + len(update)] += update
                weights[weight + ".weight"] = whole.to(self.dtype)
        logits: Tensor = self.call(weights, tokens).logits[0]
        return logits

    def tokens(self, model_input: ModelInput) -> Tensor:
        return torch.tensor(model_input.to_ints())

    def call(self, weights: dict[str, Tensor], tokens: Tensor) -> Any:
        return torch.func.functional_call(self.model, weights, (tokens[None],), tie_weights=False)

    def _add_to_experts(self, weights: dict[str, Tensor], module: str, update: Tensor) -> None:
        """`module` is the layer of experts, and `w1` for gate, `w2` for down, `w3` for up."""
        layer, _, letter = module.rpartition(".")
        experts = self.model.get_submodule(layer)
        name = f"{layer}.down_proj"
        if letter != "w2":
            name = f"{layer}.gate_up_proj" if experts.has_gate else f"{layer}.up_proj"
        whole = weights[name] if experts.is_transposed else weights[name].transpose(1, 2)
        whole = whole.float().clone()
        columns = slice(None)
        if letter in ("w1", "w3") and experts.has_gate:
            is_up, inner = letter == "w3", update.shape[1]
            interleaved, beside = slice(is_up, None, 2), slice(is_up * inner, (is_up + 1) * inner)
            # Older releases of transformers do not say it.
            is_beside = getattr(experts, "is_concatenated", "GptOss" not in type(experts).__name__)
            columns = beside if is_beside else interleaved
        whole[:, :, columns] += update.transpose(1, 2)
        whole = whole.to(self.dtype)
        weights[name] = whole if experts.is_transposed else whole.transpose(1, 2)

    def _add_to_fused(self, weights: dict[str, Tensor], module: str, update: Tensor) -> None:
        """Inkling's `w13` are the rows of gate and then of up, in an MLP or a shared expert."""
        mlp, _, letters = module.rpartition(".")
        number = mlp.rpartition(".")[2]
        is_shared = "shared_experts" in mlp
        stem, ending = (mlp.removesuffix(f".{number}"), "") if is_shared else (mlp, ".weight")
        names = ("gate_proj", "up_proj") if letters == "w13" else ("down_proj",)
        for name, part in zip(names, update.chunk(len(names)), strict=True):
            whole = weights[f"{stem}.{name}{ending}"].float().clone()
            (whole[int(number)] if is_shared else whole).add_(part)
            weights[f"{stem}.{name}{ending}"] = whole.to(self.dtype)

    def run(
        self, data: Sequence[Datum], loss_fn: str = "cross_entropy"
    ) -> tuple[float, list[Tensor], Tensor]:
        """Loss, log-probabilities per datum, and the gradient in the adapter's order."""
        total = torch.zeros(())
        logprobs = []
        for datum in data:
            inputs = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
            tokens = self.tokens(datum.model_input)
            targets = inputs["target_tokens"]
            scores = torch.log_softmax(self.logits(tokens).float(), dim=-1)
            chosen = scores.gather(1, targets.reshape(len(tokens), -1)).reshape(targets.shape)
            logprobs.append(chosen.detach())
            total = total + datum_loss(loss_fn, chosen, inputs, {})[0]
        total.backward()
        grads = [leaf.grad for leaf in self.leaves.values()]
        flat = torch.zeros_like(self.adapter.flat)
        for (_, view), grad in zip(self._views(flat), grads, strict=True):
            view.copy_(grad)
        return total.item(), logprobs, flat

    def _views(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        original = self.adapter.flat.clone()
        names = []
        for name, tensor in self.adapter.named_tensors():
            offset = tensor.storage_offset() - self.adapter.flat.storage_offset()
            names.append((name, flat[offset : offset + tensor.numel()].view(tensor.shape)))
        assert torch.equal(original, self.adapter.flat)
        return names


def fused_rows(adapter: Adapter) -> dict[str, tuple[str, int]]:
    """Modules whose weight is some rows of another's: that one's name, and the first row."""
    found = {}
    for place in adapter.layout.places.values():
        projection = place.projection
        name, first_module = projection.name, projection.modules[0]
        if first_module.endswith(".in_proj_q"):
            name = first_module + "kv"
        if (projection.layer is None or name != projection.name) and len(projection.modules) > 1:
            firsts = itertools.accumulate(projection.outputs, initial=0)
            for module, first in zip(projection.modules, firsts, strict=False):
                found[module] = (name, first)
    return found


def assert_close(actual: Tensor, expected: Tensor, relative: float = RELATIVE) -> None:
    """Within `relative` of the expected tensor's norm."""
    assert expected.norm() > 0
    assert (actual - expected).norm() <= relative * expected.norm()


def check_a_broken_tenant_fails_alone(
    decoder: Decoder, new_adapter: Callable[..., Adapter], value: float
) -> None:
    broken, healthy = new_adapter(decoder), new_adapter(decoder, fill_seed=12)
    alone = new_adapter(decoder, fill_seed=12)
    broken.flat.fill_(value)
    passes = [
        Pass(adapter_id=name, data=RAGGED, loss_fn="cross_entropy")
        for name in ("broken", "healthy")
    ]
    failure, result = run(decoder, passes, {"broken": broken, "healthy": healthy})
    assert isinstance(failure, Failure) and failure.category == "user" and broken.grad is None
    assert isinstance(result, ForwardBackwardOutput)
    succeed(decoder, RAGGED, alone)
    assert healthy.grad is not None and alone.grad is not None
    assert_close(healthy.grad, alone.grad, 1e-6 if decoder.dtype == torch.float32 else 5e-2)


def differences(
    output: ForwardBackwardOutput, adapter: Adapter, logprobs: list[Tensor], grad: Tensor
) -> tuple[float, float]:
    """Mean difference of log-probabilities, and relative difference of gradients."""
    assert adapter.grad is not None and adapter.grad.dtype == torch.float32
    found = torch.cat([tensors["logprobs"].to_torch() for tensors in output.loss_fn_outputs])
    relative = (adapter.grad.cpu() - grad).norm() / grad.norm()
    return (found - torch.cat(logprobs)).abs().mean().item(), relative.item()


def check_in_bfloat16(
    device: torch.device,
    variant: str,
    folder: Path,
    build: Callable[[str], Any],
    new_adapter: Callable[..., Adapter],
) -> None:
    """Ours may be at most half as far again from float32 as `transformers` in bfloat16 is.

    These random models are far worse conditioned than trained ones, so that no fixed number
    would say much.
    """
    decoder = Decoder.load(folder, device, torch.bfloat16)
    adapter, on_cpu = new_adapter(decoder), new_adapter(Decoder.load(folder))
    _, logprobs, grad = Reference(build(variant), on_cpu).run(RAGGED)
    _, rounded, rounded_grad = Reference(build(variant), on_cpu, torch.bfloat16).run(RAGGED)
    floor = (torch.cat(rounded) - torch.cat(logprobs)).abs().mean().item()
    grad_floor = ((rounded_grad - grad).norm() / grad.norm()).item()
    output = succeed(decoder, RAGGED, adapter)
    ours, our_grad = differences(output, adapter, logprobs, grad)
    print(f"{variant}: log-probabilities {ours:.1e}, transformers {floor:.1e}")
    print(f"{variant}: gradient {our_grad:.1e}, transformers {grad_floor:.1e}")
    assert ours <= 1.5 * floor
    assert our_grad <= 1.5 * grad_floor
