"""What the release workflow asks before it builds, and that it runs what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from check_release import NotReadyError, notes

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
PROJECT = '[project]\nname = "tinsmith"\nversion = "0.2.0"\n'
CHANGELOG = (
    "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-12-01)\n\n- New.\n\n## 0.1.0\n\n- Old.\n"
)


def test_the_notes_of_a_release_are_its_part_of_the_changelog() -> None:
    assert notes("0.2.0", PROJECT, CHANGELOG) == "- New."


@pytest.mark.parametrize(
    ("version", "changelog", "cure"),
    [
        ("0.3.0", CHANGELOG, "pyproject.toml says 0.2.0, the tag 0.3.0"),
        ("0.2.0", CHANGELOG.replace("ed\n\n", "ed\n\n- Forgotten.\n\n"), "move what is under"),
        ("0.2.0", CHANGELOG.replace("0.2.0", "0.1.9"), "nothing under '## 0.2.0'"),
        ("0.2.0", CHANGELOG.replace("- New.\n", ""), "nothing under '## 0.2.0'"),
    ],
)
def test_a_release_that_is_not_ready_is_refused_with_what_to_do(
    version: str, changelog: str, cure: str
) -> None:
    with pytest.raises(NotReadyError, match=re.escape(cure)):
        notes(version, PROJECT, changelog)


def test_the_command_fails_where_the_tag_is_not_the_packages_version() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "check_release.py"), "v99.0.0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "the tag 99.0.0" in done.stderr


def test_the_workflow_publishes_what_it_attests_and_may_do_no_more() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"} and "permissions" not in jobs["build"]
    commands = "\n".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert "tools/check_release.py" in commands and "make test" in commands
    for name in re.findall(r"\b(?:tools/\w+\.py|constraints\.txt)", commands):
        assert (ROOT / name).is_file()
    used = [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"] if "uses" in step]
    attested = used.index("actions/attest-build-provenance")
    assert attested < used.index("pypa/gh-action-pypi-publish")
    assert "id-token" in jobs["publish"]["permissions"] and jobs["publish"]["needs"] == "build"
