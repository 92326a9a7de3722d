"""Unpacking a tar archive that somebody else made: all of it, or nothing, and only inside a folder.

Plain files and folders are taken; an archive with anything else (links, devices, sparse files,
names that lead outside) is refused as a whole, and so is a compressed one: what is unpacked is
never more than what was fetched. Files are written beside the target, which appears by one rename
when everything is there.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from tinsmith.errors import TooLargeError, ValidationError

MAX_FILES = 10_000
MAX_NAME_BYTES = 255
"""Longest part of a path that common file systems allow."""
MAX_PATH_BYTES = 1024


def extract(archive: Path, folder: Path, max_files: int = MAX_FILES) -> list[Path]:
    """Unpack `archive` as `folder`, which must not exist or must be empty; its files."""
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        names = _unpack(archive, beside, max_files)
        beside.chmod(0o755)  # mkdtemp's is for the owner alone
        put_in_place(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return [folder / name for name in names]


def put_in_place(beside: Path, folder: Path) -> None:
    """Give a finished folder its name; an empty one of that name gives way."""
    if folder.exists():
        folder.rmdir()
    beside.rename(folder)


def check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValidationError(f"{str(folder)!r} exists already and is not an empty folder")


def confined(folder: Path, name: str) -> Path:
    """Where a file of that name goes; never outside the folder."""
    path = PurePosixPath(name)
    is_strange = "\x00" in name or any(p in ("..", "") or ":" in p for p in path.parts)
    if path.is_absolute() or not path.parts or is_strange:
        raise ValidationError(f"the file name {name[:200]!r} leads out of its folder")
    longest = max(len(part.encode(errors="replace")) for part in path.parts)
    if longest > MAX_NAME_BYTES or len(name.encode(errors="replace")) > MAX_PATH_BYTES:
        raise TooLargeError(f"the file name {name[:80]!r}… is too long")
    target = folder.joinpath(*path.parts)
    if not target.resolve().is_relative_to(folder.resolve()):
        raise ValidationError(f"the file name {name[:200]!r} leads out of its folder")
    return target


def _unpack(archive: Path, folder: Path, max_files: int) -> list[PurePosixPath]:
    names: list[PurePosixPath] = []
    try:
        with tarfile.open(archive, "r:") as tar:
            for number, member in enumerate(tar, start=1):
                if number > max_files:
                    raise TooLargeError(f"{archive.name} has more than {max_files} files")
                target = _target(folder, member)
                if target is not None and member.isreg():
                    _write(tar, member, target)
                    names.append(PurePosixPath(member.name))
            end = tar.offset
        if not _ends_at(archive, end):
            raise tarfile.ReadError("its end is missing")
    except (tarfile.TarError, EOFError) as error:
        raise ValidationError(
            f"{archive.name} is not a complete, uncompressed tar archive: {error}"
        ) from error
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise ValidationError(f"{archive.name} has two files of one name: {error}") from error
    return names


def _ends_at(archive: Path, offset: int) -> bool:
    """Whether the end-of-archive mark is there; tarfile takes any damage for the end."""
    with archive.open("rb") as file:
        file.seek(offset)
        return file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)


def _target(folder: Path, member: tarfile.TarInfo) -> Path | None:
    """Where a member goes; None for the folder itself, which tar programs like to list."""
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise ValidationError(f"{member.name[:200]!r} is neither a plain file nor a folder")
    if member.isdir() and PurePosixPath(member.name) == PurePosixPath("."):
        return None
    target = confined(folder, member.name)
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
    return target


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    source = tar.extractfile(member)
    assert source is not None, "a plain file has content"
    target.parent.mkdir(parents=True, exist_ok=True)
    with source, target.open("xb") as file:  # a name that comes twice is an error
        shutil.copyfileobj(source, file, 1 << 20)
    if target.stat().st_size != member.size:
        raise ValidationError(f"{member.name[:200]!r} ends too early")
