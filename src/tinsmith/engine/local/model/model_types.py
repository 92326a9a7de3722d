"""The model types that are known to work: what runs them, what adapters extend, what proves it.

Others may run through `transformers`' modules too, where the comparison at load time holds. The
page of models is written from this table, and tests compare it with the code.
"""

from __future__ import annotations

import difflib
import itertools
import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

Path = Literal["decoder", "transformers"]
"""Our own decoder, or the modules of `transformers` with our attention, experts and adapters."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = ("w1", "w3", "w2")
_DELTA_RULE = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "out_proj")
_LATENT = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")

_OWN = "tests/engine/model/test_decoder.py"
_FAMILIES = "tests/engine/families/test_families.py"
_VISION = "tests/engine/vision/test_models.py"
_DIVIDED = "with several ranks through transformers' modules"
_LATENTS = "sampling keeps a latent vector of each token, and no keys and values"
_UNDIVIDED = "with one rank only"
_IMAGES = "reads images with transformers 5.17; the vision tower is frozen and has no adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    name: str
    """The `model_type` of its `config.json`."""

    runs_on: Path
    adapted: tuple[str, ...]
    """Last parts of module names, the unembedding aside. Of experts, `w1` is gate, `w3` up and
    `w2` down; without a gate `w1` is up, and `w13` is gate and up as one."""

    test: str
    limits: str = ""
    transformers: str | None = None
    """The oldest release of `transformers` that computes it correctly, where that is newer than the
    oldest that we support."""


MODEL_TYPES = (
    *(
        ModelType(name=name, runs_on="decoder", adapted=(*_ATTENTION, *_MLP), test=_OWN)
        for name in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
    ),
    ModelType(
        name="qwen3_5_text",
        runs_on="decoder",
        adapted=(*_DELTA_RULE, *_ATTENTION, *_MLP),
        test=_FAMILIES,
        limits=_UNDIVIDED,
    ),
    *(
        ModelType(name=name, runs_on="decoder", adapted=adapted, test=_FAMILIES, limits=_DIVIDED)
        for name, adapted in {
            "qwen3_moe": (*_ATTENTION, *_EXPERTS),
            "qwen2_moe": (*_ATTENTION, *_MLP, *_EXPERTS),
            "mixtral": (*_ATTENTION, *_EXPERTS),
            "olmoe": (*_ATTENTION, *_EXPERTS),
            "gpt_oss": (*_ATTENTION, *_EXPERTS),
        }.items()
    ),
    ModelType(
        name="qwen3_next",
        runs_on="decoder",
        adapted=("in_proj_qkvz", "out_proj", *_ATTENTION, *_MLP, *_EXPERTS),
        test=_FAMILIES,
        limits=_UNDIVIDED,
    ),
    ModelType(
        name="qwen3_5_moe_text",
        runs_on="decoder",
        adapted=(*_DELTA_RULE, *_ATTENTION, *_MLP, *_EXPERTS),
        test=_FAMILIES,
        limits=_UNDIVIDED,
    ),
    *(
        ModelType(
            name=name,
            runs_on="decoder",
            adapted=(*_LATENT, *_MLP, *_EXPERTS),
            test=_FAMILIES,
            limits=f"{_LATENTS}; {_DIVIDED}",
        )
        for name in ("deepseek_v3", "kimi_k2")
    ),
    ModelType(
        name="kimi_k25",
        runs_on="decoder",
        adapted=(*_LATENT, *_MLP, *_EXPERTS),
        test="tests/engine/families/test_kimi.py",
        limits=f"{_LATENTS}; {_UNDIVIDED}; {_IMAGES}",
    ),
    *(
        ModelType(
            name=name,
            runs_on="decoder",
            adapted=adapted,
            test=_VISION,
            limits=f"{_UNDIVIDED}; {_IMAGES}",
        )
        for name, adapted in {
            "qwen3_5": (*_DELTA_RULE, *_ATTENTION, *_MLP),
            "qwen3_5_moe": (*_DELTA_RULE, *_ATTENTION, *_MLP, *_EXPERTS),
        }.items()
    ),
    *(
        ModelType(
            name=name,
            runs_on="transformers",
            adapted=adapted,
            test=_VISION,
            limits=_IMAGES,
            transformers="5.17",
        )
        for name, adapted in {
            "qwen3_vl": (*_ATTENTION, *_MLP),
            "qwen3_vl_moe": (*_ATTENTION, *_EXPERTS),
        }.items()
    ),
    *(
        ModelType(
            name=name,
            runs_on="transformers",
            adapted=(*_ATTENTION[:3], "r_proj", "o_proj", "w13", "w2"),
            test=_FAMILIES,
            limits="text only; scores that depend on distances take attention by hand, and "
            "sequences are sampled one by one; adapters are not exported",
            transformers="5.20",
        )
        for name in ("inkling_text", "inkling_mm_model")
    ),
    ModelType(
        name="nemotron_h",
        runs_on="transformers",
        adapted=(
            "gate_proj",
            "x_proj",
            "out_proj",
            "w1",
            "w2",
            "up_proj",
            "down_proj",
            *_ATTENTION,
        ),
        test=_FAMILIES,
        limits="needs transformers 5.17: 5.5.4 computes sequences longer than a chunk otherwise; "
        "where experts have a `moe_latent_size`, `fc1_latent_proj` and `fc2_latent_proj` are "
        "adapted as well",
        transformers="5.17",
    ),
)


def needed_transformers(model_type: str) -> str | None:
    """The release of `transformers` that the type needs, if the installed one is older."""
    needed = next((each.transformers for each in MODEL_TYPES if each.name == model_type), None)
    if needed is None or _release(version("transformers")) >= _release(needed):
        return None
    return needed


def _release(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


_LEAST_ALIKE = 3
"""Letters at the beginning that two related types have in common."""


def nearest_type(model_type: str) -> str:
    """The known type whose name is most like this one, from its beginning on; where none is, one of
    the plainest."""

    def likeness(name: str) -> tuple[int, float]:
        pairs = zip(name, model_type, strict=False)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return same, difflib.SequenceMatcher(a=name, b=model_type).ratio()

    best = max((known.name for known in MODEL_TYPES), key=likeness)
    if likeness(best)[0] < _LEAST_ALIKE:
        return "mixtral" if "moe" in model_type else "llama"
    return best
