"""The site builds without a warning and loads nothing from elsewhere; what it says is there."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tinsmith.cli.__main__ import cli
from tinsmith.server import metrics

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
WITH_COMMANDS = [ROOT / "README.md", ROOT / "docs" / "tutorial.md", *GUIDES]


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?(https?:[^\s\">]+)", text)
        loaded += re.findall(r"<link[^>]*stylesheet[^>]*href=\"?(https?:[^\s\">]+)", text)
        assert not loaded, f"{page.name} loads {loaded}"
    client = (tmp_path / "reference" / "python" / "training-client.html").read_text("utf-8")
    assert "tinsmith.client.training.TrainingClient.forward_backward" in client


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_names_the_tests_behind_it(guide: Path) -> None:
    last = guide.read_text("utf-8").strip().split("\n\n")[-1]
    assert last.startswith("Tested by "), guide.name
    assert "tests/" in last or "this page itself" in last


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda path: path.stem)
def test_commands_and_options_exist(page: Path) -> None:
    """Those of blocks that are not run, too."""
    text = page.read_text("utf-8")
    for block in re.findall(r"^[ ]*```bash\n(.*?)^[ ]*```$", text, flags=re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^ *tinsmith .*$", block, flags=re.MULTILINE):
            check(shlex.split(line, comments=True)[1:], line)


def check(words: list[str], line: str) -> None:
    command: click.Command = cli
    known = {option for param in cli.params for option in param.opts + param.secondary_opts}
    context = click.Context(cli)
    for before, word in itertools.pairwise(["", *words]):
        if word.startswith("-"):
            assert word.partition("=")[0] in known, f"{line}: {word}"
        elif isinstance(command, click.Group) and not _takes_a_value(command, before):
            found = command.get_command(context, word)
            assert found is not None, f"{line}: {word}"
            command = found
            known |= {o for param in command.params for o in param.opts + param.secondary_opts}


def _takes_a_value(command: click.Command, word: str) -> bool:
    """Whether what follows this word is an option's value, and no command."""
    options = [each for each in command.params if isinstance(each, click.Option)]
    return any(word in option.opts and not option.is_flag for option in options)


def test_a_command_that_does_not_exist_is_found() -> None:
    for words in (["serv"], ["serve", "--prot", "1"], ["key", "make"]):
        with pytest.raises(AssertionError):
            check(words, "")


def test_the_glossary_has_at_most_forty_words_in_order_and_each_once() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert rows == sorted(set(rows))
    assert 20 <= len(rows) <= 40


def test_every_metric_is_described() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src/tinsmith/server").rglob("*.py"))
    counted = set(re.findall(r"metrics\.count\(\s*\"(\w+)\"", source))
    observed = set(re.findall(r"metrics\.observe\(\s*\"(\w+)\"", source))
    read = set(re.findall(r"\.gauge\(\s*\"(\w+)\"", source))
    table = re.search(r"gauges: dict.*? = \{(.*?)\n        \}", source, flags=re.DOTALL)
    of_slots = re.search(r"def _slot_gauges.*?\{(.*?)\n    \}", source, flags=re.DOTALL)
    assert table is not None and of_slots is not None
    read |= set(re.findall(r"^ {12}\"(\w+)\":", table[1], flags=re.MULTILINE))
    read |= set(re.findall(r"^ {8}\"(\w+)\":", of_slots[1], flags=re.MULTILINE))
    assert counted == set(metrics.COUNTERS)
    assert observed == set(metrics.HISTOGRAMS)
    assert read == set(metrics.GAUGES)


def test_a_metric_comes_with_its_description() -> None:
    numbers = metrics.Metrics()
    numbers.count("samples", status="done")
    numbers.observe("step_seconds", 0.5)
    text = numbers.render().decode()
    assert f"# HELP tinsmith_samples_total {metrics.COUNTERS['samples']}\n" in text
    assert f"# HELP tinsmith_step_seconds {metrics.HISTOGRAMS['step_seconds']}\n" in text
    assert f"# HELP tinsmith_uptime_seconds {metrics.GAUGES['uptime_seconds']}\n" in text
