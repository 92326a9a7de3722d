"""Take the README's picture of the console: the page of a real run, in the system's Chromium.

    python tools/record_console.py docs/console.png

`tinsmith demo` trains the run; a server on the same folder then shows it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import expect, sync_playwright

WIDTH, HEIGHT = 1280, 860
_TINSMITH = [sys.executable, "-m", "tinsmith.cli"]


def main(picture: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("needs Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        told = subprocess.run(
            [*_TINSMITH, "demo", "--json", "--data-dir", folder],
            check=True,
            capture_output=True,
            text=True,
        )
        run = json.loads(told.stdout)["checkpoint"].removeprefix("tinker://").partition("/")[0]
        serve = [*_TINSMITH, "serve", "--engine", "local", "--device", "cpu", "--port", "0"]
        server = subprocess.Popen([*serve, "--data-dir", folder], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = (re.search(r"https?://\S+/console/login\?token=\S+", s) for s in server.stdout)
            link = next(match[0] for match in found if match)
            take(chromium, link, run, picture)
        finally:
            server.terminate()
            server.wait()


def take(chromium: str, link: str, run: str, picture: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(link)
        page.goto(f"{link.partition('/console/')[0]}/training_runs/{quote(run)}")
        expect(page.locator("figure.chart canvas").first).to_be_visible()
        expect(page.locator("#live")).to_have_text("Live")
        page.wait_for_timeout(500)
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
