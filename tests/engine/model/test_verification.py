"""Models as their files say: what we make of a `config.json` is what `transformers` makes of it.

Logits are compared on the whole tiny model, at short and at the longest positions, to 1e-4 of the
largest; a misread setting is off by a hundred times that and more.
"""

from __future__ import annotations

import inspect
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.conftest import build_reference
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.engine.local.model.batch import PackedAttention
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.latent.mixer import LatentMixer
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.rope import Rope
from tinsmith.engine.local.model.settings import read_config
from tinsmith.engine.local.model.verifying import verification
from tinsmith.errors import EngineError
from tinsmith.types import LoraConfig

DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "original_max_position_embeddings": 32}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}

# From the fault to the variant of a tiny model, and what its config.json says besides.
SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "rope_scaling beside rope_parameters": (
        "llama",
        {"rope_parameters": DEFAULT, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "an original context beside the rope's own": (
        "llama3_rope",
        {"original_max_position_embeddings": 8},
    ),
    "yarn with a factor below one": ("llama", {"rope_parameters": {**YARN, "factor": 0.25}}),
    "yarn with swapped betas": (
        "llama",
        {"rope_parameters": {**YARN, "factor": 4.0, "beta_fast": 1.0, "beta_slow": 32.0}},
    ),
    "yarn with nulls that mean the defaults": (
        "llama",
        {"rope_parameters": {**YARN, "factor": 4.0, "beta_fast": None, "attention_factor": None}},
    ),
    "one set of rope_parameters for a Gemma 3": (
        "gemma3",
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e3}},
    ),
    "a null for one kind of layer of a Gemma 3": (
        "gemma3",
        {"rope_parameters": {"full_attention": None, "sliding_attention": DEFAULT}},
    ),
    "rope_scaling beside the kinds of a Gemma 3": (
        "gemma3",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "Llama 3's bounds swapped": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "kinds of layers in a family without them": ("llama", KINDS),
    "kinds of layers in a family that has them in another one's name": ("mistral", KINDS),
    "a tied flag beside a matrix of its own": ("llama", {"tie_word_embeddings": True}),
    "a window that is left out": ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
    "a softcap of scores, which Gemma 3 has not": ("gemma3", {"attn_logit_softcapping": 0.5}),
    "settings of other families in a Llama": (
        "llama",
        {
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 0.5,
            "query_pre_attn_scalar": 7,
            "hidden_activation": "relu",
            "clip_qkv": 0.1,
            "use_bidirectional_attention": True,
        },
    ),
    "biases, which a Mistral has not": ("mistral", {"attention_bias": True, "mlp_bias": True}),
}


@pytest.fixture
def respelled(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> Callable[[str, dict[str, Any]], Path]:
    """A copy of a variant's folder whose config.json says something besides."""

    def copy(variant: str, changes: dict[str, Any]) -> Path:
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        shutil.copytree(model_folder(variant), folder)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return folder

    return copy


def both_logits(folder: Path) -> tuple[Tensor, Tensor]:
    """Ours and those of `transformers`, on the whole model."""
    from transformers import AutoModelForCausalLM

    decoder = Decoder.load(folder)
    positions = torch.cat([torch.arange(10), torch.arange(110, 122)])
    tokens = torch.arange(22) * 5 % decoder.config.vocab_size
    segments = AdapterSegments.whole(22)
    with torch.no_grad():
        hidden = decoder.hidden(tokens, positions, PackedAttention(decoder.config, [22]), segments)
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=torch.ones(1, 22, dtype=torch.int64),
            use_cache=False,
        )
        return decoder.unembed(hidden, segments), theirs.logits[0]


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("fault", SPELLINGS)
def test_a_setting_means_what_transformers_takes_it_to_mean(
    respelled: Callable[[str, dict[str, Any]], Path], fault: str
) -> None:
    folder = respelled(*SPELLINGS[fault])
    assert difference(*both_logits(folder)) <= 1e-4
    assert verification.compare(folder, read_config(folder)) <= verification.TOLERANCE


def some_rope(draw: random.Random) -> dict[str, Any]:
    settings = {
        draw.choice(["rope_type", "type"]): draw.choice(["default", "linear", "llama3", "yarn"]),
        "rope_theta": draw.choice([100.0, 1e4, 1e6, None]),
        "factor": draw.choice([0.5, 1.0, 4.0, None]),
        "low_freq_factor": draw.choice([0.5, 1.0, 4.0]),
        "high_freq_factor": draw.choice([2.0, 8.0]),
        "original_max_position_embeddings": draw.choice([16, 64, None]),
        "beta_fast": draw.choice([32.0, 2.0, None, 0]),
        "beta_slow": draw.choice([1.0, 8.0, None]),
        "attention_factor": draw.choice([None, 1.5]),
    }
    return {name: value for name, value in settings.items() if draw.random() < 0.8}


@pytest.mark.parametrize("seed", range(60))
def test_any_spelling_is_refused_or_equals_transformers(
    respelled: Callable[[str, dict[str, Any]], Path], seed: int
) -> None:
    draw = random.Random(seed)
    changes: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        if draw.random() < 0.7:
            changes[name] = draw.choice([some_rope(draw), some_rope(draw), None, {}])
    for name, values in {
        "rope_theta": [500.0, 1e5],
        "original_max_position_embeddings": [8, 48],
        "tie_word_embeddings": [True, False],
        "sliding_window": [4, None],
    }.items():
        if draw.random() < 0.3:
            changes[name] = draw.choice(values)
    folder = respelled(draw.choice(["llama", "qwen2", "mistral", "gemma2", "gemma3"]), changes)
    try:
        read_config(folder)
    except EngineError:
        return
    try:
        ours, theirs = both_logits(folder)
    except EngineError:
        return
    except (TypeError, KeyError, ValueError):
        # transformers cannot run it: then neither do we, at the latest when it is verified.
        with pytest.raises((EngineError, TypeError, KeyError, ValueError)):
            verification.verify(folder, read_config(folder), folder)
        return
    assert difference(ours, theirs) <= 1e-4, changes


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("qwen2", KINDS),
        ("qwen3", {**KINDS, "sliding_window": None, "use_sliding_window": True}),
        ("gemma2", {"sliding_window": None}),
    ],
)
def test_a_layer_that_slides_without_a_window_is_refused_by_the_names_of_its_settings(
    respelled: Callable[[str, dict[str, Any]], Path], variant: str, changes: dict[str, Any]
) -> None:
    """`transformers` raises an error then, in the middle of a forward pass."""
    with pytest.raises(EngineError, match="layer_types, sliding_window and use_sliding_window"):
        read_config(respelled(variant, changes))


def core(models: dict[str, Path], cache: Path, **settings: Any) -> EngineCore:
    return EngineCore(
        LocalEngineConfig(
            models={name: str(folder) for name, folder in models.items()},
            device="cpu",
            cache_folder=cache,
            **settings,
        )
    )


def test_a_model_whose_logits_differ_is_refused_and_the_others_are_served(
    respelled: Callable[[str, dict[str, Any]], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = {
        "wrong": respelled("llama3_rope", {}),
        "right": respelled("llama", {}),
        "null": respelled("llama", {"rope_parameters": {"rope_type": "linear", "factor": None}}),
        "text": respelled("llama", {"num_attention_heads": "many"}),
        "foreign": respelled("llama", {"model_type": "mamba"}),
        "nowhere": tmp_path / "folders" / "nowhere",
    }
    # As if our reading of Llama 3's rope were off by a little.
    plain = Rope.inverse_frequencies

    def off(rope: Rope) -> Tensor:
        return plain(rope) * (0.97 if rope.kind == "llama3" else 1.0)

    monkeypatch.setattr(Rope, "inverse_frequencies", off)
    found = core(models, tmp_path / "cache").capabilities()
    assert [model.name for model in found.models] == ["right"]
    reasons = {model.name: model.reason for model in found.refused}
    assert reasons.keys() == {"wrong", "null", "text", "foreign", "nowhere"}
    assert "differ from transformers'" in reasons["wrong"]
    assert "'factor' in config.json must be a number, got None" in reasons["null"]
    assert "mamba" in reasons["foreign"]
    assert not any(str(tmp_path) in reason for reason in reasons.values())

    unverified = core(models, tmp_path / "cache", verify_models=False)
    assert unverified.create_adapter("a", "wrong", LoraConfig(rank=1)) is None


def test_a_verified_model_is_not_compared_again_until_its_settings_change(
    respelled: Callable[[str, dict[str, Any]], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    compare = verification.compare

    def counted(folder: Path, *rest: Any) -> float:
        compared.append(folder.name)
        return compare(folder, *rest)

    monkeypatch.setattr(verification, "compare", counted)
    first = respelled("llama", {})
    again, changed = respelled("llama", {}), respelled("llama", {"rope_theta": 7.0})
    for folder in (first, again, changed, first):
        core({"m": folder}, tmp_path / "cache").capabilities()
    assert compared == [first.name, changed.name]


@pytest.mark.parametrize("what", [Decoder, Rope, LatentMixer, verification.compare])
def test_a_verified_model_is_compared_again_when_the_code_that_runs_it_changes(
    what: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, read = inspect.getfile(what), Path.read_bytes  # type: ignore[arg-type]
    digest = verification.code_digest.__wrapped__
    before = digest()
    assert digest() == before
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (str(path) == changed))
    assert digest() != before


def test_a_window_larger_than_what_is_compared_is_compared_all_the_same(
    respelled: Callable[[str, dict[str, Any]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if transformers' Mistral had none, whatever its settings say."""
    from transformers.models.mistral import modeling_mistral

    folder = respelled("mistral", {"sliding_window": 100})
    config = read_config(folder)
    assert config.layers[0].window == 100
    assert verification.compare(folder, config) <= verification.TOLERANCE
    plain = modeling_mistral.create_causal_mask
    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", plain)
    assert verification.compare(folder, config) > verification.TOLERANCE


def test_a_verification_takes_memory_for_a_few_layers_and_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    load = Decoder.load

    def measured(folder: Path) -> Decoder:
        loaded.append(load(folder))
        return loaded[-1]

    monkeypatch.setattr(Decoder, "load", measured)
    build_reference("gemma2", num_hidden_layers=7, vocab_size=2000).save_pretrained(tmp_path)
    assert verification.compare(tmp_path, read_config(tmp_path)) <= verification.TOLERANCE
    (small,) = loaded
    assert (small.config.num_layers, small.config.vocab_size) == (2, 512)
