"""What a user can get wrong in our own commands is one error, and never a traceback.

The official commands' mistakes are in test_parity_with_official.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Paths, Run

FAKE = "tinsmith/fake"


@dataclass(frozen=True)
class Things:
    """What a line may name; `folder` has a text, a file of arbitrary bytes and two settings."""

    folder: Path
    tokenizer: Path
    paths: Paths

    def __getattr__(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def tok(self) -> tuple[str, str]:
        return "--tokenizer", str(self.tokenizer)


Line = Callable[[Things], tuple[str, ...]]

MISTAKES: list[tuple[Line, str]] = [
    (lambda t: ("sample", "nomodel", "x"), "nomodel"),
    (lambda t: ("sample", FAKE), "Give a prompt"),
    (lambda t: ("sample", FAKE, "", *t.tok), "empty"),
    (lambda t: ("sample", FAKE, "x", "--tokenizer", "/nonexistent"), "--tokenizer"),
    (lambda t: ("sample", FAKE, "--file", "/nonexistent", *t.tok), "/nonexistent"),
    (lambda t: ("sample", FAKE, "--file", t.bytes, *t.tok), "UTF-8"),
    (lambda t: ("sample", FAKE, "x", "--temperature", "-3", *t.tok), "temperature"),
    (lambda t: ("sample", FAKE, "x", "--top-p", "7", *t.tok), "top_p"),
    (lambda t: ("sample", FAKE, "x", "-n", "0", *t.tok), "-n"),
    (lambda t: ("sample", FAKE, "x", "-n", "1000000", *t.tok), "num_samples"),
    (lambda t: ("sample", FAKE, "x", "--system", "y", *t.tok), "--chat"),
    (lambda t: ("sample", "tinker://nobody/b", "x", *t.tok), "tinker://nobody/b"),
    (lambda t: ("sample", f"tinker://{t.paths.run_id}/sampler_weights/no", "x", *t.tok), "no"),
    (lambda t: ("chat", "nomodel"), "nomodel"),
    (lambda t: ("chat", FAKE, "--tokenizer", "/nonexistent"), "--tokenizer"),
    (lambda t: ("chat", FAKE, "--temperature", "-1", *t.tok), "temperature"),
    (lambda t: ("train", "sft", "/nonexistent"), "/nonexistent"),
    (lambda t: ("train", "sft", t.bytes, *t.tok), "UTF-8"),
    (lambda t: ("train", "sft", t.text, *t.tok), "line 1"),
    (lambda t: ("train", "sft", t.data, "--model", "nomodel", *t.tok), "nomodel"),
    (lambda t: ("train", "sft", t.data, "-o", t.text, *t.tok), "is a file"),
    (lambda t: ("train", "sft", t.data, "--epochs", "-1", *t.tok), "--epochs"),
    (lambda t: ("train", "sft", t.data, "--learning-rate", "0", *t.tok), "--learning-rate"),
    (lambda t: ("export", "x", "-o", t.out), "Invalid checkpoint path"),
    (lambda t: ("export", t.paths.state, "-o", f"{t.text}/x"), "text"),
    (lambda t: ("export", t.paths.state, "-o", t.out, "--format", "zip"), "--format"),
    (
        lambda t: (
            *("export", t.paths.state, "-o", t.out, "--format", "merged"),
            *("--base", str(t.folder)),
        ),
        "config.json",
    ),
    (lambda t: ("serve", "--config", t.broken_toml), "broken_toml"),
    (lambda t: ("serve", "--config", t.unknown_toml), "'nothing'"),
    (lambda t: ("serve", "--config", "/nonexistent"), "/nonexistent"),
    (lambda t: ("serve", "--engine", "none"), "known: fake, local"),
    (lambda t: ("serve", "--device", "toaster"), "'toaster'"),
    (lambda t: ("serve", "--set", "x"), "NAME=VALUE"),
    (lambda t: ("serve", "--set", "prot=1"), "did you mean 'port'"),
    (lambda t: ("serve", "--log-level", "loud"), "'loud'"),
    (lambda t: ("serve", "--engine", "fake", "--data-dir", t.text), "text"),
    (
        lambda t: ("serve", "--engine", "fake", "--data-dir", t.out, "--port", "99999"),
        "cannot listen",
    ),
    (
        lambda t: ("serve", "--engine", "fake", "--data-dir", t.out, "--database-url", "x"),
        "database cannot be used",
    ),
    (lambda t: ("key", "list", "--data-dir", t.text), "text"),
    (lambda t: ("key", "list", "--database-url", "x"), "database cannot be used"),
    (lambda t: ("key", "revoke", "x"), "KEY_ID"),
    (lambda t: ("top", "--interval", "0"), "--interval"),
    (lambda t: ("demo", "--data-dir", t.text), "is a file"),
    (lambda t: ("checkpoint", "download", t.paths.external, "-o", t.text), "text"),
    (
        lambda t: ("session", "export-trace", t.paths.session_id, "-o", f"{t.text}/x"),
        "text",
    ),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_mistake_is_one_error(
    number: int, run: Run, paths: Paths, byte_tokenizer: Path, tmp_path: Path
) -> None:
    """S106"""
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "data").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    (tmp_path / "broken_toml").write_text("x = [")
    (tmp_path / "unknown_toml").write_text("nothing = 1")
    line, complaint = MISTAKES[number]
    result = run(*line(Things(tmp_path, byte_tokenizer, paths)), stdin="hello\n")
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    assert result.stderr.count("Error: ") == 1
    assert complaint in result.stderr.partition("Error: ")[2]
