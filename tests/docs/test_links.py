"""No dead links: every page's links lead to a file and a heading, or to a host we know."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
)
HOSTS = {"pytorch.org", "github.com", "modal.com", "modelscope.github.io", "age-encryption.org"}
"""Hosts that pages may link to; nothing is fetched to check them."""

_CODE = re.compile(r"^[ ]*```.*?^[ ]*```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    """Where its links lead, those by number too; a number without an address leads to itself."""
    text = _COMMENT.sub("", _CODE.sub("", page.read_text("utf-8")))
    text = re.sub(r"`[^`\n]*`", "", text)
    addresses = dict(re.findall(r"^\[(\d+)\]: (\S+)$", text, flags=re.MULTILINE))
    numbers = set(re.findall(r"\[(\d+)\](?![:(])", text))
    return [*_LINK.findall(text), *(addresses.get(number, f"#{number}") for number in numbers)]


def anchors(page: Path) -> set[str]:
    """The ids that headings get."""
    text = _CODE.sub("", page.read_text("utf-8"))
    return {slug(title) for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}


def slug(title: str) -> str:
    """
    >>> slug("`kill -9`: what is lost?")
    'kill-9-what-is-lost'
    """
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """S116"""
    path = ROOT / page
    for link in links(path):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https", f"{page}: {link}"
            assert parts.hostname in HOSTS, f"{page}: {link} is on a host that is not listed"
            continue
        target = (path.parent / parts.path).resolve() if parts.path else path
        assert target.is_relative_to(ROOT), f"{page}: {link} leads out of the repository"
        assert target.exists(), f"{page}: {link}"
        if parts.fragment:
            assert target.suffix == ".md", f"{page}: {link}"
            assert parts.fragment in anchors(target), f"{page}: no heading for {link}"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_are_there(page: str) -> None:
    """A path in code style, such as `tests/wire/test_proto.py`, is a promise too."""
    text = _CODE.sub("", (ROOT / page).read_text("utf-8"))
    named = re.findall(r"`((?:tests|tools|src|docs|examples|benchmarks)/[\w/.-]+)`", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, f"{page} names {missing}"


def test_a_page_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](b.md#c) `[not](this.md)`\n```\n[nor](that.md)\n```\n")
    assert links(page) == ["b.md#c"]
    assert anchors(page) == {"a-title"}
    page.write_text("[1] and [2]\n\n[1]: https://example.org\n")
    assert sorted(links(page)) == ["#2", "https://example.org"]
