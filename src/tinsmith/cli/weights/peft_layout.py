"""An adapter's files in PEFT's layout, made of those of a checkpoint, without torch.

A checkpoint has the hosted service's layout: its names (`engine.adapter_names`), and the matrices
of experts in one tensor of three dimensions, of leading size 1 where all experts share them. PEFT
has the model's own names, which are in the checkpoint's `adapter_config.json`, and vLLM a matrix
for each expert. What is one matrix of the model has one adapter there (`fused_modules`).

In types that have experts, `peft` takes every module with the name of an expert's projection for
one, also in dense layers and shared experts, and does not find these. As `target_parameters` it
finds them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tinsmith.cli.weights.fused_modules import JoinedFactor, join_modules, joined_ranks
from tinsmith.engine.adapter_names import (
    CONFIG,
    GATED_EXPERTS,
    MANIFEST,
    PLAIN_EXPERTS,
    PREFIX,
    TEXT_PART,
    UNEMBEDDING,
    WEIGHTS,
    without_text_part,
)
from tinsmith.engine.stored_tensors import Stored, encode_header, stored_tensors
from tinsmith.errors import ValidationError

_HEADS = ("lm_head", "embed_out")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

TYPES_WITH_EXPERTS = frozenset(
    (
        "afmoe",
        "beam",
        "cohere2_moe",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "ernie4_5_moe",
        "exaone_moe",
        "flex_olmo",
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe",
        "glm_moe_dsa",
        "hunyuan_v1_moe",
        "longcat_flash",
        "mellum",
        "olmoe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_omni_moe",
        "qwen3_omni_moe_text",
        "qwen3_omni_moe_thinker",
        "solar_open",
    )
)
"""Those in which `peft` takes projections for experts', by the type alone."""


def to_peft(folder: Path, base: Path | None = None) -> None:
    """Rewrite a checkpoint in a folder of one's own as PEFT's two files of an adapter.

    One without safetensors, and one that has PEFT's names already, are left as they are. `base` is
    the base model's folder, without which adapters of Mamba layers cannot be written, and `peft`
    does not find dense layers beside experts.
    """
    path = folder / WEIGHTS
    if not path.exists():
        return
    settings = json.loads((folder / CONFIG).read_text("utf-8"))
    stored = stored_tensors([path])
    if any(".w13." in name for name in stored):
        raise ValidationError(
            "the adapter has one A for gate and up together, also in shared experts (Inkling's "
            "`w13`), which neither PEFT nor a merged model of its files can have"
        )
    joined = join_modules(stored, base)
    named = _Names(settings.get("target_modules"), joined)
    parts = {
        new: _matrix_of(expert, tensor) if isinstance(tensor, Stored) else tensor
        for name, tensor in joined.items()
        for new, expert in named.of(name)
    }
    targets = {new.removeprefix(PREFIX).rsplit(".", 2)[0] for new in parts}
    parameters = _beside_experts(targets, base)
    if list(parts) == list(stored) and not parameters:
        return
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        entries = {new: part.entry for new, part in parts.items()}
        file.write(encode_header(entries, {"format": "pt"}))
        for part in parts.values():
            file.write(part.read_bytes())
    draft.replace(path)
    settings["target_modules"] = sorted(named.targets(targets - parameters))
    if parameters:
        ends = {".".join(each.split(".")[-2:]) for each in parameters}
        settings["target_parameters"] = sorted(f"{end}.weight" for end in ends)
    if ranks := joined_ranks(joined):
        # Their scale, alpha / rank, is that of the whole adapter.
        scale = settings["lora_alpha"] / settings["r"]
        alphas = {name: scale * rank for name, rank in ranks.items()}
        settings |= {"rank_pattern": ranks, "alpha_pattern": alphas}
    (folder / CONFIG).write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n", "utf-8")
    # It has the checksums of the files as they were.
    (folder / MANIFEST).unlink(missing_ok=True)


def _beside_experts(modules: set[str], base: Path | None) -> set[str]:
    """Those that `peft` would take for experts' projections, and that are not."""
    if base is None:
        return set()
    settings = json.loads((base / "config.json").read_text("utf-8"))
    if settings.get("model_type") not in TYPES_WITH_EXPERTS:
        return set()
    return {each for each in modules if each.endswith(_PROJECTIONS) and ".experts." not in each}


def _matrix_of(expert: int | None, tensor: Stored) -> Stored:
    """One expert's matrix, where it is of experts; what all of them share is that of each."""
    if expert is None:
        return tensor
    count = tensor.shape[0]
    size = tensor.num_bytes // count
    begin = tensor.begin + (0 if count == 1 else expert * size)
    return replace(tensor, shape=tensor.shape[1:], begin=begin, num_bytes=size)


class _Names:
    """PEFT's names of a checkpoint's tensors."""

    def __init__(self, targets: object, stored: Mapping[str, Stored | JoinedFactor]) -> None:
        """`targets` are the model's own names; a text in their place names none."""
        targets = targets if isinstance(targets, list) else []
        self._whole = {without_text_part(each): each for each in targets if TEXT_PART in each}
        self._head = next((each for each in targets if each in _HEADS), _HEADS[0])
        self._stored = stored

    def of(self, name: str) -> Iterator[tuple[str, int | None]]:
        """The names that a tensor becomes, each with the expert whose matrix it is."""
        hosted, letter, _ = name.removeprefix(PREFIX).rsplit(".", 2)
        module = self._head if hosted == UNEMBEDDING else self._whole.get(hosted, hosted)
        if len(self._stored[name].shape) == 2:
            yield f"{PREFIX}{module}.{letter}.weight", None
            return
        layer, _, which = module.rpartition(".")
        gate = f"{PREFIX}{hosted.rpartition('.')[0]}.w3.{letter}.weight"
        projection = (GATED_EXPERTS if gate in self._stored else PLAIN_EXPERTS)[which]
        for expert in range(self._num_experts(name)):
            yield f"{PREFIX}{layer}.{expert}.{projection}.{letter}.weight", expert

    def _num_experts(self, name: str) -> int:
        stem = name.rsplit(".", 2)[0]
        pair = (f"{stem}.lora_A.weight", f"{stem}.lora_B.weight")
        return max(self._stored[each].shape[0] for each in pair)

    def targets(self, modules: set[str]) -> set[str]:
        """What `adapter_config.json` calls them: the last parts of names where these suffice."""
        return modules if self._whole else {module.rpartition(".")[2] for module in modules}
