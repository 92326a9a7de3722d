"""Training in bfloat16 on the CPU: as close to float32 as `transformers` is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.engine.train.training_reference import (
    check_in_bfloat16,
)
from tinsmith.engine.local.model.lora import Adapter


def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(
    variant: str,
    model_folder: Callable[[str], Path],
    reference_model: Callable[[str], Any],
    new_adapter: Callable[..., Adapter],
) -> None:
    folder = model_folder(variant)
    check_in_bfloat16(torch.device("cpu"), variant, folder, reference_model, new_adapter)
