"""What a notebook shows of values: HTML that is small, true and safe."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html.parser import HTMLParser

import numpy as np

from tinsmith.types import Datum, ModelInput, SampledSequence, SampleResponse, TrainingRun
from tinsmith.types.notebook import MOST_TOKENS


def datum(**inputs: object) -> Datum:
    return Datum(model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)  # type: ignore[arg-type]  # any form


def sequence(tokens: list[int], logprobs: list[float] | None) -> SampledSequence:
    scores = None if logprobs is None else np.array(logprobs, "<f4")
    return SampledSequence("length", "s", np.array(tokens, "<i4"), scores)


def spans(html: str | None) -> list[tuple[str, str, str]]:
    assert html is not None
    return re.findall("<span style='(.*?)' title='(.*?)'>(\\d+)</span>", html)


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.add(tag)


def test_a_datum_shows_which_tokens_are_learned() -> None:
    shown = spans(datum(target_tokens=[7, 8, 9], weights=[0.0, 0.5, 1.0])._repr_html_())
    assert [token for _, _, token in shown] == ["7", "8", "9"]
    assert [about for _, about, _ in shown] == ["weight 0", "weight 0.5", "weight 1"]
    styles = [style for style, _, _ in shown]
    assert "rgba" not in styles[0]
    assert styles[1] != styles[2]
    assert "rgba(31,111,235,0.60)" in styles[2]


def test_advantages_below_zero_have_another_colour() -> None:
    learned, pushed = spans(datum(target_tokens=[7, 8], advantages=[2.0, -2.0])._repr_html_())
    assert learned[1:] == ("advantage 2", "7")
    assert pushed[1:] == ("advantage -2", "8")
    assert learned[0] != pushed[0]


def test_a_datum_without_one_target_for_each_position_has_its_plain_form() -> None:
    assert datum()._repr_html_() is None
    assert datum(target_tokens=np.ones((2, 2), np.int64))._repr_html_() is None
    assert datum(target_tokens=[1, 2], weights=[1.0])._repr_html_() is None


def test_a_sample_is_coloured_by_log_probability() -> None:
    response = SampleResponse([sequence([5, 6], [0.0, -9.0]), sequence([7], None)])
    sure, unsure, unknown = spans(response._repr_html_())
    assert sure == ("background:rgba(230,126,34,0.00)", "log-probability 0", "5")
    assert unsure == ("background:rgba(230,126,34,0.80)", "log-probability -9", "6")
    assert unknown == ("", "", "7")
    assert spans(sequence([5], [float("-inf")])._repr_html_())[0][0].endswith("0.80)")


def test_what_is_long_is_counted_and_not_shown() -> None:
    long = sequence([1] * (MOST_TOKENS + 20), [0.0] * (MOST_TOKENS + 20))
    assert "… and 20 more" in long._repr_html_()
    many = SampleResponse([long] * 100)._repr_html_()
    assert "… and 92 more sequences" in many
    assert len(many) < 500_000


def test_a_runs_texts_are_escaped() -> None:
    hostile = "<img src=x onerror=alert(1)>"
    run = TrainingRun(
        training_run_id=hostile,
        base_model=hostile,
        model_owner="me",
        is_lora=True,
        lora_rank=8,
        last_request_time=datetime(2026, 1, 2, tzinfo=UTC),
        user_metadata={hostile: hostile},
    )
    html = run._repr_html_()
    assert Tags(html).names == {"table", "caption", "tr", "th", "td"}
    assert html.count("&lt;img") == 4
    assert "2026-01-02 00:00:00 UTC" in html
    assert "None" not in html
