"""What a model sees in images: the output of its vision tower, kept by content.

The tower is frozen and has no adapter, so what it makes of an image is always the same: it is
computed once, by itself whatever else is asked, and kept under the owner and the digest of the
file. No owner finds another's image. When memory is short, the owner whose images take the most
loses the one used longest ago.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinsmith.engine.images import ImageRules
from tinsmith.engine.local.model.images.pixels import read_patches
from tinsmith.types import ImageChunk

TOWER_ATTENTION = "sdpa"
"""Written out, the scores of an image of 65,536 patches, which a file of 100 kilobytes can be, take
256 GiB for 16 heads."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as the language model reads it."""

    grid: tuple[int, int]
    """Rows and columns of tokens."""

    features: tuple[Tensor, ...]
    """(tokens, d) each: in place of embeddings, then what is added after each of the first layers
    where the model does that."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.features)


class Vision:
    """The vision tower of one base model, and what it saw."""

    def __init__(self, rules: ImageRules, tower: Any, max_bytes: int) -> None:
        self._rules = rules
        self._tower = tower
        self._max_bytes = max_bytes
        self._kept: dict[str, OrderedDict[bytes, Picture]] = {}
        """For each owner, the picture used last at the end."""
        self._bytes: Counter[str] = Counter()

    @property
    def tower_nbytes(self) -> int:
        """What the tower takes."""
        return sum(parameter.nbytes for parameter in self._tower.parameters())

    @property
    def nbytes(self) -> int:
        """What pictures take."""
        return self._bytes.total()

    def see(self, chunk: ImageChunk, owner: str) -> Picture:
        """The picture of an image; a file that cannot be decoded is a `ValidationError`."""
        digest = hashlib.sha256(chunk.data).digest()
        if (own := self._kept.get(owner)) is not None and digest in own:
            own.move_to_end(digest)
            return own[digest]
        patches, grid = read_patches(chunk, self._rules)
        picture = self.look(torch.from_numpy(patches), grid)
        self._kept.setdefault(owner, OrderedDict())[digest] = picture
        self._bytes[owner] += picture.nbytes
        self._give_way(picture)
        return picture

    def look(self, patches: Tensor, grid: tuple[int, int]) -> Picture:
        """Run the tower on the patches of one image."""
        rows, columns = grid
        merge = self._rules.merge_size
        sizes = torch.tensor([[1, rows * merge, columns * merge]], device=self._tower.device)
        # Also while sampling the outcome is a plain tensor, which training may use later.
        with torch.inference_mode(mode=False), torch.no_grad():
            values = patches.to(self._tower.device, self._tower.dtype)
            output = self._tower(values, grid_thw=sizes, return_dict=True)
            deep = getattr(output, "deepstack_features", None) or ()
            return Picture(grid, (output.pooler_output, *deep))

    def _give_way(self, newest: Picture) -> None:
        """Drop pictures until the rest has room; the newest is in use and stays."""
        while self.nbytes > self._max_bytes:
            for owner, _ in self._bytes.most_common():
                own = self._kept[owner]
                digest = next((d for d, picture in own.items() if picture is not newest), None)
                if digest is not None:
                    break
            else:
                return
            self._bytes[owner] -= own.pop(digest).nbytes
            if not own:
                del self._kept[owner], self._bytes[owner]
