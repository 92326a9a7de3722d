"""The server and the engines write to the data folder through `tinsmith.disk` and nowhere else.

A write that goes another way is one whose crash nobody has tried (`tests/chaos`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "tinsmith"

ALLOWED = {
    ("server/data_folder.py", "mkdir"): "the data folder itself, before there is anything in it",
    ("server/data_folder.py", "os.open"): "the lock, which says nothing once its holder is gone",
    ("server/data_folder.py", "os.ftruncate"): "the same",
    ("server/sampling/completions.py", "os.open"): "lines about samples; a cut one is left out",
    ("server/edge/auth.py", "touch"): "a sign to a running server to look into the store again",
    ("engine/local/ranks/link.py", "shutil.rmtree"): "the ranks' meeting place, in a folder of tmp",
    ("engine/local/boundary/process.py", "write_text"): "a setting of the kernel's, in /proc",
}

_CHANGING = {
    *("mkdir", "makedirs", "rename", "unlink", "rmdir", "rmtree", "remove_tree"),
    *("write_bytes", "write_text", "touch", "symlink_to", "hardlink_to", "truncate", "ftruncate"),
    *("copyfile", "copytree", "copy2", "save_file", "mkdtemp", "mkstemp"),
}
# Converted models, and which were verified, lie in a cache of their own; losing them costs time.
_ELSEWHERE = {
    "engine/local/model/sources.py",
    "engine/local/model/verifying/verification.py",
    "engine/local/model/packed_files/conversion.py",
}


def _stray_writes(file: Path) -> Iterator[tuple[str, str]]:
    name = file.relative_to(SOURCE).as_posix()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and (what := _write(node)) is not None:
            yield name, what


def _write(call: ast.Call) -> str | None:
    """What a call writes with, as it is spelt; None when it writes nothing."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id if function.id == "open" and _opens_for_writing(call) else None
    if not isinstance(function, ast.Attribute):
        return None
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    if owner == "disk":
        return None
    spelt = f"{owner}.{function.attr}" if owner in ("os", "tarfile", "shutil") else function.attr
    if function.attr == "open":
        return spelt if _opens_for_writing(call) else None
    if function.attr == "replace":
        # Text has a replace of two arguments.
        is_path = owner == "os" or (len(call.args) == 1 and not call.keywords)
        return spelt if is_path and owner != "dataclasses" else None
    if function.attr == "touch" and call.args:
        return None  # a session's sign of life
    return spelt if function.attr in _CHANGING else None


def _opens_for_writing(call: ast.Call) -> bool:
    texts = [n.value for a in call.args for n in ast.walk(a) if isinstance(n, ast.Constant)]
    texts += [k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)]
    flags = {n.attr for a in call.args for n in ast.walk(a) if isinstance(n, ast.Attribute)}
    is_mode = any(isinstance(t, str) and len(t) < 5 and set(t) & set("wax+") for t in texts)
    return is_mode or bool(flags & {"O_CREAT", "O_WRONLY", "O_RDWR", "O_TRUNC"})


def _found() -> set[tuple[str, str]]:
    files = [*(SOURCE / "server").rglob("*.py"), *(SOURCE / "engine").rglob("*.py")]
    return {
        found
        for file in files
        if file.relative_to(SOURCE).as_posix() not in _ELSEWHERE
        for found in _stray_writes(file)
    }


def test_nothing_is_written_except_through_the_functions_whose_crashes_are_tried() -> None:
    assert _found() - ALLOWED.keys() == set()


def test_every_exception_is_still_needed() -> None:
    assert ALLOWED.keys() - _found() == set()


def test_a_stray_write_would_be_found() -> None:
    for line in (
        "Path('x').write_bytes(b'')",
        "path.open('xb')",
        "open(path, 'w')",
        "os.replace(a, b)",
        "a.rename(b)",
        "a.replace(b)",
        "shutil.rmtree(a)",
        "os.open(a, os.O_CREAT)",
        "a.unlink()",
    ):
        (call,) = [n for n in ast.walk(ast.parse(line)) if isinstance(n, ast.Call)][:1]
        assert _write(call) is not None, line
    for line in (
        "a.open('rb')",
        "disk.discard_file(a)",
        "'a'.replace('b', 'c')",
        "channel.open(s)",
    ):
        (call,) = [n for n in ast.walk(ast.parse(line)) if isinstance(n, ast.Call)][:1]
        assert _write(call) is None, line
