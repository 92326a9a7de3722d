"""Write docs/reference/errors.md: every error, its cause and its cure.

Causes are the docstrings of the classes; what the server says is read from its source. Cures are
the table below, and an error without one stops this tool.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import tinsmith
from tinsmith.errors import APIStatusError, TinkerError

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "reference" / "errors.md"
SOURCE = ROOT / "src" / "tinsmith"
SERVER = SOURCE / "server"

CURES = {
    "TinkerError": "Read the message; it says what happened and to what.",
    "ValidationError": "Correct the value that the message names by its path.",
    "TooLargeError": "Send less at once, or raise the limit that the message names on the server.",
    "EngineError": "Read the message. `tinsmith doctor` looks for causes on the server's machine.",
    "EngineDiedError": (
        "Nothing: the server starts another engine and goes on. If it happens again and again, "
        "look for lack of memory in the server's log."
    ),
    "RequestFailedError": (
        "By `category`: see [below](#when-a-request-was-accepted-and-then-failed)."
    ),
    "APIError": "Catch it to catch everything that a call to a service can fail with.",
    "APIResponseValidationError": (
        "Is `TINKER_BASE_URL` the address of a service, and not of a proxy's page? Otherwise "
        "client and service are of releases that do not go together."
    ),
    "APIConnectionError": (
        "Is the server running, and does `TINKER_BASE_URL` name it? `tinsmith doctor` looks for"
        " the cause. The client has already tried for five minutes."
    ),
    "APITimeoutError": (
        "The same as for `APIConnectionError`; or the server is overloaded: `tinsmith top`."
    ),
    "APIStatusError": "Look at `status_code` and the message.",
    "BadRequestError": "Correct what the message names. It is not tried again.",
    "AuthenticationError": (
        "Set `TINKER_API_KEY` to a key of this server; `tinsmith key create` makes one."
    ),
    "BillingError": (
        "Only hosted services send it. Settle the account; the client waits for a while."
    ),
    "PermissionDeniedError": (
        "Ask for a new URL if it has expired; otherwise delete checkpoints, or have the limit "
        "that the message names raised."
    ),
    "NotFoundError": (
        "Check the id or path with `tinsmith run list` or `tinsmith checkpoint list`. What "
        "belongs to another owner looks as if it were not there."
    ),
    "ConflictError": (
        "Tinsmith never sends it. From other servers: wait, and look at the present state."
    ),
    "UnprocessableEntityError": "Tinsmith never sends it. From other servers: correct the request.",
    "RateLimitError": (
        "Nothing: the client waits and sends the same again. If it reaches you, ask for less at"
        " once, or have the limit raised."
    ),
    "InternalServerError": (
        "Look at the server's log. The client has already tried for five minutes."
    ),
    "UnsupportedModelError": (
        "Choose a model of a family that is listed in the [guide](../how-to/own-model.md)."
    ),
    "ClosedError": "Make a new client; a closed one stays closed.",
    "RetryableException": (
        "The result is no longer kept. A sample is made again by itself; for training, the "
        "operation took effect and only its result is gone."
    ),
    "DataFolderInUseError": "Stop the other server, or give this one another `--data-dir`.",
    "ForeignStoreError": (
        "Check `--data-dir`, `--storage` and `--database-url`, or restore both from one "
        "[backup](../how-to/backup.md). To bind them on purpose: `tinsmith storage adopt`."
    ),
    "StorageUnavailableError": (
        "Nothing, once the storage is back: large requests are answered with 503 until then, and "
        "clients try again. See [object storage](../how-to/object-storage.md)."
    ),
    "DamagedBackupError": "Use another backup; the message names the files that differ.",
    "StoreInUseError": (
        "Stop the other server, or the tool that needs the database to itself, and try again."
    ),
    "LeaseLostError": (
        "Nothing: the server begins anew by itself and [follows the one that took over]"
        "(../how-to/several-servers.md). Clients send again what was not written."
    ),
    "StoreConflictError": (
        "Internal: a request contradicts what is recorded. The request fails with the reason."
    ),
    "StoreValueError": "Leave the character out, or choose a smaller number.",
    "OverQuotaError": "Delete checkpoints, or finish sessions that hold unnamed samplers.",
    "ExpiredOperationError": "Nothing is to be done: the operation took effect when it first came.",
    "SnapshotError": "Internal: the server tries again. Look at its log, and for room on its disk.",
    "StoreUnavailableError": "Is the database running, and is there room on its disk? Try again.",
    "StoreDamagedError": "Restore the data folder from a [backup](../how-to/backup.md).",
    "StoreTooNewError": "Start the release that wrote it, or a later one.",
    "DiskTroubleError": "Make room on the server's disk.",
    "RebuildError": (
        "The model's state is lost from that point on; resume from a checkpoint. Please report "
        "it: it should not happen."
    ),
}

STATUSES = {
    400: ("The request cannot be carried out as it is.", "no", "Correct what `detail` names."),
    401: ("The key is missing, wrong or revoked.", "no", "Set `TINKER_API_KEY`."),
    403: (
        "A download URL has expired, or a limit of this key is reached.",
        "no",
        "Ask for a new URL; delete checkpoints.",
    ),
    404: ("There is no such thing, or it is somebody else's.", "no", "Check the id."),
    408: ("The result is not there yet.", "at once", "Nothing: this is how waiting works."),
    410: (
        "The session is finished, or the result is no longer kept.",
        "samples are made again",
        "Start another session.",
    ),
    413: ("The body is too large.", "no", "Send less at once, or raise `max_body_bytes`."),
    429: ("Too much is under way.", "after `Retry-After`", "Nothing, or ask for less at once."),
    500: ("A mistake of ours.", "yes", "Look at the server's log, and report it."),
    503: ("No engine is up.", "yes", "`/readyz` says why."),
}

HEAD = """\
# Errors

Generated by `tools/write_errors.py` from the classes in `src/tinsmith` and the server's source.

One tree: `except tinsmith.TinkerError` catches everything that is raised on purpose. The names
under `APIError` are those of the official package, so existing `except` clauses work. A wrong value
in a call that sends nothing, such as an empty list of datums, is a plain `ValueError` or
`TypeError`, as in the official package.
"""

FAILED = """\
## When a request was accepted and then failed

A training or sampling request is accepted first and carried out later. If that fails, waiting for
its result raises `RequestFailedError` with a `category`:

| category | cause | cure |
|---|---|---|
"""

CATEGORIES = {
    "User": (
        "The request itself: a loss input of the wrong shape, a token outside the vocabulary, "
        "a gradient that is not finite.",
        "Correct it; sending the same again fails again.",
    ),
    "Server": (
        "The server or its engine: the engine died three times under this operation, or a mistake "
        "of ours.",
        "Look at the server's log. The model is as it was before the operation.",
    ),
    "Unknown": ("A service said neither.", "Read the message."),
}


def page() -> str:
    lines = [HEAD, "## Exceptions", "", "| class | cause | cure |", "|---|---|---|"]
    for depth, kind in tree(TinkerError):
        cause = " ".join((kind.__doc__ or "").split())
        indent = "&nbsp;" * 4 * depth
        lines.append(f"| {indent}`{kind.__name__}` | {cause} | {CURES[kind.__name__]} |")
    lines += ["", FAILED.rstrip()]
    lines += [f"| `{name}` | {cause} | {cure} |" for name, (cause, cure) in CATEGORIES.items()]
    lines += ["", "## HTTP statuses of the server", ""]
    lines += ['The body is `{"detail": "…"}`; `detail` is the message of the exception.', ""]
    lines += ["| status | cause | sent again by the client | cure |", "|---|---|---|---|"]
    lines += [f"| {s} | {c} | {again} | {cure} |" for s, (c, again, cure) in STATUSES.items()]
    lines += ["", "## What the server says", ""]
    lines += ["Every refusal, from the source; `…` stands for a name or number.", ""]
    for status, messages in sorted(refusals().items()):
        lines += [f"**{status}**", "", *(f"- {message}" for message in sorted(messages)), ""]
    return "\n".join(lines).rstrip() + "\n"


def tree(root: type[BaseException], depth: int = 0) -> Iterator[tuple[int, type[BaseException]]]:
    """The class and all below it, of every module of the package."""
    if depth == 0:
        for module in pkgutil.walk_packages(tinsmith.__path__, "tinsmith."):
            if not module.name.endswith("__main__") and ".migrations" not in module.name:
                try:
                    importlib.import_module(module.name)
                except ModuleNotFoundError as missing:
                    # Kernels need it, raise no errors, and are no use without a GPU.
                    if missing.name != "triton":
                        raise
    yield depth, root
    below = [kind for kind in root.__subclasses__() if kind.__module__.startswith("tinsmith.")]
    for kind in sorted(below, key=_order):
        yield from tree(kind, depth + 1)


def _order(kind: type[BaseException]) -> tuple[int, str]:
    is_status = issubclass(kind, APIStatusError)
    return (getattr(kind, "status_code", 999) if is_status else 0, kind.__name__)


def refusals() -> dict[int, set[str]]:
    """Status -> the messages that the server's source raises with it."""
    found: dict[int, set[str]] = {}
    for path in sorted([*SERVER.rglob("*.py"), SOURCE / "text_model.py"]):
        if path.name in ("config.py", "config_sources.py"):
            continue  # complaints about settings are made before anything is served
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            name, arguments = node.func.id, node.args
            if name == "Refusal" and isinstance(arguments[0], ast.Constant):
                found.setdefault(int(str(arguments[0].value)), set()).add(_text(arguments[1]))
            elif name == "not_found" and isinstance(arguments[0], ast.Constant):
                found.setdefault(404, set()).add(f"there is no {_text(arguments[0])} …")
            elif name == "TooLargeError":
                found.setdefault(413, set()).add(_text(arguments[0]))
            elif name == "ValidationError" and arguments:
                where = _text(arguments[1]) if len(arguments) > 1 else ""
                text = _text(arguments[0])
                message = f"`{where}`: {text}" if where.strip("…") else text
                found.setdefault(400, set()).add(message)
    unexplained = set(found) - set(STATUSES)
    if unexplained:
        raise LookupError(f"no cause and cure for status {sorted(unexplained)}")
    return {status: messages - {"…", "there is no … …"} for status, messages in found.items()}


def _text(node: ast.expr) -> str:
    """A string of the source, with `…` where something is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return "…"


if __name__ == "__main__":
    TARGET.write_text(page())
    print(f"wrote {TARGET.relative_to(ROOT)}")
