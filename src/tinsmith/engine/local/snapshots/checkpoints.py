"""Checkpoints: an adapter as a folder in the hosted service's layout.

    adapter_model.safetensors   the weights, under the hosted service's names
    adapter_config.json         PEFT's description
    optimizer.safetensors       Adam's moments by the same names (kinds "training" and "exact")
    gradients.safetensors       the pending gradient, if there was one (kind "exact")
    tinsmith.json               what this is, and size and checksum of every file above

Loading checks everything before it touches the adapter, so a damaged or foreign folder
changes nothing. The names of release 0.1 were PEFT's; both are read. A folder without
`tinsmith.json` is taken for an adapter that PEFT or the hosted service wrote; it has weights only.
`cli.weights.peft_layout` makes PEFT's files of it. Where folders are kept, and what they are
called, is the caller's affair.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from tinsmith.disk import FileRecord, describe_file, new_folder, write_file
from tinsmith.engine.adapter_names import (
    CONFIG,
    MANIFEST,
    PREFIX,
    UNEMBEDDING,
    WEIGHTS,
    hosted_module,
    without_text_part,
)
from tinsmith.engine.base import SnapshotInfo, SnapshotKind
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.snapshots.peft_config import peft_config, read_json, read_peft_config
from tinsmith.engine.local.snapshots.tensor_files import encode_tensors, read_tensors
from tinsmith.engine.stored_tensors import stored_tensors
from tinsmith.errors import EngineError, ValidationError
from tinsmith.types import LoraConfig

FORMAT = 1
OPTIMIZER = "optimizer.safetensors"
GRADIENTS = "gradients.safetensors"

_KINDS: tuple[SnapshotKind, ...] = get_args(SnapshotKind)
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(adapter: Adapter, folder: Path, kind: SnapshotKind) -> SnapshotInfo:
    """Write the adapter to `folder`, which must not exist; it appears whole or not at all."""
    places = _places(adapter)
    weights = _split(adapter.flat, places)
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
                for name, tensor in _split(vector, places).items()
            }
            parts = encode_tensors(moments, {"step": str(adapter.step)})
            files[OPTIMIZER] = write_file(draft / OPTIMIZER, parts)
        if kind == "exact" and adapter.grad is not None:
            gradients = _split(adapter.grad, places)
            files[GRADIENTS] = write_file(draft / GRADIENTS, encode_tensors(gradients, {}))
        manifest = Manifest(
            kind=kind,
            base_model=adapter.base_model,
            lora=adapter.lora,
            step=adapter.step,
            has_optimizer=kind != "sampler" and adapter.exp_avg is not None,
            files=files,
        )
        written = write_file(draft / MANIFEST, [_json(manifest.to_json())])
    size = sum(record.size for record in files.values()) + written.size
    return SnapshotInfo(size_bytes=size, step=adapter.step)


def load(adapter: Adapter, folder: Path, kind: SnapshotKind) -> SnapshotInfo:
    """Overwrite an adapter from a checkpoint of its shape and base model.

    Kind "sampler" takes the weights, and optimizer and pending gradient start afresh; "training"
    takes the optimizer's state too, "exact" also the pending gradient.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        flat, size = _read_foreign(adapter, folder, kind)
        _replace(adapter, flat)
        return SnapshotInfo(size_bytes=size, step=0)

    _check_fits(adapter, manifest, kind)
    wanted = _files_of(manifest, kind)
    for name in wanted:
        _verify(folder / name, manifest.files[name])
    flat = _joined(read_tensors(folder / WEIGHTS), adapter, WEIGHTS)
    moments: dict[str, Tensor] = {}
    if kind != "sampler" and manifest.has_optimizer:
        stored = read_tensors(folder / OPTIMIZER)
        for which in _MOMENTS:
            prefix = which + "."
            named = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
            moments[which] = _joined(named, adapter, OPTIMIZER)
    gradient = None
    if GRADIENTS in wanted:
        gradient = _joined(read_tensors(folder / GRADIENTS), adapter, GRADIENTS)
    step = 0 if kind == "sampler" else manifest.step
    _replace(adapter, flat, step=step, gradient=gradient, **moments)
    return SnapshotInfo(
        size_bytes=sum(manifest.files[name].size for name in wanted), step=adapter.step
    )


def read_lora(folder: Path) -> LoraConfig:
    """The shape of the adapter in a checkpoint: what one must be created with to load it."""
    manifest = read_manifest(folder)
    if manifest is not None:
        return manifest.lora
    rank = read_peft_config(folder / CONFIG).rank
    parts = {_part(_module(name)) for name in stored_tensors([_foreign_weights(folder)])}
    return LoraConfig(
        rank=rank,
        train_attn="attn" in parts,
        train_mlp="mlp" in parts,
        train_unembed="unembed" in parts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of `tinsmith.json`."""

    kind: SnapshotKind
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


def _files_of(manifest: Manifest, kind: SnapshotKind) -> list[str]:
    names = [WEIGHTS, CONFIG]
    if kind != "sampler":
        names.append(OPTIMIZER)
    if kind == "exact" and GRADIENTS in manifest.files:
        names.append(GRADIENTS)
    return names


def _check_fits(adapter: Adapter, manifest: Manifest, kind: SnapshotKind) -> None:
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


# Flat vectors and named tensors

_Place = tuple[int, torch.Size]


def _places(adapter: Adapter) -> dict[str, _Place]:
    """Where each named tensor lies in the adapter's vectors: its offset and shape."""
    start, names = adapter.flat.storage_offset(), _hosted_names(adapter)
    return {
        names[name]: (view.storage_offset() - start, view.shape)
        for name, view in adapter.named_tensors()
    }


def _hosted_names(adapter: Adapter) -> dict[str, str]:
    """From PEFT's names of the adapter's tensors to the hosted service's."""
    heads = adapter.unembedding_modules
    names = {}
    for name, _ in adapter.named_tensors():
        module, ending = _module(name), name.rsplit(".", 2)[1:]
        hosted = hosted_module(module, is_unembedding=module in heads)
        names[name] = ".".join([PREFIX + hosted, *ending])
    return names


def _split(vector: Tensor, places: Mapping[str, _Place]) -> dict[str, Tensor]:
    """Views of a vector's named parts, on the CPU."""
    vector = vector.detach().cpu()
    return {
        name: vector[offset : offset + math.prod(shape)].view(shape)
        for name, (offset, shape) in places.items()
    }


def _joined(tensors: Mapping[str, Tensor], adapter: Adapter, file: str) -> Tensor:
    """The vector whose named parts are `tensors`; they must be exactly those of the adapter."""
    places = _places(adapter)
    tensors = _renamed(tensors, adapter)
    for name in tensors.keys() ^ places.keys():
        problem = "is missing" if name in places else "has no place in this model"
        raise ValidationError(f"tensor {name!r} {problem}", file)
    vector = torch.empty(sum(math.prod(shape) for _, shape in places.values()))
    for name, part in _split(vector, places).items():
        if tensors[name].shape != part.shape:
            raise ValidationError(
                f"tensor {name!r} has shape {list(tensors[name].shape)} where the model has "
                f"{list(part.shape)}",
                file,
            )
        part.copy_(tensors[name])
    return vector


def _renamed(tensors: Mapping[str, Tensor], adapter: Adapter) -> dict[str, Tensor]:
    """The tensors under the hosted service's names, where they have PEFT's."""
    known = {without_text_part(old): new for old, new in _hosted_names(adapter).items()}
    # The hosted service leaves out the `self` of gpt-oss's attention.
    known |= {old.replace(".self_attn.", ".attn."): new for old, new in known.items()}
    return {known.get(without_text_part(name), name): tensor for name, tensor in tensors.items()}


# Adapters that PEFT wrote


def _read_foreign(adapter: Adapter, folder: Path, kind: SnapshotKind) -> tuple[Tensor, int]:
    """The weights as our adapter would hold them, and the size of the file."""
    if kind != "sampler":
        raise ValidationError(
            f"the checkpoint has no {MANIFEST}, so it holds weights only: no optimizer state"
        )
    config = read_peft_config(folder / CONFIG)
    if config.rank != adapter.rank:
        raise ValidationError(f"the checkpoint has rank {config.rank}, the model {adapter.rank}")
    path = _foreign_weights(folder)
    places = _places(adapter)
    stored = {n: t.float() for n, t in _renamed(read_tensors(path), adapter).items()}
    names = frozenset(stored)
    for name in names - places.keys():
        hint = ""
        if "lora_" not in name:
            hint = "; if it is a copy of the embeddings, save with save_embedding_layers=False"
        raise ValidationError(f"tensor {name!r} has no place in this model{hint}", WEIGHTS)
    for name, (_, shape) in places.items():
        if name in stored and _is_b(name):
            stored[name] = stored[name] * config.b_factor
        elif name not in stored:
            if _partner(name) in names:
                raise ValidationError(f"tensor {name!r} is missing", WEIGHTS)
            stored[name] = _untrained(name, shape)
    flat = _joined(stored, adapter, WEIGHTS)
    if not flat.isfinite().all():
        raise ValidationError("holds numbers that are not finite", WEIGHTS)
    return flat, path.stat().st_size


def _foreign_weights(folder: Path) -> Path:
    path = folder / WEIGHTS
    if not path.is_file():
        raise ValidationError(
            f"there is no {WEIGHTS}; other formats, which can run code when read, are not taken"
        )
    return path


def _untrained(name: str, shape: torch.Size) -> Tensor:
    """A module that the adapter leaves alone: B zero, and an A from which it can still learn."""
    if _is_b(name):
        return torch.zeros(shape)
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(0))


def _is_b(name: str) -> bool:
    return name.endswith(".lora_B.weight")


def _partner(name: str) -> str:
    """The B of an A, the A of a B."""
    a, b = ".lora_A.weight", ".lora_B.weight"
    return name.removesuffix(b) + a if _is_b(name) else name.removesuffix(a) + b


def _module(name: str) -> str:
    """`model.layers.0.mlp.up_proj`, of the name of its A or B."""
    return name.removeprefix(PREFIX).rsplit(".", 2)[0]


def _part(module: str) -> str:
    if module == UNEMBEDDING or module.rsplit(".", 1)[-1] == "lm_head":
        return "unembed"
    return "attn" if "att" in module.rpartition(".")[0].lower() else "mlp"


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode()
