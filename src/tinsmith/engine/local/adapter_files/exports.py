"""Whether an export does what the adapter does: loaded back by its readers, logits compared.

What an export should compute is worked out here the plain way: the base model in `transformers`
with B·A added to the matrices that the adapter names. The export is then loaded as a user would
load it. One model is in memory at a time, in float32 where that is not too much.
"""

from __future__ import annotations

import gc
import importlib.util
import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tinsmith.engine.adapter_names import CONFIG, PREFIX, WEIGHTS
from tinsmith.engine.local.adapter_files.peft_config import read_json
from tinsmith.engine.local.adapter_files.tensor_files import read_tensors
from tinsmith.engine.local.model.experts.foreign import Experts
from tinsmith.engine.local.model.images.settings import model_class, read_image_rules
from tinsmith.engine.local.model.settings import read_config
from tinsmith.engine.local.model.sources import quiet_transformers
from tinsmith.engine.stored_tensors import num_elements, stored_tensors, weight_files
from tinsmith.errors import ValidationError

Form = Literal["peft", "merged", "gguf"]

_MOST_FLOAT32_BYTES = 2**33
_NUM_TOKENS = 16
_QUANTIZED_LIMITS = {"q8_0": 0.1, "q4_k_m": 0.5}
"""Quantizing changes logits by a few hundredths (SmolLM2: 0.034) or tenths (0.12) of the largest; a
wrong export changes them by about as much as their size."""
_PACKED_LIMITS = {"int8": 0.02, "int4": 0.25}
"""How far numbers may be from those that were packed, relative to their size (random ones: 0.005
and 0.09). Logits of a small model say too little: 4 bits move SmolLM2's by 0.7 of the largest."""
_NOT_READ = re.compile(r".+\.(experts\.\d+\.\w+_proj|mixer\.out_proj)\.")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")


def check_packed(base: Path, adapter: Path, merged: Path, packed: Path, quantization: str) -> float:
    """The largest difference between logits, relative to the largest.

    An error if a matrix that `transformers` loads from `packed` is not near the one in `merged`.
    """
    dtype = _comparison_dtype(base)
    expected = _expected_logits(base, adapter, dtype, is_rounded=True)
    gc.collect()
    model = _load(packed, dtype)
    found = _logits(model)  # the first pass unpacks
    limit = _PACKED_LIMITS[quantization]
    for name, stored in stored_tensors(weight_files(merged)).items():
        wanted = torch.tensor(stored.read())
        error, size = (model.get_parameter(name).float() - wanted).norm(), wanted.norm()
        if not error <= limit * size:
            raise ValidationError(
                f"the export was loaded back and {name!r} differs from the merged model's by "
                f"{error / size:.2g} of its size (limit {limit:g}); it has not been kept"
            )
    return _difference(found, expected)


def check_export(
    form: Form, base: Path, adapter: Path, exported: Path, quantization: str | None = None
) -> float | None:
    """The largest difference between logits, relative to the largest; too large is an error.

    `base` is the base model's folder, `adapter` the adapter's in PEFT's layout, `exported` what
    was made of them.
    None where there is no reader to compare with: the one for GGUF does not scale rotations, and
    `peft` joins the matrices of experts in some families only and takes none of Mamba layers.
    """
    if form == "peft" and any(_NOT_READ.match(name) for name in read_tensors(exported / WEIGHTS)):
        return None
    ropes = {spec.rope for spec in read_config(base).layers} if form == "gguf" else set()
    if any(rope and rope.kind != "default" for rope in ropes):
        return None
    dtype = _comparison_dtype(base)
    expected = _expected_logits(base, adapter, dtype, is_rounded=form != "peft")
    gc.collect()
    if form == "peft":
        found = _peft_logits(base, exported, dtype)
    elif form == "merged":
        found = _logits(_load(exported, dtype))
    else:
        found = _logits(_load(exported.parent, dtype, gguf_file=exported.name))
    difference = _difference(found, expected)
    limit = 1e-3 if dtype == torch.float32 else 5e-2
    if quantization is not None:
        limit = _QUANTIZED_LIMITS[quantization]
    if not difference <= limit:
        raise ValidationError(
            f"the export was loaded back and its logits differ from the adapter's by "
            f"{difference:.2g} of their size (limit {limit:g}); it has not been kept"
        )
    return difference


def _comparison_dtype(base: Path) -> torch.dtype:
    num_bytes = 4 * num_elements(stored_tensors(weight_files(base)))
    return torch.float32 if num_bytes <= _MOST_FLOAT32_BYTES else torch.bfloat16


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _expected_logits(base: Path, adapter: Path, dtype: torch.dtype, *, is_rounded: bool) -> Tensor:
    settings = read_json(adapter / CONFIG)
    tensors = read_tensors(adapter / WEIGHTS)
    scale = settings["lora_alpha"] / settings["r"]
    model = _load(base, dtype)
    stored = {tensor.dtype for tensor in stored_tensors(weight_files(base)).values()}
    kept = {"F16": torch.float16, "BF16": torch.bfloat16}.get(min(stored), torch.float32)
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        stem = name.removesuffix(".lora_A.weight")
        delta = scale * (tensors[f"{stem}.lora_B.weight"].float() @ a.float())
        _add(model, stem.removeprefix(PREFIX), delta, kept if is_rounded else torch.float32)
    return _logits(model)


def _add(model: Any, name: str, delta: Tensor, kept: torch.dtype) -> None:
    """Add to a module's weight, whose sum is rounded as if it were stored as `kept`."""
    if expert := _EXPERT.fullmatch(name):
        experts = Experts(expert[1], _module(model, expert[1]))
        weight = experts.matrix(expert[3], int(expert[2])).detach()
        weight.copy_((weight.float() + delta.t()).to(kept))
        return
    module = _module(model, name)
    weight = (module.weight.detach().float() + delta).to(kept)
    # A new parameter: the embedding may share the old one.
    module.weight = nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)


def _module(model: Any, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ValidationError(
            f"the adapter changes {name!r}, which {type(model).__name__} does not have"
        ) from None


def _peft_logits(base: Path, exported: Path, dtype: torch.dtype) -> Tensor:
    """By `peft`, where it is installed; otherwise the names were all that could be tried."""
    if importlib.util.find_spec("peft") is None:
        return _expected_logits(base, exported, dtype, is_rounded=False)
    from peft import PeftModel, get_peft_model_state_dict

    model = PeftModel.from_pretrained(_load(base, dtype), exported)
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    for name, tensor in read_tensors(exported / WEIGHTS).items():
        if name not in loaded or not torch.equal(loaded[name].float().cpu(), tensor.float()):
            raise ValidationError(f"peft does not find {name!r} of the adapter in the base model")
    return _logits(model)


def _load(folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    model_type, images = "", None
    if "gguf_file" not in options:
        model_type = str(read_json(folder / "config.json").get("model_type"))
        images = read_image_rules(folder)
    with quiet_transformers():
        return (
            model_class(model_type, images)
            .from_pretrained(folder, dtype=dtype, trust_remote_code=False, **options)
            .eval()
        )


def _logits(model: Any) -> Tensor:
    size = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(_NUM_TOKENS) * 7 % size
    # What compressed-tensors packed is unpacked in the first pass, with a bar of its own.
    with torch.no_grad(), quiet_transformers():
        logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    return logits
