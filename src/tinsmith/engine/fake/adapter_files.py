"""Fake adapters in files: two small files in a folder that appears whole or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any, get_args

import numpy as np

from tinsmith import disk
from tinsmith.engine.base import SavedAdapter, SavedKind
from tinsmith.engine.fake.model import Array, Bigram, BigramAdapter
from tinsmith.errors import ValidationError
from tinsmith.types import LoraConfig

_CONFIG_FILE = "adapter_config.json"
_STATE_FILE = "state.npz"


def save(adapter: BigramAdapter, folder: Path, kind: SavedKind) -> SavedAdapter:
    """Write the adapter to `folder`, which must not exist yet."""
    if folder.exists():
        raise FileExistsError("the folder exists already")
    arrays = {"weights": adapter.weights, "gain": adapter.gain}
    if kind != "sampler":
        arrays |= _present(exp_avg=adapter.exp_avg, exp_avg_sq=adapter.exp_avg_sq)
    if kind == "exact":
        arrays |= _present(grad=adapter.grad)
    state = io.BytesIO()
    np.savez(state, **arrays)  # type: ignore[arg-type]  # numpy's stub means `allow_pickle`
    config = {
        "base_model_name_or_path": adapter.model.name,
        "kind": kind,
        "step": adapter.step,
        "lora": adapter.lora.model_dump(),
        "state_sha256": hashlib.sha256(state.getvalue()).hexdigest(),
    }
    with disk.new_folder(folder) as draft:
        files = {_STATE_FILE: disk.write_file(draft / _STATE_FILE, [state.getvalue()])}
        config["sha256"] = _checksum(config)
        text = json.dumps(config).encode()
        files[_CONFIG_FILE] = disk.write_file(draft / _CONFIG_FILE, [text])
    return SavedAdapter(size_bytes=_size(folder), step=adapter.step, files=files)


def restore(adapter: BigramAdapter, folder: Path, kind: SavedKind) -> SavedAdapter:
    """Overwrite the adapter; nothing is changed when what was saved does not fit it."""
    config, arrays = _read(folder)
    kinds = get_args(SavedKind)
    if kinds.index(config["kind"]) < kinds.index(kind):
        missing = "pending gradients" if config["kind"] == "training" else "optimizer state"
        raise ValidationError(
            f"the checkpoint was saved as {config['kind']!r}: it has no {missing}"
        )
    _check_fits(adapter, config)
    has_optimizer = kind != "sampler"
    adapter.weights, adapter.gain = arrays["weights"], arrays["gain"]
    adapter.exp_avg = arrays.get("exp_avg") if has_optimizer else None
    adapter.exp_avg_sq = arrays.get("exp_avg_sq") if has_optimizer else None
    adapter.step = int(config["step"]) if has_optimizer else 0
    adapter.grad = arrays.get("grad") if kind == "exact" else None
    return SavedAdapter(size_bytes=_size(folder), step=adapter.step)


def load(model: Bigram, folder: Path) -> BigramAdapter:
    """A new adapter with the weights that were saved."""
    config, _ = _read(folder)
    adapter = BigramAdapter(model, LoraConfig(**config["lora"]))
    restore(adapter, folder, "sampler")
    return adapter


def _check_fits(adapter: BigramAdapter, config: dict[str, Any]) -> None:
    base_model = config["base_model_name_or_path"]
    if base_model != adapter.model.name:
        raise ValidationError(
            f"the checkpoint is of base model {base_model!r}, the model is of "
            f"{adapter.model.name!r}"
        )
    for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
        saved, wanted = config["lora"][name], getattr(adapter.lora, name)
        if saved != wanted:
            raise ValidationError(f"the checkpoint has {name} {saved}, the model {wanted}")


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    try:
        config: dict[str, Any] = json.loads((folder / _CONFIG_FILE).read_bytes())
        state = (folder / _STATE_FILE).read_bytes()
        if config.pop("sha256", None) != _checksum(config):
            raise ValueError(f"{_CONFIG_FILE} is damaged")
        if config["state_sha256"] != hashlib.sha256(state).hexdigest():
            raise ValueError(f"{_STATE_FILE} is damaged")
        with np.load(io.BytesIO(state)) as arrays:
            return config, dict(arrays)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        problem = f"there is no checkpoint of the fake engine called {folder.name!r}: {error}"
        raise ValidationError(problem) from None


def _checksum(config: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _present(**arrays: Array | None) -> dict[str, Array]:
    return {name: array for name, array in arrays.items() if array is not None}


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
