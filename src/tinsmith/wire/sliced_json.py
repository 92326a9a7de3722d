"""Large JSON, parsed a slice at a time.

A parser holds the interpreter's lock from the first byte to the last, so that a body of 24 MiB
would keep every other thread waiting for a tenth of a second. Here numpy, which lets others run
meanwhile, finds the brackets and commas outside strings; then the items of each large object or
list are parsed in runs of some 16 KiB, and so are long texts. The result is that of one parse of
the whole. Whatever else looks at a whole body does so a window at a time, and what was parsed is
freed a piece at a time: a million numbers, freed at once, hold the lock as long as their parse.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

WHOLE_BYTES = 64 * 1024
"""A body up to this size is parsed at once: at most two milliseconds, of tokens of one digit."""

SLICE_BYTES = 16 * 1024
"""What is parsed at a stretch of a larger one: at most half a millisecond."""

MAX_LARGE_DEPTH = 64
"""How deep objects and lists larger than a slice may lie in each other."""

_MAX_DEPTH = 1024
"""What the parser itself takes."""

_WINDOW_BYTES = 256 * 1024
_FREED_ITEMS = 4096
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_BLANKS = b" \t\r\n"
_WHOLE_CHARACTERS = re.compile(
    rb"(?:[^\\]+|\\u[dD][89abAB]..\\u....|\\u(?![dD][89abAB])....|\\[^u])*", re.DOTALL
)
"""Text up to an escape that goes on behind it; two that make one character are together."""

_OPENING = {ord("["): ord("]"), ord("{"): ord("}")}
_IS_MARK = np.zeros(256, np.bool_)
_IS_MARK[list(b"[]{},")] = True
_DEPTH_CHANGE = np.zeros(256, np.int8)
_DEPTH_CHANGE[list(b"[{")] = 1
_DEPTH_CHANGE[list(b"]}")] = -1


def loads(body: bytes, slice_bytes: int = SLICE_BYTES, *, whole_bytes: int = WHOLE_BYTES) -> Any:
    """The value of a JSON text; `ValueError` where it is not one."""
    if len(body) <= whole_bytes:
        return orjson.loads(body)
    return _Text(body, slice_bytes).value(0, len(body))


def small_fields(body: bytes) -> Any:
    """Like `loads`, but what is larger than `WHOLE_BYTES` in the outermost object or list is null,
    and may be anything."""
    if len(body) <= WHOLE_BYTES:
        return orjson.loads(body)
    return _Text(body, WHOLE_BYTES, max_depth=1).value(0, len(body))


def count(body: bytes, mark: bytes) -> int:
    """How often a single byte occurs."""
    starts = range(0, len(body), _WINDOW_BYTES)
    return sum(body.count(mark, start, start + _WINDOW_BYTES) for start in starts)


def has(body: bytes, words: bytes) -> bool:
    """Whether `words` occur."""
    starts = range(0, len(body), _WINDOW_BYTES)
    return any(body.find(words, s, s + _WINDOW_BYTES + len(words) - 1) >= 0 for s in starts)


def free(parsed: dict[str, Any], *, is_unused: bool) -> None:
    """Empty a parsed object, a piece at a time; the caller must not use it any more.

    What somebody else has a reference to is left as it is, unless `is_unused`: after an error,
    whose traceback refers to what was looked at.
    """
    alone = 2  # the name here and the argument
    waiting = list(parsed.values())
    parsed.clear()
    while waiting:
        value = waiting.pop()
        if not is_unused and sys.getrefcount(value) > alone:
            continue
        if isinstance(value, dict):
            waiting.extend(value.values())
            value.clear()
        elif isinstance(value, list):
            while value:
                some = value[-_FREED_ITEMS:]
                del value[-_FREED_ITEMS:]
                if not {dict, list}.isdisjoint(map(type, some)):
                    waiting.extend(some)
                del some  # a reference, too


class _Text:
    """A JSON text with the places of its brackets and commas, and how deep each of them lies."""

    def __init__(self, body: bytes, slice_bytes: int, max_depth: int | None = None) -> None:
        """What is large and lies deeper than `max_depth` is read as null."""
        self._body = body
        self._slice_bytes = slice_bytes
        self._max_depth = max_depth
        self._bytes = np.frombuffer(body, np.uint8)
        self._quotes = self._find_quotes()
        if len(self._quotes) % 2:
            raise ValueError("a string has no closing quote")
        self._marks, self._depths = self._find_marks()

    def value(self, start: int, stop: int, depth: int = 0) -> Any:
        """The value between two places, with nothing but white space around it."""
        if stop - start > self._slice_bytes:
            if depth == self._max_depth:
                return None
            first = int(np.searchsorted(self._marks, start))
            place = int(self._marks[first]) if first < len(self._marks) else stop
            if place < stop and self._body[place] in _OPENING and self._is_blank(start, place):
                return self._container(first, stop, depth + 1)
        return self._scalar(start, stop)

    def _container(self, first: int, stop: int, depth: int) -> Any:
        """The object or list that begins at a mark, and after which there is nothing else."""
        if depth > MAX_LARGE_DEPTH:
            raise ValueError(f"it is more than {MAX_LARGE_DEPTH} levels deep")
        level = self._depths[first]
        last = self._closing(first)
        opening, start, end = self._body[self._marks[first]], self._marks[first] + 1, 0
        if last is not None:
            end = int(self._marks[last])
        if (
            last is None
            or self._body[end] != _OPENING[opening]
            or not self._is_blank(end + 1, stop)
        ):
            raise ValueError(f"the bracket at byte {start - 1} is not closed as it should be")
        commas = self._commas(first + 1, last, level)
        if not len(commas) and self._is_blank(start, end):
            return {} if opening == ord("{") else []
        return self._items(opening, np.concatenate([[start - 1], commas, [end]]), depth)

    def _items(self, opening: int, cuts: npt.NDArray[np.int64], depth: int) -> Any:
        """What lies between the cuts, small neighbours together.

        Without numpy's own search, which lets go of the lock for a moment each time: a thread that
        waits for it hears so, comes too late, and begins to wait anew, without ever asking for it.
        """
        found: Any = {} if opening == ord("{") else []
        done = 0
        while done < len(cuts) - 1:
            start = int(cuts[done]) + 1
            upto = bisect_right(cuts, start + self._slice_bytes, lo=done) - 1
            if upto > done:
                piece = self._body[start : cuts[upto]]
                if piece.isspace() or not piece:
                    raise ValueError(f"a value is missing at byte {start}")
                both = b"{%b}" if opening == ord("{") else b"[%b]"
                values = self._parsed(both % piece, start)
            else:
                upto = done + 1
                values = self._large_item(opening, start, int(cuts[upto]), depth)
            found.update(values) if opening == ord("{") else found.extend(values)
            done = upto
        return found

    def _large_item(self, opening: int, start: int, stop: int, depth: int) -> Any:
        if opening == ord("["):
            return [self.value(start, stop, depth)]
        number = int(np.searchsorted(self._quotes, start))
        if number + 1 >= len(self._quotes) or not self._is_blank(start, self._quotes[number]):
            raise ValueError(f"a name is missing at byte {start}")
        name_stop = int(self._quotes[number + 1]) + 1
        colon = self._body.find(b":", name_stop, stop)
        if colon < 0 or not self._is_blank(name_stop, colon):
            raise ValueError(f"there is no colon after the name at byte {start}")
        name = self._scalar(start, name_stop)
        return {name: self.value(colon + 1, stop, depth)}

    def _scalar(self, start: int, stop: int) -> Any:
        """A text, a number or a word, or what is none of them and an error."""
        while start < stop and self._is_blank(start, min(start + self._slice_bytes, stop)):
            start += self._slice_bytes
        while start < stop and self._is_blank(max(stop - self._slice_bytes, start), stop):
            stop -= self._slice_bytes
        number = int(np.searchsorted(self._quotes, start))
        has_text = number < len(self._quotes) and self._quotes[number] < stop
        if stop - start <= self._slice_bytes or not has_text:
            return self._parsed(self._body[start:stop], start)
        first, last = int(self._quotes[number]), int(self._quotes[number + 1])
        if not self._is_blank(start, first) or not self._is_blank(last + 1, stop):
            raise ValueError(f"there is something else beside the text at byte {first}")
        return "".join(self._text_pieces(first + 1, last))

    def _text_pieces(self, start: int, stop: int) -> Iterator[str]:
        """What stands between two quotes."""
        while start < stop:
            end = min(start + self._slice_bytes, stop)
            if end < stop:
                found = _WHOLE_CHARACTERS.match(self._body, start, end)
                end = found.end() if found is not None else start
                while end > start and self._body[end] & 0xC0 == 0x80:  # inside a character
                    end -= 1
                if end == start:  # there is no such character, or slices are tiny
                    end = stop
            yield self._parsed(b'"%b"' % self._body[start:end], start)
            start = end

    def _parsed(self, piece: bytes, start: int) -> Any:
        try:
            return orjson.loads(piece)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{error.msg}, after byte {start}") from None

    def _is_blank(self, start: int, stop: int) -> bool:
        for place in range(start, stop, _WINDOW_BYTES):
            if self._body[place : min(place + _WINDOW_BYTES, stop)].strip(_BLANKS):
                return False
        return True

    def _commas(self, first: int, last: int, level: int) -> npt.NDArray[np.int32]:
        """Where those of one level are, among the marks from `first` to `last`."""
        found = [np.empty(0, np.int32)]
        for start in range(first, last, _WINDOW_BYTES):
            part = slice(start, min(start + _WINDOW_BYTES, last))
            marks = self._marks[part]
            found.append(marks[(self._depths[part] == level) & (self._bytes[marks] == _COMMA)])
        return np.concatenate(found)

    def _closing(self, first: int) -> int | None:
        """The mark that closes the object or list that begins at this one."""
        level = self._depths[first]
        for start in range(first + 1, len(self._marks), _WINDOW_BYTES):
            window = self._depths[start : start + _WINDOW_BYTES]
            closed = window < level
            if closed.any():
                return start + int(closed.argmax())
        return None

    def _find_quotes(self) -> npt.NDArray[np.int32]:
        """Where strings begin and end, alternately."""
        found = np.concatenate(
            [_places(window == _QUOTE, start) for start, window in self._windows()]
        )
        if not has(self._body, b"\\"):
            return found
        is_end = np.ones(len(found), np.bool_)
        for index in self._after_backslashes(found):
            since = int(found[index - 1]) + 1 if index else 0
            before = self._body[since : found[index]]
            is_end[index] = (len(before) - len(before.rstrip(b"\\"))) % 2 == 0
        return found[is_end]

    def _after_backslashes(self, places: npt.NDArray[np.int32]) -> Iterator[int]:
        """The numbers of the places that have a backslash before them."""
        for start in range(0, len(places), _WINDOW_BYTES):
            before = self._bytes[places[start : start + _WINDOW_BYTES] - 1]
            yield from (start + int(i) for i in np.flatnonzero(before == _BACKSLASH))

    def _find_marks(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Where brackets and commas outside texts are, and how many brackets are open after
        each."""
        marks, depths, depth = [], [], 0
        for start, window in self._windows():
            places = _places(_IS_MARK[window], start)
            places = places[np.searchsorted(self._quotes, places) % 2 == 0]
            marks.append(places)
            depths.append(depth + np.cumsum(_DEPTH_CHANGE[self._bytes[places]], dtype=np.int32))
            if len(places):
                depth = int(depths[-1][-1])
                if depths[-1].min() < 0:
                    raise ValueError("more brackets are closed than were opened")
                if depths[-1].max() > _MAX_DEPTH:
                    raise ValueError(f"it is more than {_MAX_DEPTH} levels deep")
        return np.concatenate(marks), np.concatenate(depths)

    def _windows(self) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Each part of the text with its place, so that numpy's steps are short, too."""
        for start in range(0, len(self._bytes), _WINDOW_BYTES):
            yield start, self._bytes[start : start + _WINDOW_BYTES]


def _places(is_one: npt.NDArray[np.bool_], start: int) -> npt.NDArray[np.int32]:
    """Where something is. In 32 bits: there may be as many as there are bytes."""
    return (np.flatnonzero(is_one) + start).astype(np.int32)
