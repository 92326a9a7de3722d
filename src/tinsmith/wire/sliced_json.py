"""Large JSON, parsed a slice at a time.

A parser holds the interpreter's lock from the first byte to the last, so that a body of 24 MiB
would keep every other thread waiting for a tenth of a second. Here numpy, which lets others run
meanwhile, finds the brackets and commas outside strings; then the items of each large object or
list are parsed in runs of some 64 KiB. The result is that of one parse of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

SLICE_BYTES = 64 * 1024
"""What is parsed at a stretch: at most two milliseconds, of tokens of one digit."""

MAX_LARGE_DEPTH = 64
"""How deep objects and lists larger than a slice may lie in each other."""

_MAX_DEPTH = 1024
"""What the parser itself takes."""

_WINDOW_BYTES = 256 * 1024
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_OPENING = {ord("["): ord("]"), ord("{"): ord("}")}
_IS_MARK = np.zeros(256, np.bool_)
_IS_MARK[list(b"[]{},")] = True
_DEPTH_CHANGE = np.zeros(256, np.int8)
_DEPTH_CHANGE[list(b"[{")] = 1
_DEPTH_CHANGE[list(b"]}")] = -1


def loads(body: bytes, slice_bytes: int = SLICE_BYTES) -> Any:
    """The value of a JSON text; `ValueError` where it is not one."""
    if len(body) <= slice_bytes:
        return orjson.loads(body)
    return _Text(body, slice_bytes).value(0, len(body))


def small_fields(body: bytes, slice_bytes: int = SLICE_BYTES) -> Any:
    """Like `loads`, but what is larger than a slice in the outermost object or list is null, and
    may be anything."""
    if len(body) <= slice_bytes:
        return orjson.loads(body)
    return _Text(body, slice_bytes, max_depth=1).value(0, len(body))


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
        return self._parsed(self._body[start:stop], start)

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
        marks, depths = self._marks[first + 1 : last], self._depths[first + 1 : last]
        commas = marks[(depths == level) & (self._bytes[marks] == _COMMA)]
        if not len(commas) and self._is_blank(start, end):
            return {} if opening == ord("{") else []
        return self._items(opening, np.concatenate([[start - 1], commas, [end]]), depth)

    def _items(self, opening: int, cuts: npt.NDArray[np.int64], depth: int) -> Any:
        """What lies between the cuts, small neighbours together."""
        found: Any = {} if opening == ord("{") else []
        done = 0
        while done < len(cuts) - 1:
            start = int(cuts[done]) + 1
            upto = int(np.searchsorted(cuts, start + self._slice_bytes, side="right")) - 1
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
        name = self._parsed(self._body[start:name_stop], start)
        return {name: self.value(colon + 1, stop, depth)}

    def _parsed(self, piece: bytes, start: int) -> Any:
        try:
            return orjson.loads(piece)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{error.msg}, after byte {start}") from None

    def _is_blank(self, start: int, stop: int) -> bool:
        between = self._body[start:stop]
        return not between.strip(b" \t\r\n")

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
        if b"\\" not in self._body:
            return found
        is_end = np.ones(len(found), np.bool_)
        for index in np.flatnonzero(self._bytes[found - 1] == _BACKSLASH):
            since = int(found[index - 1]) + 1 if index else 0
            before = self._body[since : found[index]]
            is_end[index] = (len(before) - len(before.rstrip(b"\\"))) % 2 == 0
        return found[is_end]

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
