"""A large JSON body is parsed in slices, with the result of one parse and without its pause."""

from __future__ import annotations

import json as ascii_json
import random
import sys
import threading
import time
from typing import Any

import orjson
import pytest

from tinsmith.errors import ValidationError
from tinsmith.types import CreateSessionRequest
from tinsmith.wire import json, sliced_json
from tinsmith.wire.operation_ids import ids_in

TEXTS = [
    "",
    "a",
    "x,]y",
    "\\",
    '"q"',
    "[{",
    "é\n",
    "\\\\",
    'a\\"',
    ":",
    "😀\\u\0",
    "  " * 9,
    "aé\n😀" * 9,
]


def value(chance: random.Random, depth: int) -> Any:
    kind = chance.random()
    if depth == 0 or kind < 0.4:
        return chance.choice([1, 2.5, -3, None, True, 10**15, *TEXTS])
    if kind < 0.7:
        return [value(chance, depth - 1) for _ in range(chance.randrange(6))]
    names = (chance.choice(TEXTS) + str(chance.randrange(9)) for _ in range(chance.randrange(6)))
    return {name: value(chance, depth - 1) for name in names}


def damaged(chance: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(chance.randrange(1, 3)):
        place = chance.randrange(len(changed) + 1)
        if chance.random() < 0.5:
            del changed[place : place + 1]
        else:
            changed.insert(place, chance.choice(b'[]{},:"\\1 '))
    return bytes(changed)


def outcome(parse: Any, text: bytes) -> str:
    try:
        return repr(parse(text))
    except ValueError:
        return "not JSON"


def sliced(text: bytes, slice_bytes: int) -> Any:
    return sliced_json.loads(text, slice_bytes, whole_bytes=0)


def test_slices_of_any_size_give_what_one_parse_gives() -> None:
    chance = random.Random(1)
    num_bad = 0
    for number in range(1000):
        option = chance.choice([0, orjson.OPT_INDENT_2])
        text = orjson.dumps(value(chance, 5), option=option)
        if number % 3 == 0:  # as other programs write it
            text = ascii_json.dumps(orjson.loads(text)).encode()
        if number % 2:
            text = damaged(chance, text)
        expected = outcome(orjson.loads, text)
        num_bad += expected == "not JSON"
        for slice_bytes in (1, 3, 8, 20):
            found = outcome(lambda t, size=slice_bytes: sliced(t, size), text)
            assert found == expected, (text, slice_bytes)
    assert num_bad > 100


def test_a_long_text_is_cut_between_characters() -> None:
    chance = random.Random(2)
    parts = ["a", "é", "€", "😀", '\\"', "\\\\", "\\n", "\\u00e9", "\\ud83d\\ude00", " "]
    broken = ["\\ud83d", "\\ude00", "\\u12", "\\x", "\n", '"']
    for number in range(2000):
        some = chance.choices(parts, k=chance.randrange(60))
        if number % 2:
            some.insert(chance.randrange(len(some) + 1), chance.choice(broken))
        text = f'["{"".join(some)}"]'.encode()
        expected = outcome(orjson.loads, text)
        for slice_bytes in (1, 7, 13, 20):
            assert outcome(lambda t, n=slice_bytes: sliced(t, n), text) == expected, text


def test_what_is_freed_is_what_nobody_has() -> None:
    kept: list[Any] = [[1, {"a": 2}], {"b": [3]}]
    numbers = list(range(10_000))
    parsed = {"a": kept, "b": [kept[0], list(range(1000, 20_000)), [[4]] * 5000], "c": numbers}
    sliced_json.free(parsed, is_unused=False)
    assert parsed == {} and kept == [[1, {"a": 2}], {"b": [3]}] and len(numbers) == 10_000
    sliced_json.free({"a": kept}, is_unused=True)
    assert kept == []


def test_a_message_from_a_large_body_is_whole() -> None:
    """What it keeps of the parsed body is not freed with the rest."""
    metadata = {"a": list(range(2000)), "b": {"c": ["d"] * 300}}
    body = orjson.dumps({"tags": ["t"], "user_metadata": metadata, "sdk_version": "x" * 70_000})
    message = json.decode(CreateSessionRequest, body)
    assert message.user_metadata == metadata


def test_the_small_fields_are_found_between_large_ones_that_nobody_has_read() -> None:
    large = b"[" + b"1," * 60_000 + b"nonsense" + b"]"
    body = b'{"a": %b, "model_id": "m", "b": {"seq_id": 9, "c": %b}, "seq_id": 3}' % (large, large)
    assert ids_in(body, "application/json") == ("m", 3)
    assert sliced_json.small_fields(body) == {"a": None, "model_id": "m", "b": None, "seq_id": 3}
    with pytest.raises(ValidationError, match="not valid JSON"):
        json.parse(body)


def test_large_lists_that_lie_too_deep_in_each_other_are_refused() -> None:
    body = b'{"x":' + b"[" * 70 + b"1," * 50_000 + b"1" + b"]" * 70 + b"}"
    with pytest.raises(ValidationError, match="more than 64 levels deep"):
        json.parse(body)


def test_other_threads_run_while_a_large_body_is_parsed() -> None:
    """Counted in looks of another thread, not in seconds: whatever else the machine does, one that
    has to wait for the whole parse gets none in between."""
    body = orjson.dumps({"tokens": [list(range(1000))] * 1300})
    looks = 0
    is_parsing = threading.Event()

    def parse() -> None:
        is_parsing.set()
        json.parse(body)
        is_parsing.clear()

    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    try:
        thread = threading.Thread(target=parse)
        thread.start()
        is_parsing.wait(10)
        while is_parsing.is_set():
            looks += 1
            time.sleep(0)
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert looks > 20
