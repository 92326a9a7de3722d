"""Finding a base model's files, and converting GGUF once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.tiny_gguf import write_gguf
from tinsmith.engine.local.config import EMBEDDED_SOURCE, LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.sources import model_folder, weights_nbytes
from tinsmith.errors import EngineError


@pytest.fixture
def config(tmp_path: Path) -> LocalEngineConfig:
    return LocalEngineConfig(
        device="cpu", cache_folder=tmp_path / "cache", hub_folder=tmp_path / "hub"
    )


def test_a_folder_is_itself(tiny_llama_folder: Path, config: LocalEngineConfig) -> None:
    assert model_folder(str(tiny_llama_folder), config) == tiny_llama_folder


def test_a_hub_name_is_looked_up_in_the_cache_of_this_machine(
    tiny_llama_folder: Path, config: LocalEngineConfig
) -> None:
    repository = config.hub_folder / "models--somebody--tiny"
    shutil.copytree(tiny_llama_folder, repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    assert model_folder("somebody/tiny", config) == repository / "snapshots" / "abc123"


@pytest.mark.parametrize("source", ["somebody/unknown", "/nowhere/model.gguf"])
def test_what_cannot_be_found_is_named(source: str, config: LocalEngineConfig) -> None:
    with pytest.raises(EngineError, match=source):
        model_folder(source, config)


def test_weights_are_counted_from_the_files_headers(
    tiny_llama_folder: Path, tiny_decoder: Decoder
) -> None:
    assert weights_nbytes(tiny_llama_folder, 4) == tiny_decoder.nbytes
    assert weights_nbytes(tiny_llama_folder, 2) == tiny_decoder.nbytes // 2


def test_a_gguf_file_is_converted_once(tmp_path: Path, config: LocalEngineConfig) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    steps: list[tuple[str, float]] = []
    folder = model_folder(str(path), config, lambda what, fraction: steps.append((what, fraction)))
    fractions = [fraction for _, fraction in steps]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    decoder = Decoder.load(folder)
    assert decoder.config.vocab_size == 7
    assert not list(config.cache_folder.glob("*.partial")) + list(
        config.cache_folder.glob(".*partial")
    )
    again: list[float] = []
    assert model_folder(str(path), config, lambda _, fraction: again.append(fraction)) == folder
    assert again == []


def test_a_failed_conversion_leaves_nothing_behind(
    tmp_path: Path, config: LocalEngineConfig
) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF but not really")
    with pytest.raises(EngineError, match=r"broken\.gguf"):
        model_folder(str(path), config)
    assert [entry.suffix for entry in config.cache_folder.iterdir()] == [".lock"]


HOLD = """
import sys, time
from pathlib import Path
from tinsmith.engine.local.model.sources import locked
name, target, log = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
with locked(target):
    for what in ("in", "out"):
        with log.open("a") as file:
            file.write(f"{name} {what}\\n")
        time.sleep(0.2)
"""


def test_of_two_processes_one_converts_at_a_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLD, name, tmp_path / "target", log])
        for name in "ab"
    ]
    assert [holder.wait(60) for holder in holders] == [0, 0]
    lines = log.read_text().split("\n")[:4]
    assert [line.split()[1] for line in lines] == ["in", "out", "in", "out"]


@pytest.mark.real_model
def test_the_embedded_model_loads_quickly_and_ends_messages_rightly(
    real_model_folder: Path,
) -> None:
    from transformers import AutoTokenizer

    began = time.perf_counter()
    decoder = Decoder.load(real_model_folder)
    assert time.perf_counter() - began < 2.0
    tokenizer = AutoTokenizer.from_pretrained(real_model_folder)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.pad_token_id == 2
    assert decoder.config.eos_token_ids == (2,)
    assert decoder.config.is_tied and decoder.config.vocab_size == 49_152
    assert decoder.embedding.dtype == torch.float32


@pytest.mark.real_model
def test_the_embedded_model_is_what_the_source_named_embedded_means(
    real_model_folder: Path,
) -> None:
    config = LocalEngineConfig(device="cpu", cache_folder=real_model_folder.parent)
    assert model_folder(EMBEDDED_SOURCE, config) == real_model_folder


def test_a_relative_folder_is_resolved_when_the_model_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_folder("./mine", LocalEngineConfig()) == tmp_path / "mine"
