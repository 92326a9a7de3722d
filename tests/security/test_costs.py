"""A small request costs little: under a second of processor time, and memory as stated for it."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from tinsmith.errors import ValidationError
from tinsmith.server.chat.openai import Asked, read_chat, read_completion
from tinsmith.server.chat.text import TextModel

if TYPE_CHECKING:
    from tests.support.in_process_server import Api

SCRIPT = Path(__file__).with_name("costly_requests.py")
REQUESTS = runpy.run_path(str(SCRIPT))["REQUESTS"]
MAX_CPU_SECONDS = 1.0
MB = 1_000_000


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_costs_no_more_than_is_stated(name: str) -> None:
    verdict, cpu_seconds, grown = _output(str(SCRIPT), name).split()
    allowed_mb = REQUESTS[name][2]
    assert float(cpu_seconds) < MAX_CPU_SECONDS, f"{verdict} after {cpu_seconds} s"
    assert int(grown) < allowed_mb * MB, f"{verdict}, with {int(grown) / MB:.0f} MB"


def test_names_whose_hashes_collide_cannot_be_prepared() -> None:
    """Texts hash with a secret that each process draws anew."""
    assert _output("-c", "print(hash('model_id'))") != _output("-c", "print(hash('model_id'))")


def _output(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_offsets_of_a_long_completion_do_not_take_long() -> None:
    ask = read_completion({"model": "m", "prompt": "a", "logprobs": 0})
    asked = Asked(ask=ask, answer_id="a", created=0, num_prompt_tokens=1)
    count = 100_000
    began = time.process_time()
    found = asked.logprobs([7] * count, [0.0] * count, cast(TextModel, _TwoLetters()))
    assert time.process_time() - began < MAX_CPU_SECONDS
    assert found is not None and found["text_offset"] == list(range(0, 2 * count, 2))
    nothing = asked.logprobs([], [], cast(TextModel, _TwoLetters()))
    assert nothing is not None and nothing["text_offset"] == []


class _TwoLetters:
    def token_text(self, token: int) -> str:
        return "ab"


@pytest.mark.parametrize("stop", [["x"] * 1000, "x" * 100_000])
def test_stop_texts_beyond_reason_are_refused(stop: object) -> None:
    with pytest.raises(ValidationError, match="stop"):
        read_completion({"model": "m", "prompt": "a", "stop": stop})


def test_prompts_beyond_reason_are_refused() -> None:
    with pytest.raises(ValidationError, match="prompt"):
        read_completion({"model": "m", "prompt": ["a"] * 100_000})


def test_a_message_part_without_a_text_is_refused() -> None:
    message = {"role": "user", "content": [{"type": "text"}]}
    with pytest.raises(ValidationError, match="only text parts"):
        read_chat({"model": "m", "messages": [message]})


@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00+23:00", "9999-12-31T23:00:00-23:00"])
async def test_times_at_the_ends_of_the_calendar_are_refused(api: Api, moment: str) -> None:
    """Found by fuzzing: they were a 500."""
    hours = {"starting_on": moment, "ending_before": "2026-01-01T00:00:00Z"}
    assert (await api.get("/billing/usage/events", **hours)).status_code == 400
    assert (await api.get("/audit", day="9999-12-31")).status_code == 200
