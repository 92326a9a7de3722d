"""`tinsmith export`: an adapter for PEFT, and a merged model that any library loads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tinsmith.cli.weights.merging import merge
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.sources import model_folder
from tinsmith.errors import ValidationError

if TYPE_CHECKING:
    from tests.cli.conftest import Paths, Run, Trained


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_merged_model_computes_what_the_adapter_does(
    dtype: torch.dtype, is_tied: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=is_tied,
    )
    base = LlamaForCausalLM(config).to(dtype)
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    modules = ["q_proj", "down_proj", "lm_head"]
    settings = LoraConfig(
        r=4, lora_alpha=32, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(base, settings)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        wanted = adapted(tokens).logits.float()

    told: list[Any] = []
    count = merge(
        tmp_path / "base",
        tmp_path / "adapter",
        tmp_path / "merged",
        lambda *facts: told.append(facts),
    )
    assert count == 2 * 2 + 1
    assert told[-1][0] == told[-1][1] == len(told)
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype)
    with torch.no_grad():
        have = merged(tokens).logits.float()
    # In float32 the two differ by rounding; in 16 bits the merged matrix itself is rounded.
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert torch.allclose(have, wanted, atol=tolerance * wanted.abs().max().item())


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for folder, names in (
        ("base", ["model.a.weight"]),
        (
            "adapter",
            ["base_model.model.model.b.lora_A.weight", "base_model.model.model.b.lora_B.weight"],
        ),
    ):
        (tmp_path / folder).mkdir()
        file = "model" if folder == "base" else "adapter_model"
        tensors = {name: torch.zeros(2, 2) for name in names}
        save_file(tensors, tmp_path / folder / f"{file}.safetensors")
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 32}')
    with pytest.raises(ValidationError, match=r"model\.b\.weight"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", lambda *facts: None)


def test_a_checkpoint_is_exported_as_it_is(
    run: Run, run_json: Any, paths: Paths, tmp_path: Path
) -> None:
    folder = tmp_path / "out" / "adapter"
    answer = run_json("export", paths.state, "-o", str(folder))
    assert answer["kind"] == "peft"
    assert answer["file_size_bytes"] > 0
    assert [path.name for path in folder.parent.iterdir()] == ["adapter"]
    again = run("export", paths.state, "-o", str(folder))
    assert again.exit_code == 1
    assert "exists already" in again.stderr
    table = run("export", paths.external, "-o", str(tmp_path / "other"))
    assert "PEFT adapter" in table.stdout
    sampler = run("export", paths.sampler, "-o", str(tmp_path / "third"))
    assert sampler.exit_code == 1


def scores_of(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits.log_softmax(-1)[0, :-1]
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["merged", "gguf"])
def test_an_exported_model_scores_as_the_server_does(
    form: str,
    tiny_model: Path,
    trained: Trained,
    run: Run,
    run_json: Any,
    tmp_path: Path,
) -> None:
    env, path = trained.server.environment, trained.state
    target = tmp_path / "deep" / "tiny.gguf"
    options = ("--format", form, "--base", str(tiny_model))
    answer = run_json("export", path, *options, "-o", str(target), env=env)
    assert (answer["kind"], answer["destination"]) == (form, str(target))
    assert [each.name for each in target.parent.iterdir()] == ["tiny.gguf"]
    config = LocalEngineConfig(cache_folder=tmp_path / "cache")
    have = scores_of(model_folder(str(target), config), trained.tokens)
    assert torch.allclose(have, torch.tensor(trained.scores), atol=1e-4)
    # Training moved it, so an export of the base alone would not pass.
    assert (scores_of(tiny_model, trained.tokens) - have).abs().max() > 0.5
    table = run("export", path, *options, "-o", str(tmp_path / "second"), env=env)
    assert {"merged": "merged model", "gguf": "GGUF file"}[form] in table.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "kind", "limit", "package"),
    [
        ("gguf", "q8_0", 0.1, "gguf"),
        ("gguf", "Q4_K_M", 0.3, "xllamacpp"),
        ("merged", "int8", 0.1, "compressed_tensors"),
        ("merged", "int4", 1.0, "compressed_tensors"),
    ],
)
def test_a_quantized_export_is_smaller_and_close(
    form: str,
    kind: str,
    limit: float,
    package: str,
    tiny_model: Path,
    trained: Trained,
    run_json: Any,
    tmp_path: Path,
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    options = ("--format", form, "--base", str(tiny_model))
    sizes = []
    for number, chosen in enumerate(((), ("--quantize", kind))):
        target = tmp_path / f"tiny{number}.gguf"
        env = trained.server.environment
        answer = run_json("export", trained.external, *options, *chosen, "-o", str(target), env=env)
        sizes.append(answer["file_size_bytes"])
        assert 0 <= answer["difference"] < (limit if chosen else 1e-3)
    # Embeddings and what lies beside a merged model are as large as before.
    assert sizes[1] < (0.7 if form == "gguf" else 0.8) * sizes[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_names_the_copy_that_it_was_trained_on(
    tiny_model: Path, trained: Trained, run: Run, run_json: Any, tmp_path: Path
) -> None:
    """It named what the server calls the model, which a hub may have other weights for."""
    env, target = trained.server.environment, tmp_path / "adapter"
    options = ("--base", str(tiny_model), "-o", str(target))
    assert run_json("export", trained.external, *options, env=env)["base_model"] == str(tiny_model)
    loaded = AutoPeftModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokens = trained.tokens
    with torch.no_grad():
        logprobs = loaded(torch.tensor([tokens])).logits.log_softmax(-1)[0, :-1]
    scores = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert torch.allclose(scores, torch.tensor(trained.scores), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--format", "gguf", "--quantize", "q3_k_s"), "q8_0 or q4_k_m, not to q3_k_s"),
        (("--format", "gguf", "--quantize", "Q4_K_M"), "pip install xllamacpp"),
        (("--format", "merged", "--quantize", "q8_0"), "int8 or int4, not to q8_0"),
        (("--quantize", "q8_0"), "--quantize needs --format gguf or --format merged"),
    ],
)
def test_a_quantization_that_cannot_be_written_is_refused_with_the_reason(
    options: tuple[str, ...],
    message: str,
    run: Run,
    paths: Paths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    refused = run("export", paths.state, *options, "-o", str(tmp_path / "out"))
    assert refused.exit_code == 1
    assert message in refused.stderr


def test_integers_are_not_written_where_nothing_could_read_them_back(
    run: Run, paths: Paths, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    options = ("--format", "merged", "--base", str(tiny_model), "-o", str(tmp_path / "out"))
    refused = run("export", paths.state, *options, "--quantize", "int8")
    assert (refused.exit_code, (tmp_path / "out").exists()) == (1, False)
    assert "pip install compressed-tensors" in refused.stderr


def test_a_base_model_that_is_not_here_has_to_be_named(
    run: Run, paths: Paths, tmp_path: Path
) -> None:
    result = run("export", paths.state, "--format", "merged", "-o", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "--base" in result.stderr
    assert not (tmp_path / "out").exists()
    result = run("export", paths.state, "-o", str(tmp_path / "out"))
    assert result.exit_code == 0
    assert "Not compared with the base model" in result.stderr


def test_a_family_without_gguf_is_refused_before_anything_is_fetched(
    run: Run, paths: Paths, tmp_path: Path
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "gemma2"}')
    options = ("--format", "gguf", "--base", str(tmp_path / "base"))
    result = run("export", paths.state, *options, "-o", str(tmp_path / "out.gguf"))
    assert result.exit_code == 1
    assert "'gemma2'" in result.stderr
    assert "Exporting" not in result.stderr
