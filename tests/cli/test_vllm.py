"""vLLM itself, on the CPU, computes with our exports what the server does.

It has packages of its own, gigabytes of them: `make vllm` makes an environment and runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Trained, training_on
from tests.cli.test_export import scores_of
from tests.support import byte_tokenizer, tiny_llama

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("TINSMITH_VLLM_PYTHON")
if PYTHON is None:
    pytest.skip(
        "TINSMITH_VLLM_PYTHON names no Python with vLLM: make vllm", allow_module_level=True
    )


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of 32 numbers, the smallest that vLLM's attention takes."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama.save(
        folder,
        seed=0,
        hidden_size=128,
        intermediate_size=192,
        vocab_size=258,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return byte_tokenizer.save(folder)


def vllm_scores(model: Path, adapter: Path | None, tokens: list[int], dtype: str) -> list[float]:
    asked = {"model": str(model), "adapter": adapter and str(adapter), "dtype": dtype}
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).with_name("vllm_scores.py"))],
        input=json.dumps({**asked, "tokens": tokens}),
        env={
            "HOME": str(model.parent),
            "PATH": os.environ["PATH"],
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    with training_on(tiny_model, tmp_path_factory.mktemp("server"), learning_rate=0.02) as found:
        yield found


@pytest.fixture(scope="module")
def base_scores(tiny_model: Path, trained: Trained) -> list[float]:
    return vllm_scores(tiny_model, None, trained.tokens, "float32")


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ((), "float32"),
        (("--format", "merged"), "float32"),
        (("--format", "merged", "--quantize", "int8"), "float32"),
        (("--format", "merged", "--quantize", "int4"), "bfloat16"),  # what its product takes
    ],
    ids=["adapter", "merged", "int8", "int4"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft, which loads the export back
def test_vllm_scores_an_export_as_the_server_does(
    options: tuple[str, ...],
    dtype: str,
    tiny_model: Path,
    trained: Trained,
    base_scores: list[float],
    run_json: Any,
    tmp_path: Path,
) -> None:
    target = tmp_path / "export"
    base = ("--base", str(tiny_model), "-o", str(target))
    run_json("export", trained.external, *options, *base, env=trained.server.environment)
    model, adapter = (target, None) if options else (tiny_model, target)
    found = vllm_scores(model, adapter, trained.tokens, dtype)
    is_packed = "--quantize" in options
    # Integers are compared with the same integers, as `transformers` reads them.
    wanted = scores_of(target, trained.tokens).tolist() if is_packed else trained.scores
    assert found == pytest.approx(wanted, rel=0.05 if dtype == "bfloat16" else 1e-4)
    # Training moved the model, so the base alone would not pass.
    assert found != pytest.approx(base_scores, rel=0.2)
