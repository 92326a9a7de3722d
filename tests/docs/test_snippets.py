"""The blocks of README, tutorial and guides say what they are; `tests/first_hour` runs them."""

from __future__ import annotations

import pytest

from tests.support.pages import PAGES, ROOT, RUN, SHOWN, parts


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    for part in parts((ROOT / page).read_text("utf-8")):
        if part.language or part.code:
            assert part.language in RUN + SHOWN, f"{page}:{part.line}: {part.language!r}"


def test_a_block_that_is_not_run_gives_its_reason() -> None:
    text = "<!-- no-run: needs a GPU -->\n```bash\nnvidia-smi\n```\n\n```python\n1 / 0\n```\n"
    first, second = parts(text)
    assert (first.mark, first.code) == ("no-run: needs a GPU", "nvidia-smi\n")
    assert (second.mark, second.language) == ("", "python")
