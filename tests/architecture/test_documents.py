"""Documents that must keep up with the code: dependencies, requirements, the source tree."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!\[;~ ]", line)[0].lower() for line in requirements} - {"tinsmith"}


def test_every_dependency_is_documented_with_its_reason() -> None:
    """S27"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = names_of(project["project"]["dependencies"])
    for extra in project["project"]["optional-dependencies"].values():
        declared |= names_of(extra)
    for group in project["dependency-groups"].values():
        declared |= names_of([line for line in group if isinstance(line, str)])
    documented = set(
        re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/dependencies.md").read_text(), re.MULTILINE)
    )
    assert declared == documented


def test_the_source_tree_in_the_readme_names_every_package() -> None:
    readme = (ROOT / "README.md").read_text()
    source = ROOT / "src" / "tinsmith"
    for path in source.iterdir():
        if path.is_dir() and any(path.rglob("*.py")):
            assert f"{path.name}/" in readme, f"README's source tree lacks {path.name}/"


def test_no_stale_words_in_code_and_docs() -> None:
    """S17, S19, S28: values that the protocol never had, or no longer has."""
    stale = ("stop_sequence", "epsilon=1e-8", "function path", "max_length_reached")
    for folder in ("src", "docs", "README.md"):
        path = ROOT / folder
        for file in [path] if path.is_file() else path.rglob("*"):
            # Anthropic's API is another protocol, with words of its own.
            if file.suffix in (".py", ".md") and file.name != "anthropic.py":
                text = file.read_text()
                found = [word for word in stale if word in text]
                assert not found, f"{file.relative_to(ROOT)} says {found}"


def test_the_package_is_typed_and_the_gate_checks_it() -> None:
    """S29: annotations ship with the package, and `make test` runs the type checker."""
    assert (ROOT / "src" / "tinsmith" / "py.typed").exists()
    rule = next(
        line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("test:")
    )
    assert "types" in rule.split()


def test_no_document_promises_file_upload() -> None:
    """S25, S26: images travel as base64 inside JSON; there is no multipart endpoint."""
    for file in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = file.read_text().lower()
        assert "multipart" not in text or "no multipart" in text, file
