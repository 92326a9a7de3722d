"""Records of a data file, whatever its format, each with the place that an error names.

JSON lines, a JSON array, CSV, Parquet, plain text (a record for each paragraph); or a data set of
the `datasets` library, by name or folder. What the fields of a record mean is for `forms` to say.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tinsmith.errors import ValidationError

_ENCODING = "utf-8-sig"  # some programs begin a file with a mark
_DATA_SET_SPLIT = "train"
_LONGEST_CELL = 2**31 - 1
"""The library's own limit, 128 KiB, is less than a long text has."""


@dataclass(frozen=True, slots=True)
class Record:
    place: str
    """`talks.jsonl, line 3`"""
    fields: dict[str, Any]


def read(source: str) -> Iterator[Record]:
    """The records of a file, or of a data set: `owner/name`, `folder`, `owner/name:split`."""
    path = Path(source)
    if not path.is_file():
        is_no_name = path.suffix or "/" not in source or source.startswith((".", "/"))
        if is_no_name and not Path(source.partition(":")[0]).is_dir():
            raise ValidationError(f"no such file: {source}", "data")
        yield from _data_set(source)
        return
    read_file = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".txt": _text}.get(
        path.suffix.lower(), _json
    )
    try:
        for place, value in read_file(path):
            if not isinstance(value, dict):
                raise ValidationError(f"expected an object, got {type(value).__name__}", place)
            yield Record(place, value)
    except UnicodeDecodeError as error:
        raise ValidationError(f"is not UTF-8 text ({error.reason})", str(path)) from error


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding=_ENCODING) as file:
        if _first_character(file) == "[":
            for number, item in enumerate(_parsed(file.read(), str(path)), 1):
                yield f"{path}, item {number}", item
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, _parsed(line, place)


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValidationError(f"this is not JSON: {error}", place) from None


def _first_character(file: TextIO) -> str:
    """The first character that is not white space; the file is read from its start again."""
    while (character := file.read(1)) and character.isspace():
        pass
    file.seek(0)
    return character


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(encoding=_ENCODING, newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise ValidationError(
                    f"expected {len(reader.fieldnames or ())} cells, as the first line has; "
                    "a cell with a comma needs quotes",
                    place,
                )
            yield place, row


def _text(path: Path) -> Iterator[tuple[str, Any]]:
    """Paragraphs, with an empty line between them."""
    lines: list[str] = []
    first = 1
    with path.open(encoding=_ENCODING) as file:
        for number, line in enumerate([*file, ""], 1):
            if line.strip():
                first = first if lines else number
                lines.append(line)
            elif lines:
                yield f"{path}, line {first}", {"text": "".join(lines).strip()}
                lines = []


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise ValidationError(
            "a Parquet file needs the package pyarrow: pip install pyarrow", str(path)
        ) from error
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", row


def _data_set(source: str) -> Iterator[Record]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValidationError(
            f"there is no file {source!r}; a folder, or the name of a data set, needs the package "
            "datasets: pip install datasets",
            "data",
        ) from error
    name, _, split = source.partition(":")
    try:
        if (saved := _saved_folder(Path(name), split)) is not None:
            rows = datasets.load_from_disk(str(saved))
        else:
            rows = datasets.load_dataset(name, split=split or _DATA_SET_SPLIT)
    except Exception as error:  # of many classes, some of the hub's own libraries
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValidationError(
            f"the data set {source!r} cannot be read: {reason}", "data"
        ) from error
    for number, row in enumerate(rows, 1):
        yield Record(f"{name}, {split or _DATA_SET_SPLIT}, row {number}", dict(row))


def _saved_folder(folder: Path, split: str) -> Path | None:
    """Where `save_to_disk` of the library has put a data set, or one of several splits."""
    if (folder / "dataset_dict.json").exists():
        return folder / (split or _DATA_SET_SPLIT)
    return folder / split if (folder / "state.json").exists() else None
