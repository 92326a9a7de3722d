"""A hook of mkdocs: links from the documentation to files beside it work in the site too.

In the repository a page links to a test as `../tests/…`. The site has only what lies in `docs/`, so
each such file is put into it as plain text, and the link is turned there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page in files.documentation_pages():
        assert page.abs_src_path is not None
        path = Path(page.abs_src_path)
        for _, target, _ in LINK.findall(path.read_text("utf-8")):
            source = _outside((path.parent / target).resolve(), config)
            if source is not None and files.get_file_from_path(_place(source)) is None:
                files.append(File.generated(config, _place(source), abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    assert page.file.abs_src_path is not None
    folder = Path(page.file.abs_src_path).parent

    def turned(link: re.Match[str]) -> str:
        source = _outside((folder / link[2]).resolve(), config)
        if source is None:
            return link[0]
        place = os.path.relpath(_place(source), Path(page.file.src_uri).parent)
        return f"{link[1]}{place})"

    return LINK.sub(turned, markdown)


def _outside(target: Path, config: MkDocsConfig) -> Path | None:
    """The file, if it is one of the repository's that is not a page."""
    is_beside = target.is_relative_to(ROOT) and not target.is_relative_to(config.docs_dir)
    return target if is_beside and target.is_file() else None


def _place(source: Path) -> str:
    return f"source/{source.relative_to(ROOT).as_posix()}.txt"
