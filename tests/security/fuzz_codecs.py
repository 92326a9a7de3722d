"""Coverage-guided fuzzing of what reads bytes from strangers.

    python fuzz_codecs.py TARGET [-runs=N | -max_total_time=SECONDS] [CORPUS_FOLDER]

A target takes any bytes; it may return or raise a `TinkerError`, and nothing else. What is found
this way becomes a test beside the module it was found in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from json import dumps
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["tinsmith"]):
    from tinsmith import types
    from tinsmith.client.downloads.download import confined
    from tinsmith.errors import TinkerError, ValidationError
    from tinsmith.server.checkpoints import checkpoint_name
    from tinsmith.types.model import Request
    from tinsmith.wire import dialects, json, proto, zstd
    from tinsmith.wire.operation_ids import ids_in

PROTO = "application/x-protobuf"
JSON = "application/json"
MESSAGES = sorted(
    (kind for kind in vars(types).values() if isinstance(kind, type) and issubclass(kind, Request)),
    key=lambda kind: kind.__name__,
)

NAMES = sorted(
    {name for kind in MESSAGES for name in kind.model_fields}
    | {"chunks", "tokens", "type", "data", "dtype", "shape", "loss_fn", "loss_fn_inputs"}
    | {"encoded_text", "image", "int64", "float32", "adamw", "cross_entropy", "model_input"}
)


def built(source: atheris.FuzzedDataProvider, names: Sequence[str], depth: int = 0) -> Any:
    """A JSON value whose objects have fields of the given names, so that decoding gets far."""
    kind = source.ConsumeIntInRange(0, 11)
    if kind <= 3 and depth < 6:
        size = source.ConsumeIntInRange(0, 6)
        return {source.PickValueInList(names): built(source, names, depth + 1) for _ in range(size)}
    if kind <= 5 and depth < 6:
        size = source.ConsumeIntInRange(0, 4)
        return [built(source, names, depth + 1) for _ in range(size)]
    if kind == 6:
        return source.ConsumeInt(9)
    if kind == 7:
        return source.ConsumeIntInRange(-2, 5)
    if kind == 8:
        return source.ConsumeFloat()
    if kind == 9:
        return source.PickValueInList([None, True, False])
    if kind == 10:
        return source.PickValueInList(names)
    return source.ConsumeUnicodeNoSurrogates(12)


def fields(source: atheris.FuzzedDataProvider, names: Sequence[str], known: Any) -> bytes:
    """An object with the fields of a message."""
    value = {name: built(source, names) for name in known if source.ConsumeBool()}
    return dumps(value).encode()


def json_messages(data: bytes) -> None:
    source = atheris.FuzzedDataProvider(data)
    kind = source.PickValueInList(MESSAGES)
    body = fields(source, NAMES, kind.model_fields)
    json.encode(dialects.decode(kind, body))


def json_passes(data: bytes) -> None:
    source = atheris.FuzzedDataProvider(data)
    names = ["model_id", "seq_id", "forward_backward_input"]
    body = fields(source, NAMES, names)
    ids_in(body, JSON)
    dialects.decode_pass(body, JSON)


def raw_json(data: bytes) -> None:
    ids_in(data, JSON)


def passes(data: bytes) -> None:
    decoded = dialects.decode_pass(data, PROTO)
    if len(data) < 4096:
        proto.encode_pass(decoded)


def pass_ids(data: bytes) -> None:
    ids_in(data, PROTO)


def outputs(data: bytes) -> None:
    json.encode(proto.decode_output(data))


def samples(data: bytes) -> None:
    json.encode(proto.decode_sample(data))


def compressed(data: bytes) -> None:
    """A frame with one byte changed, or whatever it is."""
    source = atheris.FuzzedDataProvider(data)
    place, value = source.ConsumeIntInRange(0, 30), source.ConsumeIntInRange(0, 255)
    rest = source.ConsumeBytes(len(data))
    frame = bytearray(zstd.compress(rest))
    frame[place % len(frame)] = value
    for body in (bytes(frame), rest):
        try:
            zstd.decompress(body, max_bytes=1 << 20)
        except TinkerError:
            continue


def paths(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    folder = Path("/nowhere/downloads")
    for read in (
        lambda: types.ParsedCheckpointTinkerPath.from_tinker_path(text),
        lambda: checkpoint_name(text, 1),
        lambda: confined(folder, text).resolve().relative_to(folder),
    ):
        try:
            read()
        except ValidationError:
            continue


def custom_losses(data: bytes) -> None:
    from tinsmith.engine.base import CustomLoss
    from tinsmith.engine.local.train import custom_graph

    source = atheris.FuzzedDataProvider(data)
    targets = [*custom_graph.FUNCTIONS, *custom_graph.METHODS, "os.system", "__class__", "eval"]
    words = ["ref", "tuple", "slice", "dict", "dtype", "device", "float", "a0", "a1", "logprobs"]
    words += sorted(custom_graph.KEYWORDS)
    nodes = [{"op": "placeholder", "name": "logprobs", "target": "logprobs"}]
    for number in range(source.ConsumeIntInRange(0, 4)):
        node = {
            "op": source.PickValueInList(["call_function", "call_method", "get_attr", "output"]),
            "name": f"a{number}",
            "target": source.PickValueInList(targets),
            "args": [built(source, words) for _ in range(source.ConsumeIntInRange(0, 3))],
            "kwargs": {source.PickValueInList(words): built(source, words)},
        }
        nodes.append(node)
    last = source.PickValueInList(["logprobs", "a0", "a1"])
    output = {"tuple": [{"ref": last}, {"dict": {}}]}
    nodes.append({"op": "output", "name": "output", "target": "output", "args": [output]})
    inputs = [{"name": "logprobs", "rank": 1}]
    body = {
        "session_id": "s",
        "custom_loss_seq_id": 0,
        "name": "l",
        "inputs": inputs,
        "graph": {"nodes": nodes},
    }
    message = dialects.decode(types.CreateCustomLossRequest, dumps(body).encode())
    custom_graph.decode_graph(CustomLoss(inputs=tuple(message.inputs), graph=message.graph))


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        json_messages,
        json_passes,
        raw_json,
        passes,
        pass_ids,
        outputs,
        samples,
        compressed,
        paths,
        custom_losses,
    )
}


def main() -> None:
    target = TARGETS[sys.argv.pop(1)]

    def try_one(data: bytes) -> None:
        try:
            target(data)
        except TinkerError:
            return

    try_one(b"")  # what it imports is not counted as the first input's time
    atheris.Setup(sys.argv, try_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
