"""Files and folders appear whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tinsmith import disk


def _full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_file_that_does_not_fit_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    disk.publish_file(path, b"first")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        with pytest.raises(OSError, match="No space"):
            disk.publish_file(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    real = os.fsync

    def record(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path.name, (tmp_path / "file").exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    disk.publish_file(tmp_path / "file", b"content")
    (draft, was_there), folder = synced
    assert disk.is_draft(Path(draft)) and draft.startswith(".file.") and not was_there
    assert folder == (tmp_path.name, True)


def test_of_several_who_publish_a_file_at_once_one_has_his_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They shared a draft: one wrote into what the other was about to rename, or already had."""
    path, contents = tmp_path / "file", [bytes([65 + n]) * (1000 + n) for n in range(8)]
    together, real = threading.Barrier(len(contents)), os.fsync

    def meet(descriptor: int) -> None:
        together.wait(10)
        real(descriptor)

    failed: list[BaseException] = []

    def publish(data: bytes) -> None:
        try:
            disk.publish_file(path, data)
        except BaseException as error:
            failed.append(error)

    monkeypatch.setattr(os, "fsync", meet)
    threads = [threading.Thread(target=publish, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_drafts_are_known_by_their_names(tmp_path: Path) -> None:
    with disk.new_folder(tmp_path / "done") as draft:
        assert disk.is_draft(draft)
    assert not disk.is_draft(tmp_path / "done")
    assert [p.name for p in tmp_path.iterdir()] == ["done"]


def test_a_files_record_is_that_of_what_it_holds_however_its_parts_come(tmp_path: Path) -> None:
    """Large views are read by a thread, and those after them in their turn."""
    parts = [b"head", bytes(range(256)) * 1024, b"", b"tail" * 100]
    views = [parts[0], memoryview(bytearray(parts[1])), memoryview(parts[2]), parts[3]]
    path = tmp_path / "file"
    assert disk.write_file(path, views) == disk.describe_file(path)
    assert path.read_bytes() == b"".join(parts)


def test_a_file_that_cannot_be_synced_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(OSError, match="No space"):
        disk.write_file(tmp_path / "file", [memoryview(bytearray(2**20))])
    assert "checksum" not in [thread.name for thread in threading.enumerate()]
