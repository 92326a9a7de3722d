"""Archives from somebody else: unpacked inside a folder, as a whole, or refused."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tinsmith.client.downloads import archive
from tinsmith.errors import TooLargeError, ValidationError

Members = list[tuple[tarfile.TarInfo, bytes]]


def member(name: str, content: bytes = b"x", **settings: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in settings.items():
        setattr(info, key, value)
    return info, content


def packed(members: Members) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content) if info.isreg() else None)
    return memory.getvalue()


def unpack(tmp_path: Path, content: bytes, max_files: int = 100) -> list[Path]:
    tar = tmp_path / "a.tar"
    tar.write_bytes(content)
    try:
        return archive.extract(tar, tmp_path / "out", max_files)
    finally:
        tar.unlink()


def test_files_and_folders_are_unpacked(tmp_path: Path) -> None:
    content = packed(
        [
            member(".", b"", type=tarfile.DIRTYPE),
            member("./empty", b"", type=tarfile.DIRTYPE),
            member("./model.bin", b"weights", mode=0o777, uid=0),
            member("deep/er/config.json", b"{}"),
        ]
    )
    files = unpack(tmp_path, content)
    out = tmp_path / "out"
    assert files == [out / "model.bin", out / "deep" / "er" / "config.json"]
    assert files[0].read_bytes() == b"weights"
    assert files[0].stat().st_mode & 0o111 == 0, "nothing becomes executable"
    assert (out / "empty").is_dir()
    assert list(tmp_path.iterdir()) == [out]


LINK = {"size": 0, "linkname": "/etc/passwd"}
BAD: dict[str, Callable[[], bytes]] = {
    "absolute": lambda: packed([member("/etc/x")]),
    "upwards": lambda: packed([member("../x")]),
    "upwards inside": lambda: packed([member("a/../../x")]),
    "drive": lambda: packed([member("C:x")]),
    "symlink": lambda: packed([member("a", b"", type=tarfile.SYMTYPE, **LINK)]),
    "hard link": lambda: packed([member("a", b"", type=tarfile.LNKTYPE, **LINK)]),
    "device": lambda: packed([member("a", b"", type=tarfile.CHRTYPE)]),
    "pipe": lambda: packed([member("a", b"", type=tarfile.FIFOTYPE)]),
    "sparse": lambda: packed([member("a", b"", type=tarfile.GNUTYPE_SPARSE)]),
    "long part": lambda: packed([member("x" * 256)]),
    "long path": lambda: packed([member("/".join(["x" * 100] * 11))]),
    "twice": lambda: packed([member("a"), member("a")]),
    "file as folder": lambda: packed([member("a"), member("a/b")]),
    "compressed bomb": lambda: gzip.compress(packed([member("a", bytes(50_000_000))])),
    "cut off": lambda: packed([member("a", bytes(100_000))])[:50_000],
    "cut inside a header": lambda: packed([member("a"), member("b")])[:1100],
    "no archive": lambda: b"<html>not found</html>" * 100,
    "empty file": lambda: b"",
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_not_plain_is_refused_as_a_whole(tmp_path: Path, kind: str) -> None:
    """A good file before the bad member is not left behind either."""
    content = BAD[kind]()
    if content[257:262] == b"ustar" and kind not in ("cut off", "cut inside a header"):
        good = packed([member("first", b"good")])
        content = good[:1024] + content
    with pytest.raises(ValidationError):
        unpack(tmp_path, content)
    assert list(tmp_path.iterdir()) == [], "nothing is left, inside or outside"


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TooLargeError, match="more than 3"):
        unpack(tmp_path, packed([member(str(i)) for i in range(4)]), max_files=3)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_taken_and_a_full_one_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert unpack(tmp_path, packed([member("a")])) == [out / "a"]
    with pytest.raises(ValidationError, match="already"):
        unpack(tmp_path, packed([member("b")]))
    assert [path.name for path in out.iterdir()] == ["a"]
