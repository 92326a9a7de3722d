"""Tokenizers: which one, loaded once, offline, without torch."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_server import Answer
from tinsmith.client import tokenizers
from tinsmith.client.service import ServiceClient
from tinsmith.errors import TinkerError
from tinsmith.types import ModelInput

NAMES = [
    ("Qwen/Qwen3-8B", None, "Qwen/Qwen3-8B"),
    ("Qwen/Qwen3-8B:v2", None, "Qwen/Qwen3-8B"),
    ("Qwen/Qwen3-8B/long", None, "Qwen/Qwen3-8B"),
    ("meta-llama/Llama-3.1-8B", None, "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"),
    (
        "meta-llama/Llama-3.3-70B-Instruct",
        None,
        "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer",
    ),
    ("meta-llama/Llama-2-7b", None, "meta-llama/Llama-2-7b"),
    ("anything", "org/tok", "org/tok"),
    ("anything", "org/tok:rev", "org/tok"),
    ("meta-llama/Llama-3.1-8B", "org/tok", "org/tok"),
    ("moonshotai/Kimi-K2.5-Text-Only", None, "moonshotai/Kimi-K2.5"),
]


@pytest.mark.parametrize(("model", "tokenizer_id", "expected"), NAMES)
def test_names_lead_to_tokenizers(model: str, tokenizer_id: str | None, expected: str) -> None:
    """S85: the service's word, then families, then the name; no network."""
    assert tokenizers.choose(model, tokenizer_id).name == expected


def test_remote_code_runs_only_in_a_pinned_revision() -> None:
    assert tokenizers.choose("moonshotai/Kimi-K2-Thinking").revision
    assert tokenizers.choose("Qwen/Qwen3-8B").revision is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer on disk, as a hub download would leave it."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "hello": 3, "world": 4, "!": 5}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.WordPiece()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizer")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    wrapped.chat_template = "{% for m in messages %}<s> {{ m.content }} </s>{% endfor %}"
    wrapped.save_pretrained(path)
    return path


def test_a_folder_is_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S87, S90: offline, with the special tokens of the reference."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    ours: Any = tokenizers.load(str(folder))
    reference = AutoTokenizer.from_pretrained(str(folder))
    for text in ("hello world!", "", "hello hello unknown"):
        assert ours.encode(text) == reference.encode(text)
    assert ours.decode([3, 4]) == "hello world"


def test_text_is_encoded_as_it_is_and_templates_are_the_callers(folder: Path) -> None:
    """S89: no chat template unless asked for."""
    tokenizer: Any = tokenizers.load(str(folder))
    assert tokenizer.encode("hello") == [0, 3]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<s> hello </s>"


def test_text_goes_both_ways_without_a_tokenizer_in_hand(
    stub: Any, service: ServiceClient, folder: Path
) -> None:
    """S85, S89: the service's word about the tokenizer is taken, by every client."""
    known = {"model_name": "served", "tokenizer_id": str(folder)}
    stub.on("/api/v1/get_info", Answer(200, {"model_id": "x", "model_data": known}))
    training = service.create_lora_training_client("served")
    assert training.encode("hello world") == [0, 3, 4]
    assert training.decode([3, 4, 5]) == "hello world!"
    prompt = ModelInput.from_text("hello world", training.get_tokenizer())
    assert prompt.to_ints() == [3, 4], "raw text: nothing is added"
    sampler = service.create_sampling_client(base_model="served")
    about = {"sampler_id": "x", "base_model": "served", "tokenizer_id": str(folder)}
    stub.on("/api/v1/samplers/s1:sample:0", Answer(200, about))
    assert sampler.get_tokenizer() is training.get_tokenizer()


def test_a_tokenizer_is_loaded_once(folder: Path) -> None:
    """S86"""
    assert tokenizers.load(str(folder)) is tokenizers.load(str(folder))


def test_tokenizing_imports_no_torch(folder: Path) -> None:
    """S88"""
    code = (
        "import sys\n"
        "from tinsmith.client import tokenizers\n"
        f"assert tokenizers.load({str(folder)!r}).encode('world') == [0, 4]\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_tokenizer_in_a_package_of_its_own_is_named() -> None:
    with pytest.raises(TinkerError, match="tml-tokenizers"):
        tokenizers.load("TML/some-model")


def handed_out(stub: Any, folder: Path, **changes: object) -> None:
    """Have the stub hand out the tokenizer in `folder`."""
    files = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        files.append({"name": path.name, "sha256": sha256, "size": len(content), **changes})
        stub.on(f"/api/v1/tokenizers/{sha256}", Answer(200, content))
    stub.on("/api/v1/tokenizers", Answer(200, {"base_model": "served", "files": files}))
    known = {"model_name": "served", "tokenizer_id": "/a/folder/of/the/server"}
    stub.on("/api/v1/get_info", Answer(200, {"model_id": "x", "model_data": known}))


def test_the_servers_tokenizer_is_fetched_once_and_kept(
    stub: Any, make_service: Callable[..., ServiceClient], folder: Path, tmp_path: Path
) -> None:
    handed_out(stub, folder)
    for _ in range(2):
        service = make_service(cache_folder=tmp_path)
        training = service.create_lora_training_client("served")
        assert training.encode("hello world") == [0, 3, 4]
    fetched = [each.path for each in stub.requests if "/tokenizers/" in each.path]
    assert len(fetched) == len(list(folder.iterdir()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "../tokenizer.json"}, "'../tokenizer.json'"),
        ({"name": "tokenization.py"}, "'tokenization.py'"),
        ({"size": 10**9}, "at most"),
    ],
)
def test_a_server_cannot_have_just_anything_written_here(
    stub: Any,
    make_service: Callable[..., ServiceClient],
    folder: Path,
    tmp_path: Path,
    changes: dict[str, object],
    reason: str,
) -> None:
    handed_out(stub, folder, **changes)
    training = make_service(cache_folder=tmp_path).create_lora_training_client("served")
    with pytest.raises(TinkerError, match=reason):
        training.get_tokenizer()
    assert not list(tmp_path.rglob("*.json"))


def test_a_file_that_is_not_what_its_hash_says_is_refused(
    stub: Any, make_service: Callable[..., ServiceClient], folder: Path, tmp_path: Path
) -> None:
    handed_out(stub, folder)
    for path in folder.iterdir():
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        stub.on(f"/api/v1/tokenizers/{sha256}", Answer(200, b"something else"))
    training = make_service(cache_folder=tmp_path).create_lora_training_client("served")
    with pytest.raises(TinkerError, match="damaged in transit"):
        training.get_tokenizer()


def test_the_hub_is_asked_only_where_the_server_has_none_and_that_is_said(
    stub: Any, service: ServiceClient, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stub.on("/api/v1/tokenizers", Answer(200, {"base_model": str(folder), "files": []}))
    stub.on(
        "/api/v1/get_info",
        Answer(200, {"model_id": "x", "model_data": {"model_name": str(folder)}}),
    )
    assert service.create_lora_training_client("served").encode("hello") == [0, 3]
    assert f"the server has no tokenizer for {folder}" in caplog.text
