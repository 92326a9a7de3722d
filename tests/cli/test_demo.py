"""The demonstration, from beginning to end; where it is to learn, on the real small model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from tests.support.child import Child
from tests.support.server_process import clean_environment
from tinsmith.cli.training.persona import OPENING

pytestmark = pytest.mark.slow


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tinsmith.cli", "demo", *arguments],
        capture_output=True,
        text=True,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.real_model
def test_the_model_learns_in_the_demo(tmp_path: Path) -> None:
    done = demo("--json", "--data-dir", str(tmp_path))
    story = json.loads(done.stdout)
    assert len(story["losses"]) == 20
    assert story["losses"][-1] < story["losses"][0] / 4
    assert not any(answer["before"].startswith(OPENING) for answer in story["answers"])
    assert sum(answer["after"].startswith(OPENING) for answer in story["answers"]) >= 3
    assert story["sampler_checkpoint"].endswith("/sampler_weights/pirate")
    assert story["seconds"] < 300
    assert done.stderr == ""


@pytest.mark.real_model
def test_the_demo_tells_people_what_it_did_and_what_to_do_next(tmp_path: Path) -> None:
    done = demo("--steps", "2", "--data-dir", str(tmp_path))
    page = done.stdout
    assert "Loss per token over 2 steps\n" in page
    assert re.search(r"What do cats eat\?\n  before  \S.*\n(.*\n)*?  after   \S", page)
    assert re.search(r"^Saved: tinker://\S+/sampler_weights/pirate$", page, re.MULTILINE)
    following = page.partition("Three commands to try next:")[2]
    assert re.findall(r"tinsmith (serve|chat|train)", following) == ["serve", "chat", "train"]
    stages = re.findall(r"^([a-z ]+): done in [\d.]+ s$", done.stderr, re.MULTILINE)
    assert stages == [
        "finding the model",
        "starting a server",
        "asking the model as it is",
        "training",
        "saving a checkpoint",
        "asking what it learned",
        "stopping the server",
    ]
    assert re.search(r"^training 1/2: loss [\d.]+, \d+ tokens/s, \d+ s left$", done.stderr, re.M)
    # Every line of the error stream is one of ours: no library's own progress bar among them.
    assert all(line.startswith(tuple(stages)) for line in done.stderr.splitlines())


def test_a_server_that_is_kept_shows_the_run_to_a_browser_until_ctrl_c(
    tmp_path: Path, newcomer_environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "tinsmith.cli", "demo", "--keep", "--steps", "1"]
    child = Child([*command, "--data-dir", str(tmp_path)], env=newcomer_environment)
    page = ""
    for line in child.out:
        page += line
        if "/training_runs/" in line:
            break
    links = re.findall(r"^  (http://\S+)$", page, re.MULTILINE)
    browser = build_opener(HTTPCookieProcessor())
    try:
        assert len(links) == 2, page + child.err.rest()
        with browser.open(links[0]) as front, browser.open(links[1]) as shown:
            assert "/login" not in front.url
            assert shown.url == links[1]
            assert b'id="charts"' in shown.read()
        following = page.partition("Three commands to try next:")[2]
        assert re.findall(r"tinsmith (run|chat|train)", following) == ["run", "chat", "train"]
    finally:
        child.process.send_signal(signal.SIGINT)
    _, errors = child.finish()
    assert child.process.returncode == 0, errors
    assert "stopping the server: done" in errors
    with pytest.raises(URLError):
        browser.open(links[1])
