"""The base models an engine serves: loaded on first use, dropped when memory is short.

Models are shared by all adapters and never written to, so loading one again gives what it
gave before. A model that is pinned, because something is computing with it or holds a
cache of its activations, is never dropped.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from tinsmith.engine.base import BaseModelInfo
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.device import device_of, dtype_of
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.foreign.config import ForeignConfig
from tinsmith.engine.local.model.foreign.decoder import load_foreign
from tinsmith.engine.local.model.foreign.describing import read_foreign_config
from tinsmith.engine.local.model.foreign.trial import try_out
from tinsmith.engine.local.model.images.settings import read_image_rules
from tinsmith.engine.local.model.images.tower import check_tower, load_tower
from tinsmith.engine.local.model.images.vision import Vision
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.settings import end_tokens, read_config, with_images
from tinsmith.engine.local.model.sources import Progress, model_folder, no_progress, weights_nbytes
from tinsmith.engine.local.model.verifying.verification import verify
from tinsmith.engine.local.ranks.group import ALONE, Ranks
from tinsmith.engine.local.ranks.models import cut_config
from tinsmith.errors import EngineError
from tinsmith.memory import machine_bytes

logger = logging.getLogger(__name__)

_EXACT = (("cpu", torch.float32), ("cuda", torch.bfloat16))
"""Where `on_policy = "exact"` was tried and holds."""


class BaseModels:
    """The table of names, and the models in memory, least recently used first.

    A folder that has several names is read, compared and loaded once.
    """

    def __init__(
        self,
        config: LocalEngineConfig,
        progress: Progress = no_progress,
        ranks: Ranks = ALONE,
    ) -> None:
        if config.pack_weights and config.deterministic:
            raise EngineError(
                "pack_weights does not work in deterministic mode; turn one of them off"
            )
        if config.pack_weights and config.base_weights != "full":
            raise EngineError(
                f"pack_weights copies weights in full, and base_weights = {config.base_weights!r} "
                "keeps them in few bits; leave out one of them"
            )
        if config.ranks > 1 and config.base_weights != "full":
            raise EngineError(
                f"ranks = {config.ranks} divides weights that are kept in full, and base_weights = "
                f"{config.base_weights!r} keeps them in few bits; leave out one of them"
            )
        self._config = config
        self._ranks = ranks
        self._progress = progress
        self._device = device_of(config)
        self._dtype = dtype_of(config)
        if self._is_exact and (self._device.type, self._dtype) not in _EXACT:
            raise EngineError(
                'on_policy = "exact" works on the CPU in float32 and on CUDA in bfloat16, not on '
                f"{self._device.type} in {str(self._dtype).removeprefix('torch.')}; "
                "leave it out, or set dtype accordingly"
            )
        if self._is_exact and config.ranks > 1:
            raise EngineError('on_policy = "exact" takes one rank; leave out one of the two')
        self._folders: dict[str, Path] = {}
        self._configs: dict[Path, DecoderConfig] = {}
        self._loaded: OrderedDict[Path, Decoder] = OrderedDict()
        self._pins: Counter[Path] = Counter()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._config.models)

    @property
    def loaded(self) -> tuple[str, ...]:
        """The names, as far as they were asked for, of what is in memory now, least recently
        used first."""
        return tuple(
            name for place in self._loaded for name in self._folders if self._place(name) == place
        )

    @property
    def nbytes(self) -> int:
        return sum(decoder.nbytes for decoder in self._loaded.values())

    def sizes(self) -> list[int]:
        """Bytes of each model, loaded or not; what has several names counts once."""
        places = {}
        for name in self.names:
            with contextlib.suppress(Exception):  # a model that is refused takes nothing
                places[self._place(name)] = self._size(self.folder(name))
        return list(places.values())

    def _size(self, folder: Path) -> int:
        whole = weights_nbytes(folder, self._dtype.itemsize, self._config.base_weights)
        return whole // self._ranks.count

    def folder(self, name: str) -> Path:
        """Where the model's files are; a GGUF file is converted when first asked for."""
        if name not in self._config.models:
            known = ", ".join(self._config.models) or "none"
            raise EngineError(f"no base model called {name!r}; served: {known}")
        if name not in self._folders:
            source = self._config.models[name]
            self._folders[name] = self._ranks.first(
                lambda: model_folder(source, self._config, self._progress)
            )
        return self._folders[name]

    def _place(self, name: str) -> Path:
        """What all names of the same files have in common."""
        return self.folder(name).resolve()

    def config(self, name: str) -> DecoderConfig:
        """The whole model's shape, without loading it; what is in doubt about it is an error."""
        place = self._place(name)
        if place not in self._configs:
            folder = self.folder(name)
            try:
                config = read_config(folder)
            except UnsupportedModelError as error:
                if self._is_exact:
                    raise EngineError(
                        f'on_policy = "exact" is for models of our own decoder: {error}'
                    ) from None
                config = self._foreign_config(name, error)
            else:
                config = self._own_config(name, config)
            if self._config.ranks > 1:
                cut_config(config, 0, self._config.ranks)
            ends = end_tokens(folder, config.eos_token_ids)
            self._configs[place] = replace(config, eos_token_ids=ends)
        return self._configs[place]

    def _own_config(self, name: str, config: DecoderConfig) -> DecoderConfig:
        """Of a model that our own decoder runs, unless it is to do what that cannot: then that of
        `transformers`' modules."""
        if config.experts is not None and self._is_exact:
            raise EngineError(
                'on_policy = "exact" is not for models with experts: how many rows an expert has '
                "changes the last bits of its product; leave it out"
            )
        if config.recurring and self._is_exact:
            raise EngineError(
                'on_policy = "exact" is not for models with recurrent layers: token by token they '
                "add in another order than in training; leave it out"
            )
        if config.latent is not None and self._is_exact:
            raise EngineError(
                'on_policy = "exact" is not for models with latent attention: token by token it '
                "multiplies in another order than in training; leave it out"
            )
        rules = read_image_rules(self.folder(name))
        if rules is not None and self._is_exact:
            raise EngineError(
                'on_policy = "exact" is not for models that read images; leave it out'
            )
        is_whole = config.experts is None and not config.recurring and config.latent is None
        if self._config.ranks > 1 and not (is_whole and rules is None):
            reason = UnsupportedModelError(
                "our own decoder does not divide experts, recurrent layers, latent attention or "
                "vision towers among ranks"
            )
            return self._foreign_config(name, reason)
        if self._config.verify_models:
            self._compare(lambda: verify(self.folder(name), config, self._config.cache_folder))
        if rules is None:
            return config
        if self._config.verify_models:
            check_tower(self.folder(name), rules)
        return with_images(config, rules)

    def _foreign_config(self, name: str, reason: UnsupportedModelError) -> ForeignConfig:
        """Of a model that runs through `transformers`' modules, and why our own decoder does not
        run it."""
        folder = self.folder(name)
        config = read_foreign_config(folder, reason)
        if self._config.verify_models:
            self._compare(lambda: try_out(folder, config, self._config.cache_folder))
        return config

    @property
    def _is_exact(self) -> bool:
        return self._config.on_policy == "exact"

    def _compare(self, compare: Callable[[], None]) -> None:
        """On the first rank, for all."""

        def compared() -> None:
            try:
                compare()
            except EngineError:
                raise
            except Exception as error:  # foreign code on files from anywhere
                raise EngineError(
                    "its logits could not be compared with transformers' "
                    f"({type(error).__name__}: {error}). verify_models = false serves the model "
                    "all the same"
                ) from error

        self._ranks.first(compared)

    def info(self, name: str) -> BaseModelInfo:
        config = self.config(name)
        return BaseModelInfo(
            name=name,
            max_context_length=config.max_context_length,
            vocab_size=config.vocab_size,
            architecture=config.architecture,
            tokenizer_folder=self.folder(name),
            images=config.images,
        )

    def get(self, name: str) -> Decoder:
        """The model, in memory. It may be dropped again by a later call unless it is pinned."""
        place = self._place(name)
        if place not in self._loaded:
            config, folder = self.config(name), self.folder(name)
            self._make_room(name, folder)
            logger.info("loading %s from %s", name, folder)
            self._loaded[place] = self._load(folder, config)
            if self._is_exact:
                self._loaded[place].make_invariant()
            if self._may_pack(name, place):
                self._loaded[place].allow_packing()
        self._loaded.move_to_end(place)
        return self._loaded[place]

    def _load(self, folder: Path, config: DecoderConfig) -> Decoder:
        kind, device, dtype = self._config.base_weights, self._device, self._dtype
        image_bytes = self._config.image_cache_bytes or (2**31 if device.type == "cuda" else 2**28)
        if isinstance(config, ForeignConfig):
            return load_foreign(folder, config, device, dtype, kind, image_bytes, self._ranks)
        decoder = Decoder.load(folder, device, dtype, kind, self._ranks, config)
        if config.images is not None:
            tower = load_tower(folder, config.images, device, dtype)
            decoder.vision = Vision(config.images, tower, image_bytes)
        return decoder

    def has_room_for(self, name: str) -> bool:
        """Whether a model is in memory, or can come there now: what is pinned has to stay. One that
        never can is said to have room, and is refused by whoever loads it."""
        budget = self._config.memory_budget_bytes
        if budget is None or name not in self.names:
            return True
        try:
            place, needed = self._place(name), self._size(self.folder(name))
        except Exception:  # whatever is wrong with its files, it is no lack of room
            return True
        pinned = sum(d.nbytes for other, d in self._loaded.items() if self._pins[other])
        return place in self._loaded or needed > budget or pinned + needed <= budget

    def pin(self, name: str) -> Decoder:
        """The model, kept in memory until as many calls of `unpin`."""
        decoder = self.get(name)
        self._pins[self._place(name)] += 1
        return decoder

    def unpin(self, name: str) -> None:
        place = self._place(name)
        assert self._pins[place] > 0, f"{name} is not pinned"
        self._pins[place] -= 1

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[Decoder]:
        """The model, pinned for the length of a `with` block."""
        decoder = self.pin(name)
        try:
            yield decoder
        finally:
            self.unpin(name)

    def _may_pack(self, name: str, place: Path) -> bool:
        """Whether a model just loaded is to be packed. One that must be and cannot is dropped."""
        wanted, budget = self._config.pack_weights, self._config.memory_budget_bytes
        packed_bytes = self._loaded[place].packed_bytes
        if self._config.deterministic or wanted is False:
            return False
        room = machine_bytes() if budget is None else budget
        does_fit = budget is None or self.nbytes + packed_bytes <= budget
        if wanted and not does_fit:
            del self._loaded[place]
            raise EngineError(
                f"the packed weights of {name!r} take {packed_bytes:,} bytes more, which is beyond "
                f"the budget of {budget:,} bytes; raise memory_budget_bytes or leave out "
                "pack_weights"
            )
        return wanted or (does_fit and packed_bytes <= min(room, machine_bytes()) // 4)

    def _make_room(self, name: str, folder: Path) -> None:
        budget = self._config.memory_budget_bytes
        if budget is None:
            return
        needed = self._size(folder)
        idle = [other for other in self._loaded if not self._pins[other]]
        while self.nbytes + needed > budget and idle:
            dropped = idle.pop(0)
            logger.info("dropping %s to make room for %s", dropped, name)
            del self._loaded[dropped]
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        if self.nbytes + needed > budget:
            raise EngineError(
                f"base model {name!r} needs {needed:,} bytes, of the budget of {budget:,} bytes "
                f"{self.nbytes:,} are in use by other models; raise memory_budget_bytes"
            )
