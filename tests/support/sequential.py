"""The slow, obvious way: operations of models, one after another, on one engine that never dies.

A simulated server's answers are compared with these, bit by bit.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from tinsmith.engine.base import Failure, Pass, SavedKind, Step
from tinsmith.engine.fake import FakeEngine, FakeEngineConfig, FakeModel
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    LoraConfig,
    ModelInput,
)
from tinsmith.wire import proto

MODEL = FakeModel(vocab_size=16)
Outcome = bytes | dict[str, Any] | str
"""A pass's output, another operation's answer, or the words of its failure."""


@dataclass(slots=True, eq=False)
class Operation:
    """A numbered request of a client, and what became of it."""

    kind: str
    fields: dict[str, Any]
    data: list[Datum] = field(default_factory=list)
    seq_id: int = 0
    request_id: str = ""
    outcome: Outcome | None = None
    waits_in_vain: bool = False
    """Whether a number before it is missing for ever, so that it has to fail."""

    @property
    def is_pass(self) -> bool:
        return self.kind in ("forward", "forward_backward")

    def body(self, model_id: str) -> bytes:
        if self.is_pass:
            inputs = ForwardBackwardInput(self.data, "cross_entropy")
            kind = ForwardRequest if self.kind == "forward" else ForwardBackwardRequest
            return proto.encode_pass(kind(inputs, model_id, self.seq_id))
        return orjson.dumps({"model_id": model_id, "seq_id": self.seq_id, **self.fields})


def random_pass(random: random.Random, kind: str) -> Operation:
    tokens = [random.randrange(MODEL.vocab_size) for _ in range(random.randrange(3, 9))]
    inputs = {"target_tokens": tokens[1:], "weights": [random.random() for _ in tokens[1:]]}
    return Operation(kind, {}, [Datum(ModelInput.from_ints(tokens[:-1]), inputs)])


def step(learning_rate: float) -> Operation:
    params = AdamParams(learning_rate=learning_rate)
    return Operation("optim_step", {"adam_params": params.to_wire()})


def save(name: str | None, *, overwrite: bool = False) -> Operation:
    return Operation("save_weights", {"path": name, "overwrite": overwrite})


def save_for_sampler(name: str) -> Operation:
    return Operation("save_weights_for_sampler", {"path": name})


def load(path: str, *, optimizer: bool) -> Operation:
    return Operation("load_weights", {"path": path, "optimizer": optimizer})


@dataclass(frozen=True, slots=True)
class Saved:
    folder: Path
    kind: SavedKind


class Sequential:
    """Checkpoints are kept by path; who may read them is for others to know."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engine = FakeEngine(FakeEngineConfig(models=(MODEL,)))
        self.saved: dict[str, Saved] = {}

    async def create(self, model_id: str, lora: LoraConfig) -> None:
        assert await self._engine.create_adapter(model_id, MODEL.name, lora) is None

    async def run(self, model_id: str, operation: Operation) -> Outcome:
        """Carry out an operation, and how it ends."""
        runs: dict[str, Callable[..., Any]] = {
            "forward": self._pass,
            "forward_backward": self._pass,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load,
        }
        outcome: Outcome = await runs[operation.kind](model_id, operation)
        return outcome

    async def restore(self, model_id: str, saved: Saved, kind: SavedKind) -> None:
        info = await self._engine.restore(model_id, saved.folder, kind)
        assert not isinstance(info, Failure), info

    def delete(self, path: str) -> None:
        del self.saved[path]

    def paths_of(self, model_id: str) -> list[str]:
        return sorted(path for path in self.saved if path.startswith(f"tinker://{model_id}/"))

    async def _pass(self, model_id: str, operation: Operation) -> Outcome:
        item = Pass(
            adapter_id=model_id,
            data=operation.data,
            loss_fn="cross_entropy",
            loss_fn_config={},
            forward_only=operation.kind == "forward",
        )
        [finished] = [finished async for finished in self._engine.run_passes([item])]
        assert not isinstance(finished.result, Failure), finished.result
        return proto.encode_output(finished.result)

    async def _step(self, model_id: str, operation: Operation) -> Outcome:
        params = AdamParams(**operation.fields["adam_params"])
        [result] = await self._engine.step([Step(adapter_id=model_id, params=params)])
        assert not isinstance(result, Failure), result
        return {"metrics": result}

    async def _save(self, model_id: str, operation: Operation) -> Outcome:
        path = f"tinker://{model_id}/weights/{operation.fields['path']}"
        if path in self.saved and not operation.fields["overwrite"]:
            return f"{path} exists already; choose another name, or save with overwrite"
        return await self._saved(model_id, path, "training", operation.kind)

    async def _save_for_sampler(self, model_id: str, operation: Operation) -> Outcome:
        path = f"tinker://{model_id}/sampler_weights/{operation.fields['path']}"
        if path in self.saved:
            return f"{path} exists already; choose another name"
        return await self._saved(model_id, path, "sampler", operation.kind)

    async def _saved(self, model_id: str, path: str, kind: SavedKind, answer: str) -> Outcome:
        folder = self._folder / uuid.uuid4().hex
        info = await self._engine.save(model_id, folder, kind)
        assert not isinstance(info, Failure), info
        self.saved[path] = Saved(folder, kind)
        return {"path": path, "type": answer}

    async def _load(self, model_id: str, operation: Operation) -> Outcome:
        path, optimizer = operation.fields["path"], operation.fields["optimizer"]
        if (saved := self.saved.get(path)) is None:
            return f"there is no checkpoint {path}"
        if optimizer and saved.kind == "sampler":
            return f"{path} holds no optimizer state; load it without"
        await self.restore(model_id, saved, "training" if optimizer else "sampler")
        return {"path": path, "model_id": model_id, "type": "load_weights"}
