"""An adapter as a folder, in the hosted service's layout: what checkpoints are made of.

    adapter_model.safetensors   the weights, under the hosted service's names
    adapter_config.json         PEFT's description
    optimizer.safetensors       Adam's moments by the same names (kinds "training" and "exact")
    gradients.safetensors       the pending gradient, if there was one (kind "exact")
    tinsmith.json               what this is, and size and checksum of every file above

Loading checks everything before it touches the adapter, so a damaged or foreign folder
changes nothing. The names of release 0.1 were PEFT's; both are read. A folder without
`tinsmith.json` is taken for an adapter that PEFT or the hosted service wrote (`foreign`); it has
weights only.
`cli.weights.peft_layout` makes PEFT's files of it. Where folders are kept, and what they are
called, is the caller's affair.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from tinsmith.disk import FileRecord, describe_file, new_folder, write_file
from tinsmith.engine.adapter_names import CONFIG, MANIFEST, WEIGHTS
from tinsmith.engine.base import SavedAdapter, SavedKind
from tinsmith.engine.local.adapter_files import foreign
from tinsmith.engine.local.adapter_files.copies import begin_copies
from tinsmith.engine.local.adapter_files.named_tensors import joined, places_of, split
from tinsmith.engine.local.adapter_files.peft_config import peft_config, read_json
from tinsmith.engine.local.adapter_files.tensor_files import encode_tensors, read_tensors
from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.errors import EngineError, ValidationError
from tinsmith.types import LoraConfig

FORMAT = 1
OPTIMIZER = "optimizer.safetensors"
GRADIENTS = "gradients.safetensors"

_KINDS: tuple[SavedKind, ...] = get_args(SavedKind)
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(adapter: Adapter, folder: Path, kind: SavedKind) -> SavedAdapter:
    """Write the adapter to `folder`, which must not exist; it appears whole or not at all."""
    places = places_of(adapter)
    weights = split(adapter.flat, places)
    config = peft_config(adapter.base_model, adapter.rank, adapter.modules)
    with new_folder(folder) as draft:
        files = {
            WEIGHTS: write_file(draft / WEIGHTS, encode_tensors(weights, {"format": "pt"})),
            CONFIG: write_file(draft / CONFIG, [_json(config)]),
        }
        if kind != "sampler":
            moments = {
                f"{which}.{name}": tensor
                for which in _MOMENTS
                if (vector := getattr(adapter, which)) is not None
                for name, tensor in split(vector, places).items()
            }
            parts = encode_tensors(moments, {"step": str(adapter.step)})
            files[OPTIMIZER] = write_file(draft / OPTIMIZER, parts)
        if kind == "exact" and adapter.grad is not None:
            gradients = split(adapter.grad, places)
            files[GRADIENTS] = write_file(draft / GRADIENTS, encode_tensors(gradients, {}))
        manifest = Manifest(
            kind=kind,
            base_model=adapter.base_model,
            lora=adapter.lora,
            step=adapter.step,
            has_optimizer=kind != "sampler" and adapter.exp_avg is not None,
            files=files,
        )
        written = {MANIFEST: write_file(draft / MANIFEST, [_json(manifest.to_json())]), **files}
    size = sum(record.size for record in written.values())
    return SavedAdapter(size_bytes=size, step=adapter.step, files=written)


def begin_save(adapter: Adapter, folder: Path, kind: SavedKind) -> Callable[[], SavedAdapter]:
    """`save` of the adapter as it is now, whatever becomes of it; to be called in any thread."""
    wanted = {"sampler": (), "training": _MOMENTS, "exact": (*_MOMENTS, "grad")}[kind]
    found = {name: getattr(adapter, name) for name in ("flat", *wanted)}
    fetch = begin_copies({name: each for name, each in found.items() if each is not None})
    base_model, lora, layout, step = adapter.base_model, adapter.lora, adapter.layout, adapter.step

    def finish() -> SavedAdapter:
        vectors = fetch()
        copy = Adapter(base_model, lora, layout, vectors.pop("flat"), torch.float32)
        copy.step = step
        for name, vector in vectors.items():
            setattr(copy, name, vector)
        return save(copy, folder, kind)

    return finish


def load(adapter: Adapter, folder: Path, kind: SavedKind) -> SavedAdapter:
    """Overwrite an adapter from a checkpoint of its shape and base model.

    Kind "sampler" takes the weights, and optimizer and pending gradient start afresh; "training"
    takes the optimizer's state too, "exact" also the pending gradient.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return _load_foreign(adapter, folder, kind)

    _check_fits(adapter, manifest, kind)
    wanted = _files_of(manifest, kind)
    for name in wanted:
        _verify(folder / name, manifest.files[name])
    flat = joined(read_tensors(folder / WEIGHTS), adapter, WEIGHTS)
    moments: dict[str, Tensor] = {}
    if kind != "sampler" and manifest.has_optimizer:
        stored = read_tensors(folder / OPTIMIZER)
        for which in _MOMENTS:
            prefix = which + "."
            named = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
            moments[which] = joined(named, adapter, OPTIMIZER)
    gradient = None
    if GRADIENTS in wanted:
        gradient = joined(read_tensors(folder / GRADIENTS), adapter, GRADIENTS)
    step = 0 if kind == "sampler" else manifest.step
    _replace(adapter, flat, step=step, gradient=gradient, **moments)
    return SavedAdapter(
        size_bytes=sum(manifest.files[name].size for name in wanted), step=adapter.step
    )


def read_lora(folder: Path, config: DecoderConfig) -> LoraConfig:
    """The shape of the adapter in a checkpoint: what one must be created with to load it."""
    manifest = read_manifest(folder)
    return foreign.read_lora(folder, config) if manifest is None else manifest.lora


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of `tinsmith.json`."""

    kind: SavedKind
    base_model: str
    lora: LoraConfig
    step: int
    has_optimizer: bool
    """Whether there are moments to load; before the first step there are none."""

    files: Mapping[str, FileRecord]

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "format": FORMAT,
            "kind": self.kind,
            "base_model": self.base_model,
            "lora": self.lora.model_dump(),
            "step": self.step,
            "has_optimizer": self.has_optimizer,
            "files": {name: asdict(record) for name, record in self.files.items()},
        }
        return {**content, "sha256": hashlib.sha256(_json(content)).hexdigest()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Manifest:
        rest = {key: value for key, value in content.items() if key != "sha256"}
        if content.get("sha256") != hashlib.sha256(_json(rest)).hexdigest():
            raise EngineError(f"{MANIFEST} is damaged: it does not match its own checksum")
        if content.get("format") != FORMAT:
            raise ValidationError(
                f"is {content.get('format')!r}; this version reads {FORMAT}", f"{MANIFEST}.format"
            )
        try:
            manifest = cls(
                kind=content["kind"],
                base_model=content["base_model"],
                lora=LoraConfig.model_validate(content["lora"]),
                step=content["step"],
                has_optimizer=content["has_optimizer"],
                files={
                    name: FileRecord(record["size"], record["sha256"])
                    for name, record in content["files"].items()
                },
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValidationError(f"is incomplete: {error!r}", MANIFEST) from None
        known = {WEIGHTS, CONFIG, OPTIMIZER, GRADIENTS}
        if manifest.kind not in _KINDS or not {WEIGHTS, CONFIG} <= manifest.files.keys() <= known:
            raise ValidationError("does not describe a checkpoint", MANIFEST)
        return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """What a checkpoint of ours says of itself; None for a folder that is not ours."""
    if not folder.is_dir():
        raise ValidationError(f"there is no checkpoint called {folder.name!r}")
    path = folder / MANIFEST
    return Manifest.from_json(read_json(path)) if path.exists() else None


def _load_foreign(adapter: Adapter, folder: Path, kind: SavedKind) -> SavedAdapter:
    if kind != "sampler":
        raise ValidationError(
            f"the checkpoint has no {MANIFEST}, so it holds weights only: no optimizer state"
        )
    tensors, size = foreign.read_weights(folder, adapter)
    _replace(adapter, joined(tensors, adapter, WEIGHTS))
    return SavedAdapter(size_bytes=size, step=0)


def _files_of(manifest: Manifest, kind: SavedKind) -> list[str]:
    names = [WEIGHTS, CONFIG]
    if kind != "sampler":
        names.append(OPTIMIZER)
    if kind == "exact" and GRADIENTS in manifest.files:
        names.append(GRADIENTS)
    return names


def _check_fits(adapter: Adapter, manifest: Manifest, kind: SavedKind) -> None:
    if _KINDS.index(kind) > _KINDS.index(manifest.kind):
        missing = "pending gradients" if manifest.kind == "training" else "optimizer state"
        raise ValidationError(f"the checkpoint was saved as {manifest.kind!r}: it has no {missing}")
    if kind != "sampler" and OPTIMIZER not in manifest.files:
        raise ValidationError("names no optimizer state", f"{MANIFEST}.files")
    if manifest.base_model != adapter.base_model:
        raise ValidationError(
            f"the checkpoint is of base model {manifest.base_model!r}, the model is of "
            f"{adapter.base_model!r}"
        )
    for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
        saved, present = getattr(manifest.lora, name), getattr(adapter.lora, name)
        if saved != present:
            raise ValidationError(
                f"the checkpoint has {name} {saved}, the model {present}: create the model with "
                "the checkpoint's configuration"
            )


def _verify(path: Path, expected: FileRecord) -> None:
    try:
        found = describe_file(path)
    except FileNotFoundError:
        raise EngineError(f"{path.name} is missing from checkpoint {path.parent.name!r}") from None
    if found.size != expected.size:
        raise EngineError(
            f"{path.name} of checkpoint {path.parent.name!r} is damaged: it has {found.size} "
            f"bytes instead of {expected.size}"
        )
    if found.sha256 != expected.sha256:
        raise EngineError(
            f"{path.name} of checkpoint {path.parent.name!r} is damaged: its checksum differs"
        )


def _replace(
    adapter: Adapter,
    flat: Tensor,
    *,
    step: int = 0,
    gradient: Tensor | None = None,
    exp_avg: Tensor | None = None,
    exp_avg_sq: Tensor | None = None,
) -> None:
    device = adapter.flat.device
    # Whatever may run out of memory comes before the first change.
    state = [t if t is None else t.to(device) for t in (gradient, exp_avg, exp_avg_sq)]
    adapter.flat.copy_(flat)
    adapter.grad, adapter.exp_avg, adapter.exp_avg_sq = state
    adapter.step = step


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode()
