"""The real tinker-cookbook: its own loops, on the official client and on ours.

S114: against identical deterministic servers both log the same numbers, to the last bit. The
cookbook is fetched from the package index once per machine; its code is not in this repository.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import tinsmith
from tests.engine.families.test_families import load
from tests.engine.families.test_param_counts import PUBLISHED
from tests.engine.sample.sampling_reference import trainer_logits
from tests.engine.test_exports import save_adapter, save_model
from tests.engine.train.training_reference import Reference
from tests.support.child import ended_well
from tests.support.server_process import LOCAL_SCRIPTS, ServerProcess, serving
from tests.support.tiny_families import build_tiny, save_tiny
from tests.support.tiny_tokenizers import save_chat_tokenizer
from tests.support.tiny_vision import save_tiny_vision
from tinsmith.engine.local.model.images.settings import SEEING_TYPES
from tinsmith.engine.local.model.model_types import needed_transformers

pytest.importorskip("tinker")
pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"
VERSION = "0.5.8"
# What it imports beside torch, transformers and the client; without their own dependencies, which
# the test environment has.
PACKAGES = (
    f"tinker-cookbook=={VERSION} chz termcolor cloudpickle blobfile aiohttp multidict yarl "
    "frozenlist aiosignal attrs propcache aiohappyeyeballs tiktoken datasets pyarrow pandas dill "
    "multiprocess xxhash pyrage tml-renderers python-dateutil pytz six tzdata lxml pycryptodomex "
    "pillow pylatexenc"
).split()


@pytest.fixture(scope="module")
def cookbook() -> Path:
    """A folder with the cookbook and what it needs; where this environment has it, its own."""
    if (installed := importlib.util.find_spec("tinker_cookbook")) is not None:
        assert importlib.metadata.version("tinker-cookbook") == VERSION
        assert installed.origin is not None
        return Path(installed.origin).parents[1]
    cache = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")))
    wanted = hashlib.sha256(" ".join(PACKAGES).encode()).hexdigest()[:8]
    folder = cache / "tinsmith-tests" / f"cookbook-{VERSION}-{wanted}"
    if not folder.exists():
        fetching = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        fetched = subprocess.run(
            [*command, str(fetching), *PACKAGES], capture_output=True, text=True, timeout=600
        )
        if fetched.returncode != 0:
            shutil.rmtree(fetching, ignore_errors=True)
            pytest.skip(f"tinker-cookbook could not be fetched: {fetched.stderr[-300:]}")
        fetching.rename(folder)
    return folder


def run(server: Any, cookbook: Path, script: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env={
            **os.environ,
            **server.script_environment,
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": server.key,
            "TINKER_TELEMETRY": "0",
            "PYTHONPATH": str(cookbook),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert ended_well(done.returncode, done.stderr), (script, arguments, done.stderr[-4000:])
    logged: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return logged


def test_the_supervised_loop_logs_the_same_numbers_on_both_clients(
    cookbook: Path, local_server_in: Any, tiny_model: Path, tmp_path: Path
) -> None:
    logged = {}
    for sdk in ("tinker", "tinsmith"):
        folder = tmp_path / sdk
        folder.mkdir()
        with local_server_in(folder) as server:
            with tinsmith.ServiceClient(base_url=server.url, api_key=server.key) as service:
                # The cookbook gives no seed; one first checkpoint makes both runs comparable.
                training = service.create_lora_training_client("tiny", rank=4, seed=5)
                start = training.save_state("start").result(60).path
            logged[sdk] = run(
                server,
                cookbook,
                "cookbook_supervised.py",
                *(sdk, str(folder / "log"), start, str(tiny_model)),
            )
    assert logged["tinsmith"] == logged["tinker"]
    assert logged["tinsmith"]["imported"] > 100
    losses = [step["train_mean_nll"] for step in logged["tinsmith"]["steps"]]
    assert len(losses) == 7, "three steps, and four more after going on from the second"
    assert losses[-1] < losses[0]


def test_the_reinforcement_learning_loop_runs_on_ours(
    cookbook: Path, local_server_in: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """Groups are sampled, scored and trained on; sampler and trainer agree about every token. What
    the loop logged is on the run's curves, where our client runs it: on a cluster that loses nodes
    it is the official one."""
    sdk = "tinsmith" if ServerProcess.cluster is None else "tinker"
    with local_server_in(tmp_path) as server:
        logged = run(
            server, cookbook, "cookbook_rl.py", sdk, str(tmp_path / "log"), str(tiny_model)
        )
        curves = curves_of_the_run(server)
    steps = logged["steps"]
    logs = ("env/all/reward/total", "optim/lr", "optim/kl_sample_train_v1")
    for name in logs if sdk == "tinsmith" else ():
        assert curves[name]["axis"] == "step" and curves[name]["x"] == [0, 1, 2]
        assert curves[name]["mean"] == [step[name] for step in steps], name
    assert len(steps) == 3 and logged["saved"] == 2
    for step in steps:
        assert step["env/all/total_episodes"] == 40
        assert abs(step["optim/kl_sample_train_v1"]) < 1e-5


def curves_of_the_run(server: Any) -> dict[str, Any]:
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": server.key}) as api:
        (training_run,) = api.get("/training_runs").json()["training_runs"]
        path = f"/training_runs/{training_run['training_run_id']}/metrics"
        series: dict[str, Any] = api.get(path).raise_for_status().json()["series"]
    return series


COUNTS = """
import json, sys
from tinker_cookbook.hyperparam_utils import get_lora_param_count
parts = ("mlp", "attn", "unembed")
count = lambda name, part: get_lora_param_count(
    name, lora_rank=1, **{f"train_{each}": each == part for each in parts}
)
print(json.dumps({name: {part: count(name, part) for part in parts} for name in sys.argv[1:]}))
"""


def test_the_counts_that_adapters_are_compared_with_are_its_own(cookbook: Path) -> None:
    """Those of `tests/engine/families/test_param_counts.py`."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTS, *PUBLISHED],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": str(cookbook)},
    )
    assert ended_well(done.returncode, done.stderr), done.stderr[-4000:]
    assert json.loads(done.stdout) == {name: counts for name, (*_, counts) in PUBLISHED.items()}


KNOWN_TO_ITS_MERGE = ("qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "nemotron_h")


def test_its_merged_models_compute_what_our_checkpoints_do(cookbook: Path, tmp_path: Path) -> None:
    """`build_hf_model` on the files of a checkpoint: logits within 1e-5 of the adapter's.

    `build_lora_adapter` takes them too, of all but DeepSeek, for which it makes none.
    """
    adapted = {}
    for model_type in KNOWN_TO_ITS_MERGE:
        if needed_transformers(model_type) is not None:
            continue
        folder = tmp_path / model_type
        base = save_tiny(model_type, folder / "base")
        adapted[model_type] = Reference(base, save_adapter(folder / "base", folder / "adapter"))
    give_to_the_cookbook(cookbook, [tmp_path / model_type for model_type in adapted])
    tokens = torch.arange(12)
    for model_type, reference in adapted.items():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / model_type / "out" / "merged")
        with torch.no_grad():
            expected, bare = reference.logits(tokens), reference.model(tokens[None]).logits[0]
            found = merged(tokens[None]).logits[0]
        assert (bare - expected).abs().max() > 1e-2 * expected.abs().max()
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max(), model_type
        has_adapter = (tmp_path / model_type / "out" / "adapter").exists()
        assert has_adapter == (model_type != "deepseek_v3")


@pytest.mark.parametrize("model", ["Qwen3_5", "Qwen3_5Moe"])
def test_it_merges_a_checkpoint_of_a_model_that_also_sees_images(
    model: str, cookbook: Path, tmp_path: Path
) -> None:
    """As Qwen3.5 is published: queries, keys and values of linear attention are one matrix."""
    text_type = {"Qwen3_5": "qwen3_5_text", "Qwen3_5Moe": "qwen3_5_moe_text"}[model]
    text = build_tiny(text_type).config.to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    config = getattr(transformers, f"{model}Config")(
        text_config=text, vision_config={**vision, "out_hidden_size": 32}
    )
    torch.manual_seed(3)
    whole = getattr(transformers, f"{model}ForConditionalGeneration")(config)
    whole.save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter")
    give_to_the_cookbook(cookbook, [tmp_path])
    tokens = list(range(5, 30))
    expected = trainer_logits(load(tmp_path / "base"), tokens, adapter)
    found = trainer_logits(load(tmp_path / "out" / "merged"), tokens)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_it_takes_a_checkpoint_of_a_model_with_tied_embeddings(
    cookbook: Path, tmp_path: Path
) -> None:
    """Its merged model changes the one matrix that both ends share, so nothing is compared."""
    save_model("llama, tied", tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter")
    give_to_the_cookbook(cookbook, [tmp_path])
    assert (tmp_path / "out" / "merged" / "config.json").exists()
    assert (tmp_path / "out" / "adapter" / "adapter_config.json").exists()


HOSTED_NAMES = {
    "Qwen/Qwen3.5-9B-Base": "qwen3_5",
    "Qwen/Qwen3.5-4B": "qwen3_5",
    "Qwen/Qwen3.5-35B-A3B": "qwen3_5_moe",
    "Qwen/Qwen3-30B-A3B": "qwen3_moe",
    "openai/gpt-oss-20b": "gpt_oss",
    "deepseek-ai/DeepSeek-V3.1": "deepseek_v3",
    "moonshotai/Kimi-K2-Thinking": "kimi_k2",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron_h",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "qwen3_vl_moe",
}
"""By the name that a recipe asks for: the architecture of the model. The first is its default."""


def test_a_recipe_trains_tiny_weights_of_its_own_default_model_and_of_every_family(
    cookbook: Path, tmp_path: Path
) -> None:
    """Under the hosted names, with the renderers that the cookbook has for them, on one server."""
    with serving_names(tmp_path, HOSTED_NAMES) as (server, names):
        arguments = (str(tmp_path), str(tmp_path / "tokenizer"), *names)
        found = run(server, cookbook, "cookbook_recipe.py", *arguments)
    assert list(found) == names
    for name, recipe in found.items():
        assert len(recipe["losses"]) == 3 and recipe["losses"][-1] < recipe["losses"][0], name
    assert len({recipe["renderer"] for recipe in found.values()}) > 5


def test_a_reinforcement_learning_recipe_runs_on_its_own_default_model_and_every_family(
    cookbook: Path, tmp_path: Path
) -> None:
    """`rl_basic`: sampler and trainer agree about every token, whatever the model is made of."""
    with serving_names(tmp_path, HOSTED_NAMES) as (server, names):
        arguments = (str(tmp_path), str(tmp_path / "tokenizer"), *names)
        found = run(server, cookbook, "cookbook_rl_recipe.py", *arguments)
    assert list(found) == names
    for name, recipe in found.items():
        assert len(recipe["steps"]) == 2, name
        for step in recipe["steps"]:
            assert step["env/all/total_episodes"] == 18
            assert abs(step["optim/kl_sample_train_v1"]) < 1e-5, name


def test_a_recipe_of_images_runs_on_its_own_default_model(cookbook: Path, tmp_path: Path) -> None:
    """`vlm_classifier` trains on photos, samples about them, and scores those held out."""
    name = "Qwen/Qwen3.5-397B-A17B"
    if (needed := needed_transformers("qwen3_vl")) is not None:
        pytest.skip(f"images need transformers {needed}")
    with serving_names(tmp_path, {name: "qwen3_5_moe"}) as (server, _):
        arguments = (str(tmp_path / "log"), str(tmp_path / "tokenizer"))
        model = str(tmp_path / "qwen3_5_moe")
        found = run(server, cookbook, "cookbook_vision_recipe.py", *arguments, model)
    assert found["model"] == name
    losses = [step["train_mean_nll"] for step in found["steps"]]
    assert len(losses) == 4 and losses[-1] < losses[0]
    first, second = (step for step in found["steps"] if "accuracy" in step)
    assert second["test/nll"] < first["test/nll"], "of what was held out, before the step"
    # The same photos, some of them turned over.
    assert first["test/nll"] == pytest.approx(losses[0], rel=0.1)


@contextlib.contextmanager
def serving_names(folder: Path, types: dict[str, str]) -> Iterator[tuple[ServerProcess, list[str]]]:
    """A server with tiny weights of each architecture under hosted names, and those names."""
    types = {name: each for name, each in types.items() if needed_transformers(each) is None}
    for model_type in set(types.values()):
        save = save_tiny_vision if model_type in SEEING_TYPES else save_tiny
        save(model_type, folder / model_type, vocab_size=360, max_position_embeddings=1024)
        save_chat_tokenizer(folder / model_type)
    save_chat_tokenizer(folder / "tokenizer")
    served = [f"--model={name}={folder / each}" for name, each in types.items()]
    with serving(folder, "--engine", "local", "--device", "cpu", *served) as server:
        server.script_environment = LOCAL_SCRIPTS
        yield server, list(types)


def give_to_the_cookbook(cookbook: Path, folders: list[Path]) -> None:
    """Each has `base` and `adapter`, and is given `out`."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "cookbook_weights.py")],
        input="".join(f"{each}/base {each}/adapter {each}/out\n" for each in folders),
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": str(cookbook), "OMP_NUM_THREADS": "1"},
    )
    assert ended_well(done.returncode, done.stderr), done.stderr[-4000:]
