"""bandit over the sources, pip-audit over what they depend on: every finding is either gone or
listed here with the reason it may stay."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RULES = {
    "B101": "an assertion states what cannot happen; checks of what users send are exceptions",
    "B311": "jitter, shuffled examples and a toy model; secrets come from the secrets module",
    "B403": "pickle is used where B301 below says so",
    "B404": "subprocess is used where B603 says so",
    "B603": "our own interpreter and pip, with arguments of ours, and never through a shell",
}
"""Rules that say nothing useful about this code."""

FINDINGS = {
    ("B104", "assembly.py"): (1, "refuses that address"),
    ("B104", "server/serving.py"): (1, "compares an address with that one; it binds to nothing"),
    ("B105", "assembly.py"): (2, "names of settings: seconds of a pass, seconds of a token"),
    ("B105", "engine/local/model/family_settings.py"): (1, "a token's number"),
    ("B105", "engine/local/model/latent/settings.py"): (1, "a token's number"),
    ("B105", "engine/local/model/sources.py"): (4, "special tokens of a tokenizer"),
    ("B105", "server/edge/auth.py"): (1, "how every JSON web token begins"),
    ("B105", "transport/tokens.py"): (1, "no token yet"),
    ("B301", "engine/local/boundary/frames.py"): (2, "between the server and engines of its own"),
    ("B310", "cli/commands/auth.py"): (1, "the user's own server, from the user's settings"),
    ("B310", "cli/server/background.py"): (1, "the server that the command has just started"),
    ("B310", "cli/commands/doctor.py"): (1, "the user's own server, from the user's settings"),
    ("B310", "cli/server/metrics.py"): (1, "the user's own server, from the user's settings"),
    ("B310", "cli/training/rewards.py"): (1, "the address that the user gave for rewards"),
    ("B608", "server/store/migrations/versions/0005_what_a_console_shows.py"): (
        1,
        "names of our own columns",
    ),
    ("B608", "server/store/migrations/versions/0006_bounded_losses.py"): (
        1,
        "names of our own columns",
    ),
    ("B608", "server/store/migrations/versions/0008_steps_in_the_log.py"): (
        1,
        "names of our own columns",
    ),
    ("B615", "cli/training/records.py"): (1, "the data set that the user names"),
    ("B615", "client/tokenizers.py"): (2, "the model a user names; remote code only if pinned"),
    ("B615", "engine/local/model/foreign/building.py"): (
        1,
        "a folder on this machine, without remote code",
    ),
    ("B615", "engine/local/model/sources.py"): (2, "a file on this machine"),
    ("B615", "engine/local/model/verifying/verification.py"): (
        1,
        "a folder that we have just written",
    ),
}
"""How many findings of a rule a file may have, and why."""


@pytest.mark.slow
def test_bandit_finds_nothing_that_is_not_accounted_for() -> None:
    options = ["-q", "-r", "src/tinsmith", "-f", "json", "--skip", ",".join(RULES)]
    done = subprocess.run(
        [sys.executable, "-m", "bandit", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    assert not report["errors"]
    found = Counter(
        (issue["test_id"], str(Path(issue["filename"]).relative_to("src/tinsmith")))
        for issue in report["results"]
    )
    allowed = {place: count for place, (count, _) in FINDINGS.items()}
    assert dict(found) == allowed, "fix what is new, or take what is gone off the list"


ADVISORIES: dict[str, str] = {}
"""Advisories that do not concern us, and why."""


@pytest.mark.slow
def test_no_dependency_has_a_known_hole() -> None:
    options = ["--no-deps", "--disable-pip", "-r", "constraints.txt", "--timeout", "10"]
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", *options, "--format", "json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        pytest.skip(f"no advisory service can be reached: {done.stderr.strip()[-200:]}")
    dependencies = json.loads(done.stdout)["dependencies"]
    looked_up = [each for each in dependencies if "skip_reason" not in each]
    if not looked_up:
        pytest.skip(f"the advisory service knows none of our {len(dependencies)} dependencies")
    found = {
        hole["id"]: f"{each['name']} {each['version']}"
        for each in looked_up
        for hole in each["vulns"]
    }
    new = {name: place for name, place in found.items() if name not in ADVISORIES}
    assert not new, "take a later version, or list the advisory with the reason it may stay"
