"""bandit over the sources: every finding is either gone or listed here with the reason it may stay.

pip-audit needs an advisory service; `make audit` runs it where one can be reached.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

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
    ("B104", "server/serving.py"): (1, "compares an address with that one; it binds to nothing"),
    ("B105", "engine/local/families.py"): (1, "the number of a token"),
    ("B105", "engine/local/sources.py"): (4, "special tokens of a tokenizer"),
    ("B105", "server/auth.py"): (1, "how every JSON web token begins"),
    ("B105", "transport/tokens.py"): (1, "no token yet"),
    ("B301", "engine/local/frames.py"): (1, "between the server and its own child, over a pipe"),
    ("B310", "cli/auth.py"): (1, "the user's own server, from the user's settings"),
    ("B310", "cli/background.py"): (1, "the server that the command has just started"),
    ("B310", "cli/doctor.py"): (1, "the user's own server, from the user's settings"),
    ("B310", "cli/fetching.py"): (1, "checked to be http or https in the line before"),
    ("B310", "cli/server_metrics.py"): (1, "the user's own server, from the user's settings"),
    ("B615", "client/tokenizers.py"): (2, "the model a user names; remote code only if pinned"),
    ("B615", "engine/local/foreign.py"): (2, "a folder on this machine, without remote code"),
    ("B615", "engine/local/sources.py"): (2, "a file on this machine"),
}
"""How many findings of a rule a file may have, and why."""


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
