"""Adapters that PEFT or the hosted service wrote, as tensors of ours.

Every tensor of the file gets a place in our adapter, or the adapter is refused and the error names
the tensor; what the file leaves out is as in a fresh adapter. Ranks and scales may differ between
modules: ours has the largest rank, B takes up the scale, and the rest of B is zero. Where the file
has a matrix for each expert, those that our experts share must be equal. Where it has one adapter
for several modules of ours, each of them gets its rows of B.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tinsmith.engine.adapter_names import (
    CONFIG,
    GATED_EXPERTS,
    PLAIN_EXPERTS,
    WEIGHTS,
    fused_parts,
)
from tinsmith.engine.local.adapter_files.named_tensors import HostedNames, module_of, places_of
from tinsmith.engine.local.adapter_files.peft_config import PeftConfig, read_peft_config
from tinsmith.engine.local.adapter_files.tensor_files import read_tensors
from tinsmith.engine.local.model.families import DecoderConfig, Part
from tinsmith.engine.local.model.lora import Adapter, Layout
from tinsmith.engine.stored_tensors import Stored, stored_tensors
from tinsmith.errors import ValidationError
from tinsmith.types import LoraConfig

Shapes = Mapping[str, torch.Size]
"""Shapes of an adapter's tensors, by the hosted service's names."""

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 2**24
"""Ten times what the largest models' tensors need."""

_EXPERT = re.compile(r"(.+\.experts)\.([0-9]{1,6})\.(\w+)\.(lora_[AB]\.weight)")


def read_lora(folder: Path, config: DecoderConfig) -> LoraConfig:
    """The shape of an adapter of a model that can hold the one in `folder`."""
    settings = read_peft_config(folder / CONFIG)
    blank = _blank_adapter(config)
    parts = _parts(blank)
    stored = _read_header(_weights_file(folder))
    trained, rank = set(), 1
    for target, found in _found(stored, settings, blank).items():
        trained.add(parts[target])
        rank = max([rank, *(_needed_rank(piece, settings, stored) for piece in found)])
    return LoraConfig(
        rank=rank,
        train_attn="attn" in trained,
        train_mlp="mlp" in trained,
        train_unembed="unembed" in trained,
    )


def read_weights(folder: Path, adapter: Adapter) -> tuple[dict[str, Tensor], int]:
    """All tensors of an adapter, under the hosted service's names, and the size of the file."""
    settings = read_peft_config(folder / CONFIG)
    path = _weights_file(folder)
    stored = _read_header(path)
    pieces = _found(stored, settings, adapter)
    for target, found in pieces.items():
        if (needed := max(_needed_rank(p, settings, stored) for p in found)) > adapter.rank:
            raise ValidationError(
                f"{target!r} has rank {needed} in the checkpoint, the model {adapter.rank}"
            )
    reader = _Reader(settings, adapter.rank, read_tensors(path))
    tensors = {
        name: reader.read(name, pieces[name], shape) if name in pieces else _untrained(name, shape)
        for name, (_, shape) in places_of(adapter).items()
    }
    reader.check_all_used()
    return tensors, path.stat().st_size


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor of the file as a part of one of ours, or a part of it as one of ours."""

    name: str
    expert: int | None = None
    rows: slice | None = None
    """Of B, where the file has one adapter for several of our modules."""


def _found(
    stored: Mapping[str, Stored], settings: PeftConfig, adapter: Adapter
) -> dict[str, list[_Piece]]:
    """The file's tensors by those of ours that they belong to; the headers have been checked."""
    shapes = {name: shape for name, (_, shape) in places_of(adapter).items()}
    hosted = HostedNames(adapter)
    pieces: dict[str, list[_Piece]] = {}
    for name, tensor in stored.items():
        for target, piece in _targets(name, shapes, hosted.of):
            _check(piece, tensor, shapes[target], settings)
            pieces.setdefault(target, []).append(piece)
    for target, found in pieces.items():
        if _partner(target) not in pieces:
            raise ValidationError(f"tensor {_partner(target)!r} is missing", WEIGHTS)
        num_experts = max(shapes[target][0], shapes[_partner(target)][0])
        _check_each_is_there_once(target, found, num_experts)
    return pieces


def _check_each_is_there_once(target: str, pieces: Sequence[_Piece], num_experts: int) -> None:
    wanted: Sequence[int | None] = range(num_experts) if pieces[0].expert is not None else [None]
    seen: set[int | None] = set()
    for piece in pieces:
        if piece.expert in seen or piece.expert not in wanted:
            raise ValidationError(
                f"tensor {piece.name!r} is not expected: another tensor has its place, or there is "
                "no such expert",
                WEIGHTS,
            )
        seen.add(piece.expert)
    for expert in wanted:
        if expert not in seen:
            raise ValidationError(f"expert {expert} of {target!r} is missing", WEIGHTS)


def _targets(
    name: str, shapes: Shapes, rename: Callable[[str], str]
) -> Iterator[tuple[str, _Piece]]:
    """The tensors of ours that one of the file belongs to."""
    target = rename(name)
    if target in shapes:
        yield target, _Piece(name)
        return
    if found := _EXPERT.fullmatch(name.replace(".block_sparse_moe.", ".mlp.")):
        experts, number, projection, ending = found.groups()
        is_gated = rename(f"{experts}.w3.{ending}") in shapes
        table = GATED_EXPERTS if is_gated else PLAIN_EXPERTS
        names = {theirs: ours for ours, theirs in table.items()}
        target = rename(f"{experts}.{names.get(projection, projection)}.{ending}")
        if target in shapes:
            yield target, _Piece(name, expert=int(number))
            return
    targets = [rename(each) for each in fused_parts(name)]
    if targets and all(target in shapes for target in targets):
        bounds = itertools.accumulate((shapes[_as_b(each)][0] for each in targets), initial=0)
        for target, (first, last) in zip(targets, itertools.pairwise(bounds), strict=True):
            yield target, _Piece(name, rows=slice(first, last))
        return
    hint = ""
    if "lora_" not in name:
        hint = "; if it is a copy of the embeddings, save with save_embedding_layers=False"
    elif "lora_embedding_" in name:
        hint = "; adapters of the embedding are not supported"
    raise ValidationError(f"tensor {name!r} has no place in this model{hint}", WEIGHTS)


def _check(piece: _Piece, tensor: Stored, shape: torch.Size, settings: PeftConfig) -> None:
    """Whether what the file's header says of a tensor fits the one of ours."""
    name = piece.name
    if tensor.dtype not in _ITEM_BYTES:
        raise ValidationError(
            f"tensor {name!r} is {tensor.dtype}; known: {', '.join(_ITEM_BYTES)}", WEIGHTS
        )
    wanted = list(shape if piece.expert is None else shape[1:])
    own_rank = settings.rank_of(module_of(name))
    wanted[-1 if _is_b(name) else -2] = own_rank
    if piece.rows is not None and _is_b(name):
        # Rows below those of our modules may be of something that has no adapter here.
        wanted[0] = max(piece.rows.stop, tensor.shape[0] if tensor.shape else 0)
    if tensor.shape != wanted:
        raise ValidationError(
            f"tensor {name!r} has shape {tensor.shape} where the model and "
            f"{CONFIG} (rank {own_rank}) want {wanted}",
            WEIGHTS,
        )
    if tensor.num_bytes != math.prod(wanted) * _ITEM_BYTES[tensor.dtype]:
        raise ValidationError(f"tensor {name!r} has {tensor.num_bytes} bytes", WEIGHTS)


class _Reader:
    """The file's tensors, scaled and padded to a rank."""

    def __init__(self, settings: PeftConfig, rank: int, tensors: Mapping[str, Tensor]) -> None:
        self._settings = settings
        self._rank = rank
        self._tensors = tensors
        self._rows_read: dict[str, int] = {}

    def read(self, target: str, pieces: Sequence[_Piece], shape: torch.Size) -> Tensor:
        """One of our tensors, of its pieces."""
        if pieces[0].expert is None:
            return self._matrix(pieces[0])
        by_expert = {piece.expert: self._matrix(piece) for piece in pieces}
        first, *others = matrices = [by_expert[expert] for expert in range(len(pieces))]
        if shape[0] > 1:
            return torch.stack(matrices)
        if not all(torch.equal(first, other) for other in others):
            raise ValidationError(
                f"the experts have different matrices {target!r}; here all experts of a layer "
                "share it, so that this adapter cannot be held",
                WEIGHTS,
            )
        return first[None]

    def _matrix(self, piece: _Piece) -> Tensor:
        name = piece.name
        module = module_of(name)
        tensor = self._tensors[name].float()
        if _is_b(name):
            tensor = tensor * self._settings.b_factor(module, self._rank)
        if not tensor.isfinite().all():
            raise ValidationError(f"tensor {name!r} holds numbers that are not finite", WEIGHTS)
        if piece.rows is not None:
            tensor = self._part(piece, tensor)
        axis = -1 if _is_b(name) else -2
        if (missing := self._rank - tensor.shape[axis]) == 0:
            return tensor
        padded = list(tensor.shape)
        padded[axis] = missing
        return torch.cat([tensor, _untrained(name, torch.Size(padded))], axis)

    def _part(self, piece: _Piece, tensor: Tensor) -> Tensor:
        """A module's part of an adapter of several: its rows of B, and of A what they meet."""
        name, rows = piece.name, piece.rows
        assert rows is not None
        meets = self._tensors[_as_b(name)][rows].float().any(0)
        if not _is_b(name):
            return tensor[meets]
        self._rows_read[name] = max(self._rows_read.get(name, 0), rows.stop)
        return tensor[rows][:, meets]

    def check_all_used(self) -> None:
        """Rows that are of no module of ours must do nothing."""
        for name, num_rows in self._rows_read.items():
            if self._tensors[name][num_rows:].any():
                raise ValidationError(
                    f"tensor {name!r} changes rows after the first {num_rows}, which have no "
                    "adapter here",
                    WEIGHTS,
                )


def _needed_rank(piece: _Piece, settings: PeftConfig, stored: Mapping[str, Stored]) -> int:
    """The rank that ours needs for a piece. An adapter of several modules needs less than it has
    where each of its columns is for one of them, as in our own exports."""
    if piece.rows is None:
        return settings.rank_of(module_of(piece.name))
    return int(stored[_as_b(piece.name)].read()[piece.rows].any(0).sum())


def _read_header(path: Path) -> dict[str, Stored]:
    return stored_tensors([path], max_header_bytes=_MAX_HEADER_BYTES)


def _weights_file(folder: Path) -> Path:
    path = folder / WEIGHTS
    if not path.is_file():
        raise ValidationError(
            f"there is no {WEIGHTS}; other formats, which can run code when read, are not taken"
        )
    return path


def _untrained(name: str, shape: torch.Size) -> Tensor:
    """What the file leaves alone: B zero, and an A from which it can still learn."""
    if _is_b(name):
        return torch.zeros(shape)
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(0))


def _is_b(name: str) -> bool:
    return name.endswith(".lora_B.weight")


def _as_b(name: str) -> str:
    return name if _is_b(name) else _partner(name)


def _partner(name: str) -> str:
    """The B of an A, the A of a B."""
    a, b = ".lora_A.weight", ".lora_B.weight"
    return name.removesuffix(b) + a if _is_b(name) else name.removesuffix(a) + b


def _blank_adapter(config: DecoderConfig) -> Adapter:
    """One of rank 1 that trains everything, without memory: for its names and shapes."""
    lora = LoraConfig(rank=1)
    layout = Layout(config, lora)
    return Adapter("", lora, layout, torch.empty(layout.size, device="meta"), torch.float32)


def _parts(adapter: Adapter) -> dict[str, Part]:
    """The part of the model that each tensor is of."""
    projections = [place.projection for place in adapter.layout.places.values()]
    parts = [each.part for each in projections for _ in each.modules for _ in range(2)]
    return dict(zip(places_of(adapter), parts, strict=True))
