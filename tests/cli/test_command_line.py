"""The command as a whole: help, start-up, mistakes, the doctor and the demonstration's failures."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
import pytest

from tinsmith.cli.__main__ import COMMANDS, cli
from tinsmith.cli.fetching import all_pages
from tinsmith.cli.output import Output, size_text, time_text
from tinsmith.cli.training.plot import plot
from tinsmith.cli.training.schedule import learning_rate
from tinsmith.cli.weights.hub import model_card, repository_name
from tinsmith.client.service import ServiceClient
from tinsmith.types import Datum, ModelInput, WeightsInfoResponse

if TYPE_CHECKING:
    from tests.cli.conftest import Run
    from tests.support.server_process import ServerProcess

NOBODY = "http://127.0.0.1:9"
HEAVY = ("numpy", "torch", "transformers", "pydantic", "rich", "sqlalchemy", "starlette", "pyqwest")


def processor_seconds(*command: str) -> float:
    """Of one process. Unlike time on the clock it does not grow with what else is running."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    """S105"""
    code = (
        "import sys\nfrom tinsmith.cli.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert not loaded.intersection(HEAVY)
    assert all(name in done.stdout for name in COMMANDS)
    help_command = (sys.executable, "-m", "tinsmith.cli", "--help")
    assert min(processor_seconds(*help_command) for _ in range(5)) < 0.25


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_for_itself_and_its_parts(name: str, run: Run) -> None:
    result = run(name, "-h")
    assert result.exit_code == 0, result.output
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.help
    for part in getattr(command, "commands", {}).values():
        assert part.help


def test_a_mistyped_command_gets_a_suggestion(run: Run) -> None:
    result = run("chekpoint")
    assert result.exit_code == 2
    assert "Did you mean 'checkpoint'?" in result.stderr


def test_a_server_that_is_not_there_is_one_error_with_advice() -> None:
    """S106. `doctor` finds the same without waiting for retries."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "tinsmith.cli", "doctor", "--json"],
            capture_output=True,
            text=True,
            env={"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-x", "HOME": "/nonexistent"},
            check=False,
        )
    assert done.returncode == 1
    findings = {each["what"]: each for each in json.loads(done.stdout)["findings"]}
    assert findings["server"]["status"] == "problem"
    assert "tinsmith serve" in findings["server"]["cure"]


def test_the_doctor_finds_a_healthy_server(run: Run, run_json: Any, server: ServerProcess) -> None:
    report = run_json("doctor")
    assert report["ok"]
    found = {each["what"]: each["status"] for each in report["findings"]}
    assert found["server"] == found["key"] == found["Python"] == "ok"
    table = run("doctor")
    assert table.exit_code == 0
    assert server.url in table.stdout


def test_a_model_that_cannot_be_served_is_named_at_the_terminal_and_by_the_doctor(
    tmp_path: Path,
) -> None:
    """The server is reached, but has nothing to serve; until then it says what it does."""
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, or so it says")
    options = (
        *("--engine", "local", "--model", f"other/model={tmp_path / 'broken.gguf'}"),
        *("--model", f"some/model={tmp_path / 'nothing'}"),
    )
    command = [sys.executable, "-m", "tinsmith.cli"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TIN")}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    process = subprocess.Popen(
        [*command, "serve", "--port", "0", "--data-dir", str(tmp_path / "data"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        told: list[str] = []
        for line in process.stderr:
            told.append(line)
            if "no model that can be served" in line:
                break
        assert any("converting broken.gguf: weights (10%)" in line for line in told)
        refused = [line for line in told if line.startswith("Not served: ")]
        assert "other/model: could not convert" in refused[0]
        assert "some/model" in refused[1] and "nothing" in refused[1]
        said = "".join(process.stdout.readline() for _ in range(3))
        for name, value in re.findall(r"^export (TINKER_\w+)=(\S+)$", said, re.MULTILINE):
            environment[name] = value
        doctor = subprocess.run(
            [*command, "doctor", "--json"],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert doctor.returncode == 1
    findings = {each["what"]: each for each in json.loads(doctor.stdout)["findings"]}
    assert "no model" in findings["server"]["found"]
    assert findings["model some/model"]["status"] == "problem"


def test_the_doctor_tells_a_mac_how_its_gpu_is_used(
    run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    (found,) = [
        each["found"] for each in run_json("doctor")["findings"] if each["what"] == "device"
    ]
    assert found == "CPU; this Mac's GPU is used with serve --device mps"


def test_the_doctor_names_a_refused_key_and_the_cure(run: Run) -> None:
    result = run("doctor", env={"TINKER_API_KEY": "tml-wrong"})
    assert result.exit_code == 1
    assert "PROBLEM" in result.stdout
    assert "tinsmith key create" in result.stdout


@dataclass(frozen=True)
class Trouble:
    """Something that is wrong with a machine, and the finding that it leads to."""

    finding: str
    found: str
    env: dict[str, str]
    patches: dict[str, Any]


def _version_without(missing: str) -> Any:
    version = importlib.metadata.version

    def find(name: str) -> str:
        if name == missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    return find


def _which_with_driver(name: str) -> str | None:
    return "/usr/bin/nvidia-smi" if name == "nvidia-smi" else shutil.which(name)


TROUBLES = {
    "no server": Trouble("server", "cannot be reached", {"TINKER_BASE_URL": NOBODY}, {}),
    "no address": Trouble("server", "is not set", {"TINKER_BASE_URL": ""}, {}),
    "wrong key": Trouble("key", "does not accept it", {"TINKER_API_KEY": "tml-wrong"}, {}),
    "no key": Trouble(
        "key",
        "there is none",
        {"TINKER_API_KEY": "", "TINSMITH_CREDENTIALS_FILE": "/nonexistent"},
        {},
    ),
    "packages": Trouble(
        "engine packages",
        "missing: torch",
        {},
        {"importlib.metadata.version": _version_without("torch")},
    ),
    "old Python": Trouble("Python", "", {}, {"sys.version_info": (3, 10, 1)}),
    "disk": Trouble(
        "data", "5.0 MB free", {}, {"shutil.disk_usage": lambda path: SimpleNamespace(free=5 << 20)}
    ),
    "folder": Trouble(
        "cache folder", "cannot be written", {}, {"os.access": lambda path, mode: False}
    ),
    "no torch": Trouble(
        "device",
        "no torch",
        {},
        {
            "shutil.which": _which_with_driver,
            "importlib.util.find_spec": lambda name: None,
        },
    ),
    "CPU torch": Trouble(
        "device",
        "only knows the CPU",
        {},
        {
            "shutil.which": _which_with_driver,
            "importlib.metadata.version": lambda name: "2.13.0+cpu",
        },
    ),
    "no model": Trouble("embedded model", "not fetched", {"XDG_CACHE_HOME": "/nonexistent"}, {}),
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
def test_the_doctor_names_each_trouble_with_a_cure(
    trouble: Trouble, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in trouble.patches.items():
        monkeypatch.setattr(name, value)
    result = run("doctor", "--json", env=trouble.env)
    monkeypatch.undo()
    report = json.loads(result.stdout)
    finding = next(each for each in report["findings"] if each["what"] == trouble.finding)
    assert finding["status"] != "ok"
    assert trouble.found in finding["found"]
    for each in report["findings"]:
        assert (each["status"] == "ok") == (each["cure"] is None), each
    problems = [each for each in report["findings"] if each["status"] == "problem"]
    assert (result.exit_code == 0) == report["ok"] == (not problems)


def test_the_rate_rises_and_falls() -> None:
    rates = [learning_rate(1e-3, step, 20, 5) for step in range(20)]
    assert rates.index(max(rates)) in (4, 5)
    assert 0 < rates[-1] < rates[0] < max(rates) == 1e-3
    assert learning_rate(1e-3, 0, 1, 1) > 0


# --- values as people read them ---------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, 59, 61, 3600, 3601, 7300, 86400, 86400 * 8, 86400 * 31])
@pytest.mark.parametrize("sign", [1, -1])
def test_times_read_like_the_official_ones(seconds: int, sign: int) -> None:
    from tinker.cli.output import format_timestamp

    moment = datetime.now(UTC) - timedelta(seconds=sign * (seconds + 0.5))
    assert time_text(moment) == format_timestamp(moment)


@pytest.mark.parametrize("size", [0, 1023, 1024, 1536, 10**6, 10**9, 10**15, 10**19, -1])
def test_sizes_read_like_the_official_ones(size: int) -> None:
    from tinker.cli.output import format_size

    assert size_text(size) == format_size(size)


@pytest.mark.parametrize(("limit", "asked"), [(0, 3), (250, 3), (130, 2), (20, 1), (100, 1)])
def test_long_lists_are_fetched_in_pages(limit: int, asked: int) -> None:
    """S83"""
    requests = []

    def fetch(limit: int, offset: int) -> tuple[list[int], int]:
        requests.append((limit, offset))
        return list(range(offset, min(offset + limit, 250))), 250

    items, total = all_pages(
        fetch, limit=limit, page_size=100, what="things", output=Output(is_json=True)
    )
    assert items == list(range(limit or 250))
    assert (len(requests), total) == (asked, 250)


def test_a_plot_has_a_column_for_each_value() -> None:
    lines = plot([4.0, 2.0, 0.0], height=2).splitlines()
    assert lines == ["4.00 ┤ ███", "     │ ██████", "0.00 ┼──────────"]
    assert "nan" not in plot([float("nan"), 1.0])


def test_a_hub_repository_is_named_after_the_run() -> None:
    assert repository_name("tinker-Qwen3 8B-a:train:0") == "tinker-Qwen3-8B-a-train-0"
    info = WeightsInfoResponse(base_model="Qwen/Qwen3-8B", is_lora=True, lora_rank=8)
    card = model_card("tinker://a/weights/b", "me/it", info)
    assert "base_model: Qwen/Qwen3-8B" in card
    assert "tinker://a/weights/b" in card


def test_top_shows_what_the_server_does(run: Run, run_json: Any, server: ServerProcess) -> None:
    facts = run_json("top", "--interval", "0.1")
    assert facts["url"] == server.url
    assert facts["engine"] is True
    assert facts["queued_operations"] == 0
    shown = run("top", "--interval", "0.1").stdout
    assert "Trained tokens per second" in shown
    nobody = run("top", env={"TINKER_BASE_URL": "http://127.0.0.1:9"})
    assert nobody.exit_code == 1
    assert "tinsmith doctor" in nobody.stderr


def test_top_counts_what_is_under_way(run_json: Any, server: ServerProcess) -> None:
    datum = Datum(
        model_input=ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    with ServiceClient(base_url=server.url, api_key=server.key) as service:
        training = service.create_lora_training_client("tinsmith/fake", rank=8)
        training.forward_backward([datum], "cross_entropy").result()
        is_over = threading.Event()

        def train() -> None:
            while not is_over.is_set():
                training.forward_backward([datum], "cross_entropy").result()

        thread = threading.Thread(target=train)
        thread.start()
        try:
            facts = run_json("top", "--interval", "0.5")
        finally:
            is_over.set()
            thread.join()
    assert facts["live_models"] >= 1
    assert facts["trained_tokens_per_second"] > 0
    assert facts["operations_per_second"] > 0
    assert facts["operation_time"] > 0
    assert run_json("top", "--interval", "0.2")["trained_tokens_per_second"] == 0


def test_rates_are_changes_over_time() -> None:
    from tinsmith.cli.server.metrics import parse

    lines = (
        'tinsmith_samples_total{{status="done"}} {}\ntinsmith_samples_total{{status="failed"}} 1'
    )
    before, now = parse(lines.format(10), 0.0), parse(lines.format(30), 2.0)
    assert now.get("samples_total") == 31
    assert now.rate("samples_total", before) == 10.0
    assert before.rate("samples_total", now) == 0.0
    assert now.mean("nothing", before) is None


def test_a_quantile_is_the_end_of_a_bucket_of_what_was_observed_meanwhile() -> None:
    from tinsmith.cli.server.metrics import parse

    def reading(*counts: int) -> str:
        ends = ("0.01", "0.1", "+Inf")
        lines = zip(ends, counts, strict=True)
        return "\n".join(f'tinsmith_x_seconds_bucket{{le="{e}"}} {n}' for e, n in lines)

    before, now = parse(reading(100, 100, 100), 0.0), parse(reading(100, 199, 200), 1.0)
    assert now.quantile("x_seconds", 0.5, before) == 0.1
    assert now.quantile("x_seconds", 0.99, before) == 0.1
    assert now.quantile("x_seconds", 1.0, before) == float("inf")
    assert before.quantile("x_seconds", 0.99, before) == 0.01, "all of it, if nothing was new"
    assert now.quantile("nothing", 0.99, before) is None


@pytest.mark.parametrize(
    ("shell", "words", "word", "wanted"),
    [
        ("bash", "tinsmith che", "1", "checkpoint"),
        ("bash", "tinsmith run li", "2", "list"),
        ("zsh", "tinsmith che", "1", "checkpoint"),
        ("fish", "tinsmith che", "che", "checkpoint"),
    ],
)
def test_the_shell_completes_commands(
    shell: str, words: str, word: str, wanted: str, run: Run
) -> None:
    env = {"COMP_WORDS": words, "COMP_CWORD": word}
    completed = run(env=env | {"_TINSMITH_COMPLETE": f"{shell}_complete"})
    assert re.match(rf"plain[,\n]{wanted}\b", completed.stdout)
    assert completed.stdout.count("plain") == 1
    script = run(env={"_TINSMITH_COMPLETE": f"{shell}_source"}).stdout
    assert f"_TINSMITH_COMPLETE={shell}_complete" in script
    assert f"_TINSMITH_COMPLETE={shell}_source" in run("--help").stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_understands_the_completion_script(shell: str, run: Run, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "completion"
    script.write_text(run(env={"_TINSMITH_COMPLETE": f"{shell}_source"}).stdout)
    subprocess.run([shell, "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    """As after `eval "$(_TINSMITH_COMPLETE=bash_source tinsmith)"` and a tab."""
    tinsmith = tmp_path / "tinsmith"
    tinsmith.write_text(f'#!/bin/sh\nexec {sys.executable} -m tinsmith.cli "$@"\n')
    tinsmith.chmod(0o755)
    lines = (
        'eval "$(_TINSMITH_COMPLETE=bash_source tinsmith)"',
        "COMP_WORDS=(tinsmith che) COMP_CWORD=1",
        "_tinsmith_completion tinsmith",
        'echo "${COMPREPLY[@]}"',
    )
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
    )
    assert done.stdout == "checkpoint\n"


def test_progress_is_told_in_plain_lines_on_the_error_stream(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tinsmith.cli.progress import Progress

    with Progress().stage("training", total=4) as stage:
        stage.update(2, "loss 1.5")
    with Progress().stage("converting", total=1.0) as stage:
        stage.update(0.25)
    with Progress(is_quiet=True).stage("nothing", total=1) as stage:
        stage.update(1)
    out, err = capsys.readouterr()
    assert out == ""
    assert "training 2/4: loss 1.5, 0 s left" in err
    assert "converting 25%:" in err
    assert "nothing" not in err


def test_progress_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from tinsmith.cli.progress import Progress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with Progress().stage("training", total=4) as stage:
        stage.update(2, "loss 1.5")
    with Progress().stage("waiting") as stage:
        stage.update(0, "for it")
    assert "✓" in screen.getvalue()
    assert "4/4" in screen.getvalue()


def test_tables_are_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from tinsmith.cli.output import Table

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    Output().show({}, Table(["Id", "Note"], [["a:train:0", "[bold]"]], "One thing"))
    drawn = screen.getvalue()
    assert "One thing" in drawn
    assert "a:train:0" in drawn
    assert "[bold]" in drawn
    assert "┃" in drawn
