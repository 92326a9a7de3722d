"""A model that runs through transformers' modules is tried before it is served.

Faults are planted in both places where they can be: in what was found out about a model's
attention, and in code of the model's own that our decoder does not call. Each would shift logits by
a percent or so, which in bfloat16 looks like rounding.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.engine.conftest import build_reference
from tests.support.tiny_families import save_tiny
from tests.support.tiny_vision import save_tiny_vision
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.checking import check_model
from tinsmith.engine.local.model.families import AttentionSpec
from tinsmith.engine.local.model.foreign.config import ForeignConfig
from tinsmith.engine.local.model.foreign.describing import read_foreign_config
from tinsmith.engine.local.model.foreign.trial import difference, try_out
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.verifying.verification import TOLERANCE
from tinsmith.errors import EngineError

REASON = UnsupportedModelError("not one of our own")


class BentConfig(LlamaConfig):  # type: ignore[misc]  # transformers is unannotated here
    model_type = "bent_llama"
    fault: str = "none"


class BentForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama that does something by itself around the layers, which nobody else hears of."""

    config_class = BentConfig

    def forward(self, input_ids: Tensor, **options: Any) -> CausalLMOutputWithPast:
        fault, frequencies = self.config.fault, self.model.rotary_emb.inv_freq
        if fault == "window off by one":
            index = torch.arange(input_ids.shape[1])
            distance = index[:, None] - index[None, :]
            is_seen = (distance >= 0) & (distance < self.config.max_position_embeddings // 4)
            hidden_by = torch.zeros(is_seen.shape).masked_fill(~is_seen, float("-inf"))
            options["attention_mask"] = hidden_by[None, None].to(self.dtype)
        if fault == "another rope theta":
            exponents = torch.arange(len(frequencies)) / len(frequencies)
            self.model.rotary_emb.inv_freq = 0.98**exponents * frequencies
        hidden = self.model(input_ids, **options).last_hidden_state
        self.model.rotary_emb.inv_freq = frequencies
        if fault == "one more norm":
            hidden = self.model.norm(hidden)
        logits = self.lm_head(hidden)
        if fault == "softcap":
            logits = 30 * torch.tanh(logits / 30)
        if fault == "scaling":
            logits = logits * 1.02
        return CausalLMOutputWithPast(logits=logits)


FAULTS = ("window off by one", "another rope theta", "one more norm", "softcap", "scaling")


@pytest.fixture
def bent(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Saves such a model; transformers knows its type meanwhile."""
    AutoConfig.register(BentConfig.model_type, BentConfig)
    AutoModelForCausalLM.register(BentConfig, BentForCausalLM)

    def save(fault: str) -> Path:
        torch.manual_seed(3)
        config = BentConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.15,
        )
        config.fault = fault
        BentForCausalLM(config).save_pretrained(tmp_path / "bent")
        return tmp_path / "bent"

    yield save
    CONFIG_MAPPING._extra_content.pop(BentConfig.model_type)
    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(BentConfig)


def models_of(folder: Path, cache: Path, dtype: str) -> BaseModels:
    return BaseModels(settings_of(folder, cache, dtype))


def settings_of(folder: Path, cache: Path, dtype: str) -> LocalEngineConfig:
    return LocalEngineConfig(
        models={"bent": str(folder)},
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]
        cache_folder=cache,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_does_more_than_we_see_is_refused_at_start(
    bent: Callable[[str], Path], fault: str, dtype: str, tmp_path: Path
) -> None:
    settings = settings_of(bent(fault), tmp_path / "cache", dtype)
    found = EngineCore(settings).capabilities()
    assert found.models == ()
    (refused,) = found.refused
    assert "BentForCausalLM does more between hidden states and logits" in refused.reason
    assert "the nearest type that works is 'llama'" in refused.reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_model_without_a_fault_is_served(
    bent: Callable[[str], Path], dtype: str, tmp_path: Path
) -> None:
    models = models_of(bent("none"), tmp_path / "cache", dtype)
    assert models.info("bent").architecture == "BentForCausalLM"
    assert models.get("bent").config.num_layers == 3


def of_each(config: ForeignConfig, change: Callable[[AttentionSpec], AttentionSpec]) -> Any:
    return dataclasses.replace(config, layers=tuple(change(spec) for spec in config.layers))


PLANTED: dict[str, Callable[[ForeignConfig], ForeignConfig]] = {
    "an ignored softcap": lambda config: of_each(
        config, lambda spec: dataclasses.replace(spec, softcap=None)
    ),
    "an ignored softcap of the logits": lambda config: dataclasses.replace(
        config, final_softcap=None
    ),
    "a scale off by a percent": lambda config: of_each(
        config, lambda spec: dataclasses.replace(spec, scale=1.01 * spec.scale)
    ),
    "a window off by one": lambda config: of_each(
        config, lambda spec: dataclasses.replace(spec, window=spec.window and spec.window + 1)
    ),
    "a window that is ignored": lambda config: of_each(
        config, lambda spec: dataclasses.replace(spec, window=None)
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_attention_that_was_misread_is_refused(fault: str, tmp_path: Path) -> None:
    """On a Gemma 2, which has all of them: a window of 4,096 tokens, and softcaps that weights of
    the usual size at the beginning of training would never come near."""
    changes = {"sliding_window": 4096, "max_position_embeddings": 8192, "initializer_range": 0.02}
    build_reference("gemma2", **changes).save_pretrained(tmp_path)
    config = read_foreign_config(tmp_path, REASON)
    try_out(tmp_path, config, tmp_path / "honest")
    with pytest.raises(UnsupportedModelError, match="the nearest type that works is 'gemma2'"):
        try_out(tmp_path, PLANTED[fault](config), tmp_path / "cache")


INKLING: dict[str, Callable[[ForeignConfig], ForeignConfig]] = {
    "hidden states that are not divided": lambda config: dataclasses.replace(
        config, hidden_divisor=1.0
    ),
    "distances of another layer": lambda config: dataclasses.replace(
        config, layers=(config.layers[1], *config.layers[1:])
    ),
    "a window that is ignored": PLANTED["a window that is ignored"],
}


@pytest.mark.parametrize("fault", INKLING)
def test_an_inkling_that_was_misread_is_refused(fault: str, tmp_path: Path) -> None:
    save_tiny("inkling_text", tmp_path)
    config = read_foreign_config(tmp_path, REASON)
    try_out(tmp_path, config, tmp_path / "honest")
    with pytest.raises(UnsupportedModelError, match="the nearest type that works"):
        try_out(tmp_path, INKLING[fault](config), tmp_path / "cache")


def test_a_model_is_tried_once_and_the_outcome_kept_either_way(tmp_path: Path) -> None:
    """By a fault planted later: it would be found if it were looked for."""
    build_reference("gemma2").save_pretrained(tmp_path / "model")
    right = read_foreign_config(tmp_path / "model", REASON)
    wrong = PLANTED["an ignored softcap"](right)
    try_out(tmp_path / "model", right, tmp_path / "cache")
    try_out(tmp_path / "model", wrong, tmp_path / "cache")
    for config in (wrong, right):
        with pytest.raises(UnsupportedModelError):
            try_out(tmp_path / "model", config, tmp_path / "other")


@pytest.mark.parametrize(
    "model_type",
    ["gpt_oss", "deepseek_v3", "qwen3_5_moe_text", "nemotron_h", "qwen3_5", "qwen3_vl"],
)
def test_an_honest_model_differs_by_rounding_only(model_type: str, tmp_path: Path) -> None:
    """Also where its settings say bfloat16. The table of types has the others, each in its own
    test."""
    save = save_tiny_vision if model_type in ("qwen3_5", "qwen3_vl") else save_tiny
    save(model_type, tmp_path).bfloat16().save_pretrained(tmp_path)
    found = difference(tmp_path, read_foreign_config(tmp_path, REASON))
    assert found is not None and found <= TOLERANCE / 3


def test_a_trial_takes_one_layer_of_each_kind_few_experts_and_rows(tmp_path: Path) -> None:
    """The settings of DeepSeek-V3, whose weights take 2.7 TB in float32; none are read."""
    settings = CONFIG_MAPPING["deepseek_v3"]().to_dict()
    assert settings["num_hidden_layers"] == 61 and settings["n_routed_experts"] == 256
    narrow = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**settings, **narrow}))
    found = difference(tmp_path, read_foreign_config(tmp_path, REASON))
    assert found is not None and found <= TOLERANCE


def test_a_check_says_what_a_start_would_say(
    bent: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(
        EngineError, match=r"in float32 .* differ by .*; the nearest type .* 'llama'"
    ):
        check_model(bent("scaling"), rank=4)
    assert check_model(bent("none"), rank=4).runs_on == "transformers"


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_a_tensor_that_files_lack_in_any_layer_is_missed_at_start(
    model_type: str, tmp_path: Path
) -> None:
    if model_type == "llama":
        build_reference("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    else:
        save_tiny(model_type, tmp_path, num_hidden_layers=4)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.3.self_attn.o_proj.weight"
    weight = tensors.pop(name)
    for broken in ({}, {name: weight[:-1].contiguous()}):
        save_file({**tensors, **broken}, path, {"format": "pt"})
        with pytest.raises(EngineError, match=r"layers.3.self_attn.o_proj|could not be read"):
            models_of(tmp_path, tmp_path / "cache", "float32").config("bent")
