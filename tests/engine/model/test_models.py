"""Base models by name: loaded on first use, dropped under a budget, foreign ones checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.conftest import save_tokenizer
from tests.support import tiny_llama
from tests.support.tiny_families import TINY_FAMILIES, save_tiny
from tests.support.tiny_vision import TINY_TEXT_PARTS, save_tiny_vision
from tinsmith import memory
from tinsmith.engine.base import SampleJob
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.batch import PackedAttention
from tinsmith.engine.local.model.foreign.decoder import ForeignDecoder
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.errors import EngineError
from tinsmith.types import ModelInput, SamplingParams


def models_of(folders: dict[str, Path], **options: Any) -> BaseModels:
    table = {name: str(folder) for name, folder in folders.items()}
    return BaseModels(LocalEngineConfig(device="cpu", models=table, **options))


@pytest.fixture
def three(model_folder: Callable[[str], Path], tmp_path: Path) -> dict[str, Path]:
    folders = {name: tmp_path / name for name in ("one", "two", "three")}
    for folder in folders.values():
        shutil.copytree(model_folder("llama"), folder)
    return folders


def test_a_model_is_loaded_on_first_use_and_then_kept(three: dict[str, Path]) -> None:
    models = models_of(three)
    assert models.loaded == ()
    assert models.get("two") is models.get("two")
    assert models.loaded == ("two",)


def test_a_folder_with_several_names_is_loaded_once(three: dict[str, Path]) -> None:
    (three["one"].parent / "link").symlink_to(three["one"])
    models = models_of({**three, "alias": three["one"], "link": three["one"].parent / "link"})
    assert models.get("one") is models.get("alias") is models.get("link")
    assert models.config("alias") is models.config("one")
    assert models.nbytes == models.get("one").nbytes
    assert set(models.loaded) == {"one", "alias", "link"}


def test_a_model_in_use_under_one_name_is_not_dropped_under_another(
    three: dict[str, Path],
) -> None:
    size = models_of(three).get("one").nbytes
    models = models_of({**three, "alias": three["one"]}, memory_budget_bytes=size)
    models.get("alias")
    with models.use("one"), pytest.raises(EngineError, match="memory_budget_bytes"):
        models.get("two")
    models.get("two")
    assert models.loaded == ("two",)


def test_an_unknown_name_is_refused_with_the_names_that_are_served(three: dict[str, Path]) -> None:
    with pytest.raises(EngineError, match="'four'; served: one, two, three"):
        models_of(three).get("four")


def test_info_tells_the_shape_without_loading(three: dict[str, Path]) -> None:
    models = models_of(three)
    info = models.info("one")
    assert (info.max_context_length, info.vocab_size) == (128, 97)
    assert info.architecture == "LlamaForCausalLM"
    assert info.tokenizer_folder == three["one"]
    assert models.loaded == ()


def test_the_least_recently_used_idle_model_is_dropped_under_a_budget(
    three: dict[str, Path],
) -> None:
    size = models_of(three).get("one").nbytes
    models = models_of(three, memory_budget_bytes=2 * size)
    models.get("one")
    models.get("two")
    models.get("one")
    models.get("three")
    assert models.loaded == ("one", "three")
    assert models.nbytes == 2 * size


def test_a_model_in_use_is_never_dropped(three: dict[str, Path]) -> None:
    size = models_of(three).get("one").nbytes
    models = models_of(three, memory_budget_bytes=2 * size)
    with models.use("one"), models.use("two"):
        with pytest.raises(EngineError, match="memory_budget_bytes"):
            models.get("three")
        assert set(models.loaded) == {"one", "two"}
    models.get("three")
    assert models.loaded == ("two", "three")


@pytest.fixture
def packed_bytes(three: dict[str, Path]) -> int:
    """What packing adds to one of the three, where they are large enough to be packed."""
    for folder in three.values():
        shutil.rmtree(folder)
        size = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
        tiny_llama.save(folder, seed=0, vocab_size=256, tie_word_embeddings=False, **size)
    found = models_of(three, pack_weights=False).get("one").packed_bytes
    if not found:
        pytest.skip("this machine's torch cannot pack")
    return found


def test_weights_are_packed_unless_that_takes_too_much(
    three: dict[str, Path], packed_bytes: int
) -> None:
    def size(**options: Any) -> int:
        return models_of(three, **options).get("one").nbytes

    plain = size(pack_weights=False)
    assert size() == plain + packed_bytes
    assert size(deterministic=True) == plain
    assert size(memory_budget_bytes=4 * packed_bytes) == plain + packed_bytes
    assert size(memory_budget_bytes=4 * packed_bytes - 1) == plain
    tight = plain + packed_bytes
    assert size(memory_budget_bytes=tight, pack_weights=True) == tight
    models = models_of(three, memory_budget_bytes=tight - 1, pack_weights=True)
    with pytest.raises(EngineError, match="raise memory_budget_bytes or leave out pack_weights"):
        models.get("one")
    assert models.loaded == ()


def test_under_a_budget_only_what_fits_beside_others_is_packed(
    three: dict[str, Path], packed_bytes: int
) -> None:
    plain = models_of(three, pack_weights=False).get("one").nbytes
    models = models_of(three, memory_budget_bytes=4 * packed_bytes)
    with models.use("one"), models.use("two"):
        assert models.get("one").nbytes == plain + packed_bytes
        with models.use("three"):
            assert models.nbytes <= 4 * packed_bytes
            assert models.get("three").nbytes == plain


def test_packing_in_deterministic_mode_is_refused(three: dict[str, Path]) -> None:
    with pytest.raises(EngineError, match=r"pack_weights.*deterministic"):
        models_of(three, deterministic=True, pack_weights=True)


FOREIGN: dict[str, dict[str, Any]] = {
    # Calls attention with the mask by name.
    "AfmoeConfig": {
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "sliding_window": 8,
    },
    "GPTNeoXConfig": {"num_key_value_heads": None},
    "StableLmConfig": {"use_qkv_bias": True},
    "Phi3Config": {},
    "Olmo2Config": {},
}


def save_foreign(class_name: str, folder: Path, **changes: Any) -> Any:
    import transformers

    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **changes,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    config = getattr(transformers, class_name)(**given)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval().save_pretrained(folder)
    return model


@pytest.mark.parametrize("class_name", FOREIGN)
def test_another_architecture_of_linear_layers_runs_packed_with_its_own_logits(
    class_name: str, tmp_path: Path
) -> None:
    """Within 1e-5 of `transformers`, packed against one by one."""
    reference = save_foreign(class_name, tmp_path, **FOREIGN[class_name])
    decoder = models_of({"foreign": tmp_path}).get("foreign")
    assert isinstance(decoder, ForeignDecoder)
    lengths = [9, 1, 20]
    tokens = torch.randint(0, 97, (30,), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = AdapterSegments.whole(30)
    with torch.no_grad():
        attention = PackedAttention(decoder.config, lengths)
        logits = decoder.unembed(decoder.hidden(tokens, positions, attention, segments), segments)
        parts = zip(tokens.split(lengths), logits.split(lengths), strict=True)
        for sequence, found in parts:
            expected = reference(sequence[None]).logits[0]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss", "qwen3_5", "qwen3_vl"])
def test_a_sequence_ends_with_the_tokens_that_any_file_of_its_model_names(
    model_type: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """The settings of published models often name the end of a text, and not that of a turn."""
    if model_type in TINY_TEXT_PARTS:
        save_tiny_vision(model_type, tmp_path, eos_token_id=5)
    elif model_type in TINY_FAMILIES:
        save_tiny(model_type, tmp_path, eos_token_id=5)
    else:
        shutil.copytree(model_folder(model_type), tmp_path, dirs_exist_ok=True)
        (tmp_path / "tokenizer.json").unlink()
    said = tmp_path / "generation_config.json"

    def ends() -> tuple[int, ...]:
        models = models_of({"tiny": tmp_path}, verify_models=False)
        return models.config("tiny").eos_token_ids

    said.write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert ends() == (7, 5)
    said.write_text(json.dumps({"temperature": 0.6}))
    assert ends() in ((2,), (5,)), "what config.json says"
    said.unlink()
    save_tokenizer(tmp_path)
    of_settings, *of_tokenizer = ends()
    assert (of_settings, of_tokenizer) in ((2, []), (5, [2])), "and how the tokenizer ends a turn"
    said.write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(EngineError, match=r"eos_token_id .* must be a token"):
        ends()
    said.unlink()
    (tmp_path / "tokenizer.json").write_text("{")
    assert ends() in ((2,), (5,)), "a model needs no tokenizer"


@pytest.mark.parametrize("class_name", FOREIGN)
def test_another_architecture_samples_what_transformers_generates(
    class_name: str, tmp_path: Path
) -> None:
    reference = save_foreign(class_name, tmp_path, **FOREIGN[class_name])
    config = LocalEngineConfig(device="cpu", models={"foreign": str(tmp_path)})
    generator = Generator(BaseModels(config).get("foreign"), config)
    prompts = [[5, 9, 40, 3], [11, 12], [60, 61, 62, 63, 64, 65, 66]]
    params = SamplingParams(max_tokens=10, temperature=0.0, stop=[])
    for index, prompt in enumerate(prompts):
        generator.submit(
            SampleJob(
                job_id=str(index),
                base_model="foreign",
                weights_id=None,
                prompt=ModelInput.from_ints(prompt),
                params=params,
            ),
            None,
        )
    answers: dict[str, Any] = {}
    while generator.busy:
        answers.update(generator.step())
    for index, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt])
        for _ in range(10):
            best = reference(tokens).logits[0, -1].argmax()
            tokens = torch.cat([tokens, best[None, None]], dim=1)
        assert answers[str(index)].sequences[0].tokens == tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("class_name", "changes", "reason"),
    [
        ("GPT2Config", {"n_layer": 2}, "not ordinary linear layers.*nearest type"),
        ("Llama4TextConfig", {"num_local_experts": 4}, "experts are not in the form.*'llama'"),
        ("MambaConfig", {}, "attend in the usual way|linear layers"),
        ("CohereConfig", {}, "more between hidden states and logits"),
        # What five tokens do not show: chunks, and a window that attention is not told of.
        (
            "Llama4TextConfig",
            {"moe_layers": [], "num_local_experts": 0, "attention_chunk_size": 64},
            "the mask of its layer 0",
        ),
        ("PhimoeConfig", {"num_local_experts": 4, "sliding_window": 64}, "the mask of its layer 0"),
    ],
)
def test_an_architecture_that_does_not_fit_is_refused_with_the_reason(
    class_name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Before it is loaded, so that a server says it when it starts."""
    save_foreign(class_name, tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        models_of({"foreign": tmp_path}).config("foreign")
    assert "the nearest type that works is '" in str(caught.value)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.o_proj.weight", "lm_head.weight"])
def test_a_weight_that_the_files_of_another_architecture_lack_is_not_made_up(
    name: str, tmp_path: Path
) -> None:
    """`transformers` would draw it at random, another each time."""
    save_foreign("Olmo2Config", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(EngineError, match=f"has no tensor '{name}'"):
        models_of({"foreign": tmp_path}).config("foreign")
    with pytest.raises(EngineError, match=f"has no tensor '{name}'"):
        models_of({"foreign": tmp_path}, verify_models=False).get("foreign")


def reset(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3_moe", {"num_hidden_layers": 1}),
        ("qwen3_moe", {"attention_bias": False}),
        ("gpt_oss", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
        (
            "inkling_text",
            {
                "num_hidden_layers": 2,
                "layer_types": ["hybrid_sliding", "hybrid"],
                "mlp_layer_types": ["dense", "sparse"],
            },
        ),
    ],
)
def test_files_with_more_than_a_model_of_their_settings_has_are_refused(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Layers, or biases: without them it would be another model, and nobody would see it."""
    save_tiny(model_type, tmp_path, **({"attention_bias": True} if len(settings) == 1 else {}))
    reset(tmp_path, **settings)
    models = models_of({"m": tmp_path}, cache_folder=tmp_path / "cache")
    with pytest.raises(EngineError, match=r"layers\.\d.*, and a model of its config.json none"):
        models.config("m")


def test_tensors_without_effect_may_be_in_the_files(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    """Biases of zero, as GPTQ writes them, and what old files say of rotations."""
    shutil.copytree(model_folder("llama"), tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    layer = "model.layers.0.self_attn"
    extra = {f"{layer}.o_proj.bias": torch.zeros(32), f"{layer}.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**load_file(path), **extra}, path, {"format": "pt"})
    assert models_of({"m": tmp_path / "m"}).get("m").config.num_layers > 0


def test_layers_that_predict_further_tokens_may_be_in_the_files(tmp_path: Path) -> None:
    """DeepSeek's stand behind the last of its own."""
    save_tiny("deepseek_v3", tmp_path)
    path = tmp_path / "model.safetensors"
    extra = {"model.layers.2.eh_proj.weight": torch.ones(3, 3)}
    save_file({**load_file(path), **extra}, path, {"format": "pt"})
    reset(tmp_path, num_nextn_predict_layers=1)
    assert models_of({"m": tmp_path}, cache_folder=tmp_path / "one").get("m").config.num_layers == 2
    reset(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(EngineError, match="eh_proj"):
        models_of({"m": tmp_path}, cache_folder=tmp_path / "two").get("m")


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3_moe", {"num_hidden_layers": 0}),
        ("qwen3_moe", {"num_hidden_layers": 10**9}),
        ("qwen3_5_text", {"num_hidden_layers": 10**30}),
        ("gpt_oss", {"num_hidden_layers": 10**9}),
        ("gpt_oss", {"sliding_window": -1}),
        ("inkling_text", {"n_shared_experts": 10**9}),
        ("inkling_mm_model", {"vision_config": {"num_hidden_layers": 10**9}}),
        ("qwen3_moe", {"num_experts_per_tok": 0}),
        ("qwen3_moe", {"num_experts_per_tok": 7}),
    ],
)
def test_numbers_that_no_model_has_are_refused_at_once_by_name(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """A list of so many layers would fill the memory before anything is found out."""
    save_tiny(model_type, tmp_path)
    reset(tmp_path, **settings)
    (name,) = settings if "vision_config" not in settings else ["num_hidden_layers"]
    with pytest.raises(EngineError, match=name):
        models_of({"m": tmp_path}).config("m")


def test_settings_of_the_wrong_kind_are_refused_with_the_reason(tmp_path: Path) -> None:
    """A class of no name, of a type that our own decoder does not run."""
    save_tiny("nemotron_h", tmp_path)
    reset(tmp_path, architectures=-1, vocab_size="x")
    with pytest.raises(EngineError, match=r"nemotron_h.*vocab_size"):
        models_of({"m": tmp_path}).config("m")


def test_a_container_has_the_memory_it_is_limited_to(tmp_path: Path) -> None:
    whole = memory.machine_bytes()
    assert whole > memory.process_bytes()
    limit = tmp_path / "memory.max"
    for text, expected in (("1000000\n", 10**6), ("max\n", whole), (f"{10**18}\n", whole)):
        limit.write_text(text)
        assert memory.machine_bytes(limit) == expected
