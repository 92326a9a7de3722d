"""What must hold of a data folder and its store after any number of faults.

Reads the tables and the files of a server that is not running; the answer is a list of sentences,
empty when all is well.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store import schema

_REPLAYED = ("forward_backward", "optim_step", "load_weights")


Tables = dict[str, list[Any]]


def read(url: str) -> Tables:
    """All rows of all tables."""
    with _connected(url) as connection:
        return {
            table.name: list(connection.execute(sa.select(table)).mappings())
            for table in schema.metadata.sorted_tables
        }


def num_done(url: str) -> int:
    """How many operations have been carried out; the server may run."""
    table = schema.operations
    query = sa.select(sa.func.count()).where(table.c.status == "done")
    with _connected(url) as connection:
        return int(connection.execute(query).scalar_one())


@contextmanager
def _connected(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def violations(
    tables: Tables,
    data: Path,
    bucket: Path | None,
    finished: Collection[str],
    damaged: Collection[str],
) -> list[str]:
    """`bucket` is where the objects lie as files, if weights, requests and results are in object
    storage; they have the same names there. `finished` are the models of clients that reached their
    end; other logs may end anywhere. `damaged` are weights that were changed on purpose."""
    dropped = {row["model_id"] for row in tables["models"]} - set(finished)
    return [
        *_operations(tables, dropped),
        *_logs(tables, dropped),
        *_weights(tables, bucket or data, are_strays_allowed=bucket is not None),
        *_contents(tables, bucket or data, damaged),
        *_files(tables, bucket or data, are_strays_allowed=bucket is not None),
        *_drafts(data),
    ]


def final_checksums(tables: Tables, data: Path) -> dict[str, dict[str, str]]:
    """The checksums of the files of each model's last checkpoint, by model; `data` is the data
    folder, or the bucket's."""
    found = {}
    for row in tables["checkpoints"]:
        if row["checkpoint_id"] == "weights/final":
            folder = data / "weights" / row["weights_id"]
            manifest = json.loads((folder / "tinsmith.json").read_text())
            found[row["model_id"]] = {n: f["sha256"] for n, f in manifest["files"].items()}
    return found


def _operations(tables: Tables, dropped: set[str]) -> Iterator[str]:
    """Each row by itself."""
    for row in tables["operations"]:
        name = f"operation {row['seq_id']} of {row['model_id']} ({row['kind']})"
        has_payload = row["payload"] is not None or row["payload_file"] is not None
        has_result = row["result"] is not None or row["result_file"] is not None
        match row["status"]:
            case "pending":
                if not has_payload:
                    yield f"{name} is pending and its request is gone"
                if has_result or row["finished_at"] is not None:
                    yield f"{name} is pending and has an end"
                if row["model_id"] not in dropped:
                    yield f"{name} was never carried out"
            case "done":
                if row["finished_at"] is None or row["error"] is not None:
                    yield f"{name} is done without an end, or with an error"
                if not has_result and row["result_type"] != "dropped":
                    yield f"{name} is done without a result"
            case "failed":
                if row["finished_at"] is None or not row["error"] or has_result:
                    yield f"{name} has failed without a reason, or with a result"
                if row["model_id"] not in dropped and row["category"] != "user":
                    yield f"{name} failed: {row['error']}"
            case other:
                yield f"{name} has the impossible status {other!r}"


def _logs(tables: Tables, dropped: set[str]) -> Iterator[str]:
    """The operations of a model together."""
    logs: dict[str, list[Any]] = defaultdict(list)
    for row in tables["operations"]:
        logs[row["model_id"]].append(row)
    models = {row["model_id"]: row for row in tables["models"]}
    for model_id, model in models.items():
        log = sorted(logs[model_id], key=lambda row: row["seq_id"])
        numbers = [row["seq_id"] for row in log]
        # Numbers that never came, and were closed for good, and those trimmed away, are missing.
        complete = range(max(model["trimmed_seq_id"], model["closed_seq_id"]) + 1, max(numbers) + 1)
        if model_id not in dropped and not set(complete) <= set(numbers):
            yield f"the log of {model_id} has gaps: {numbers}"
        statuses = [row["status"] for row in log]
        if "pending" in statuses and "done" in statuses[statuses.index("pending") :]:
            yield f"{model_id} carried out an operation before an earlier one"
        done = [row["seq_id"] for row in log if row["status"] != "pending"]
        if model["snapshot_seq_id"] > max(done, default=-1):
            yield f"the snapshot of {model_id} is ahead of its log"
        if model["previous_snapshot_seq_id"] > model["snapshot_seq_id"]:
            yield f"the previous snapshot of {model_id} is newer than the newest"
        if model["is_corrupted"]:
            yield f"{model_id} is lost"
        for row in log:
            is_needed = row["seq_id"] > model["previous_snapshot_seq_id"]
            has_payload = row["payload"] is not None or row["payload_file"] is not None
            if is_needed and row["kind"] in _REPLAYED and not has_payload:
                yield f"operation {row['seq_id']} of {model_id} cannot be replayed"


def _weights(tables: Tables, data: Path, *, are_strays_allowed: bool) -> Iterator[str]:
    """Object storage keeps what was deleted, and what nobody knows for an hour."""
    known = {row["weights_id"] for row in tables["weights"]}
    wanted = {row["weights_id"] for row in tables["checkpoints"]}
    wanted |= {row["weights_id"] for row in tables["samplers"]}
    for column in ("snapshot_weights_id", "previous_snapshot_weights_id"):
        wanted |= {row[column] for row in tables["models"]}
    wanted |= {row["weights_id"] for row in tables["operations"]}
    wanted.discard(None)
    folders = {folder.name for folder in (data / "weights").iterdir()}
    for what, names in (
        ("is referred to and has no record", wanted - known),
        ("has a record and no folder", known - folders),
        ("has a folder and no record", set() if are_strays_allowed else folders - known),
        ("is not needed by anything", known - wanted),
    ):
        for name in names:
            yield f"weights {name} {what}"


def _contents(tables: Tables, data: Path, damaged: Collection[str]) -> Iterator[str]:
    """Each file of weights, by its checksum."""
    for row in tables["weights"]:
        if row["weights_id"] in damaged:
            continue
        for name, expected in row["files"].items():
            file = data / "weights" / row["weights_id"] / name
            if not file.is_file():
                yield f"{name} of weights {row['weights_id']} is missing"
            elif hashlib.sha256(file.read_bytes()).hexdigest() != expected["sha256"]:
                yield f"{name} of weights {row['weights_id']} is another than was written"


def _files(tables: Tables, data: Path, *, are_strays_allowed: bool) -> Iterator[str]:
    known = {row[c] for row in tables["operations"] for c in ("payload_file", "result_file")}
    found = {file.name for file in (data / "blobs").rglob("*") if file.is_file()}
    for name in set() if are_strays_allowed else found - known:
        yield f"file {name} belongs to nothing"
    for name in known - found - {None}:
        yield f"file {name} is missing"


def _drafts(data: Path) -> Iterator[str]:
    for path in data.rglob("*"):
        if path.name.endswith((".draft", ".tmp", ".part")):
            yield f"{path.name} is a temporary file"
