"""A core that computes nothing: what is left of a call's time is the way to the engine and back."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from tinsmith.engine.base import Capabilities, Failure, FinishedPass, Health, Pass, Step
from tinsmith.types import ForwardBackwardOutput, LoraConfig, TensorData


class EchoCore:
    is_sampling = False

    def __init__(self, config: object) -> None:
        pass

    def capabilities(self) -> Capabilities:
        return Capabilities(models=(), max_lora_rank=64)

    def health(self) -> Health:
        return Health(alive=True)

    def create_adapter(self, adapter_id: str, base_model: str, lora: LoraConfig) -> Failure | None:
        return None

    def step(self, steps: Sequence[Step]) -> list[dict[str, float] | Failure]:
        return [{"step": 1.0} for _ in steps]

    def run_passes(self, passes: Sequence[Pass]) -> Generator[FinishedPass, None, None]:
        for index, each in enumerate(passes):
            outputs = [
                {"logprobs": TensorData.from_numpy(np.zeros(datum.model_input.length, np.float32))}
                for datum in each.data
            ]
            yield FinishedPass(index, ForwardBackwardOutput("x", outputs, {"loss:sum": 0.0}), 0.0)
