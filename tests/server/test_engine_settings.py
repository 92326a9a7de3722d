"""Settings of the engine: from the file, the environment and the command line to the engine."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tinsmith.assembly import engine_factory
from tinsmith.engine.fake import FakeEngine
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.engine import LocalEngine
from tinsmith.errors import ValidationError
from tinsmith.server.config_sources import build_config, check_settings, load_config
from tinsmith.server.engines.plan import SlotPlan, slot_plans

DOCS = Path(__file__).parents[2] / "docs"


def test_engine_settings_come_from_file_environment_and_options_in_that_order(
    tmp_path: Path,
) -> None:
    file = tmp_path / "tinsmith.toml"
    file.write_text(
        'port = 1\n[engine]\nkind = "fake"\nmax_lora_rank = 8\nnum_threads = 1\nlogits_bytes = 1\n'
    )
    environ = {"TINSMITH_ENGINE__NUM_THREADS": "2", "TINSMITH_ENGINE__LOGITS_BYTES": "2"}
    config = load_config(file, {"engine.logits_bytes": "3"}, environ)
    assert (config.port, config.engine) == (1, "fake")
    settings = check_settings(LocalEngineConfig, config.engine_settings, "engine.")
    assert settings == {"max_lora_rank": 8, "num_threads": 2, "logits_bytes": 3}


async def test_what_is_set_reaches_the_engine() -> None:
    config = build_config({"engine": "fake", "engine.max_lora_rank": "4"})
    engine = await engine_factory(config)(SlotPlan())
    assert isinstance(engine, FakeEngine)
    assert (await engine.capabilities()).max_lora_rank == 4


def test_the_form_of_base_weights_reaches_the_local_engine() -> None:
    start = engine_factory(build_config({"base_weights": "nf4"}))
    settings = inspect.getclosurevars(start).nonlocals["settings"]
    assert isinstance(settings, LocalEngineConfig) and settings.base_weights == "nf4"


async def test_engines_on_one_device_have_even_parts_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two that plan with nine tenths each of one GPU leave the second without memory."""
    found: list[float] = []

    async def start(settings: LocalEngineConfig, **_: object) -> None:
        found.append(settings.memory_fraction)

    monkeypatch.setattr(LocalEngine, "start", start)
    config = build_config({"engine": "local", "engines": "3", "devices": "cuda:0,cuda:1"})
    for plan in slot_plans(config):
        await engine_factory(config)(plan)
    assert found == [0.45, 0.9, 0.45]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"engine.micro_batch_token": 1},
            "'engine.micro_batch_token'; did you mean 'engine.micro_batch_tokens'",
        ),
        ({"engine.micro_batch_tokens": "many"}, "engine.micro_batch_tokens.*number.*'many'"),
        ({"engine.micro_batch_tokens": 0}, "engine.micro_batch_tokens.*above zero"),
        ({"engine.checkpoint_layers": "perhaps"}, "engine.checkpoint_layers.*true or false"),
        ({"engine.device": "cpu"}, "engine.device.*set as 'device', without 'engine.'"),
        ({"engine.models": "x"}, "engine.models.*set as 'models'"),
        ({"engine.base_weights": "nf4"}, "engine.base_weights.*set as 'base_weights'"),
        ({"base_weights": "int4"}, "base_weights.*'full', 'int8', 'fp8', 'nf4', got 'int4'"),
        ({"engine": "fake", "engine.pass_seconds": 1}, "set as 'fake_pass_seconds'"),
        ({"engine": "fake", "engine.num_threads": 1}, "no setting called 'engine.num_threads'"),
    ],
)
def test_an_engine_setting_that_cannot_be_is_refused_before_the_server_starts(
    settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        engine_factory(build_config(settings))


ADVICE = [
    pytest.param(name, value, id=f"{page.relative_to(DOCS)}: {name}")
    for page in sorted(DOCS.rglob("*.md"))
    for name, value in re.findall(r"--set ([\w.-]+)=([^\s`]+)", page.read_text())
    if name != "NAME" and name != "engine.NAME"
]


def test_the_guides_advise_settings_of_server_and_engine() -> None:
    names = {str(param.values[0]) for param in ADVICE}
    assert any(name.startswith("engine.") for name in names)
    assert any(not name.startswith("engine.") for name in names)


@pytest.mark.parametrize(("name", "value"), ADVICE)
def test_the_advice_of_the_guides_is_accepted(name: str, value: str) -> None:
    engine_factory(load_config(None, {name.replace("-", "_"): value}, {}))
