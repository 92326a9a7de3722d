"""What the pages are made of: small, ours, and nothing inline."""

from __future__ import annotations

import gzip
import re
from importlib.resources import as_file, files
from pathlib import PurePosixPath

import httpx

from tests.console.conftest import Console
from tinsmith.server.console import pages
from tinsmith.server.console.pages.assets import static_files, static_path
from tinsmith.server.console.pages.routing import PAGES, render

MAX_BYTES = 150_000
MAKES_MARKUP = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc"


def modules() -> dict[str, str]:
    """Our own modules by path."""
    return {
        name: gzip.decompress(content).decode()
        for name, content in static_files().items()
        if name.endswith(".js") and not name.startswith("vendor/")
    }


def test_all_static_files_together_are_small_on_disk_and_on_the_wire() -> None:
    with as_file(files(pages) / "static") as folder:
        on_disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert on_disk < MAX_BYTES
    assert sum(map(len, static_files().values())) < MAX_BYTES / 2


def test_pages_have_no_inline_script_style_or_listener_and_load_nothing_from_elsewhere() -> None:
    for template in set(PAGES.values()):
        html = render(template)
        assert not re.search(r"<script(?![^>]*\bsrc=)", html), template
        assert not re.search(r"<style|\sstyle=|\son\w+=", html), template
        for place in re.findall(r'(?:src|href|action)="([^"]*)"', html):
            assert place.startswith(("/", "#")) and not place.startswith("//"), (template, place)


def test_every_file_that_a_page_or_a_module_names_is_there() -> None:
    for template in set(PAGES.values()):
        for name in re.findall(rf'"{static_path()}/([^"]+)"', render(template)):
            assert name in static_files(), (template, name)
    for module, text in modules().items():
        for name in re.findall(r'^import .* from "([^"]+)";$', text, re.MULTILINE):
            parts = [*PurePosixPath(module).parent.parts]
            for part in PurePosixPath(name).parts:
                parts = parts[:-1] if part == ".." else [*parts, part]
            assert "/".join(parts) in static_files(), (module, name)


def test_modules_make_no_markup_of_text() -> None:
    """Names and samples are hostile: what makes elements or programs of a text is not used."""
    for module, text in modules().items():
        assert re.search(MAKES_MARKUP, text) is None, module


def test_only_files_of_this_version_are_served_and_nothing_beside_them(console: Console) -> None:
    for path, status in {
        f"{static_path()}/console.css": 200,
        f"{static_path()}/vendor/uplot.js": 200,
        "/console/static/000000000000/console.css": 404,
        f"{static_path()}/vendor/uplot.LICENSE": 404,
        f"{static_path()}/%2e%2e/assets.py": 404,
    }.items():
        answer = httpx.get(console.url + path)
        assert answer.status_code == status, path
    for encoding in ("gzip", "identity"):
        sheet = f"{console.url}{static_path()}/console.css"
        assert ":root" in httpx.get(sheet, headers={"accept-encoding": encoding}).text
