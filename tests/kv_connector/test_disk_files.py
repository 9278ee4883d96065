"""Files of the third tier: what is damaged is a miss, what is full stops, and each engine has a folder of its own."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from minivllm.kv_connector.disk_files import DiskFiles
from minivllm.kv_connector.disk_index import HEADER_BYTES, DiskFolder, path_of
from minivllm.kv_connector.host_copies import runs

KEY, OTHER = b"\x01" * 32, b"\x02" * 32
PAYLOAD = np.arange(1000, dtype=np.uint8)


def room() -> np.ndarray:
    return np.zeros(1000, np.uint8)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    files, into = DiskFiles(tmp_path, 1), room()
    assert files.write(KEY, PAYLOAD)
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY.hex()}.1"]
    assert DiskFiles(tmp_path, 1).read(KEY, into)
    assert (into == PAYLOAD).all()
    files.remove([KEY, b"never written"])
    assert not files.read(KEY, into)


@pytest.mark.parametrize(
    "damage",
    ["cut", "longer", "altered", "header", "empty", "another size", "another key's", "another rank's", "a pipe"],
)
def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, damage: str) -> None:
    files = DiskFiles(tmp_path, 0)
    files.write(KEY, PAYLOAD)
    path = path_of(tmp_path, KEY, 0)
    content = bytearray(path.read_bytes())
    match damage:
        case "cut":
            del content[-1]
        case "longer":
            content += b"x"
        case "altered":
            content[HEADER_BYTES + 500] ^= 1
        case "header":
            content[20] ^= 1
        case "empty":
            content.clear()
        case "another key's":
            files.write(OTHER, PAYLOAD)
            content = path_of(tmp_path, OTHER, 0).read_bytes()
        case "another rank's":
            DiskFiles(tmp_path, 1).write(KEY, PAYLOAD)
            content = path_of(tmp_path, KEY, 1).read_bytes()
    path.unlink()
    if damage == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    into = np.zeros(999, np.uint8) if damage == "another size" else room()
    assert not files.read(KEY, into)
    assert not path.exists()


def test_a_full_disk_is_told_once_and_then_left_alone(tmp_path: Path, monkeypatch, caplog) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    files = DiskFiles(tmp_path, 0)
    files.write(KEY, PAYLOAD)
    monkeypatch.setattr(os, "writev", full)
    assert not files.write(b"2" * 32, PAYLOAD)
    monkeypatch.undo()
    assert not files.write(b"3" * 32, PAYLOAD)
    assert [record.getMessage() for record in caplog.records] == [
        f"No more blocks are written to {tmp_path}: No space left on device"
    ]
    assert len(list(tmp_path.iterdir())) == 1, "no half of a file is left"
    assert files.read(KEY, room())


def test_a_disk_that_can_only_be_read_raises_nothing(tmp_path: Path, monkeypatch) -> None:
    def read_only(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    files, damaged = DiskFiles(tmp_path, 0), b"2" * 32
    files.write(KEY, PAYLOAD)
    path_of(tmp_path, damaged, 0).write_bytes(b"x")
    monkeypatch.setattr(Path, "unlink", read_only)
    monkeypatch.setattr(os, "writev", read_only)
    assert not files.write(b"3" * 32, PAYLOAD)
    assert not files.read(damaged, room())
    files.remove([KEY])
    files.clear()
    assert files.read(KEY, room()), "what is there can still be read"


def test_two_engines_have_a_folder_each_and_the_next_one_finds_the_files(tmp_path: Path) -> None:
    first, second = DiskFolder(str(tmp_path), "kind"), DiskFolder(str(tmp_path), "kind")
    assert first.path != second.path
    for rank in range(2):
        DiskFiles(first.path, rank).write(KEY, PAYLOAD)
    DiskFiles(first.path, 0).write(b"2" * 32, PAYLOAD)
    (first.path / f"{KEY.hex()}.0.unfinished").write_bytes(b"half")
    (first.path / "notes").write_text("somebody's")
    first.close()
    again = DiskFolder(str(tmp_path), "kind")
    assert again.path == first.path
    assert again.keys(num_ranks=2) == [KEY], "one rank's file alone is nothing"
    assert sorted(path.name for path in again.path.iterdir() if "." not in path.name) == ["lock", "notes"]
    assert not list(again.path.glob("*.unfinished"))
    DiskFiles(again.path, 0).clear()
    assert (again.path / "notes").exists()
    for folder in (again, second):
        folder.close()


def test_consecutive_records_cross_the_bus_as_one_piece() -> None:
    assert list(runs([4, 5, 6, 9, 2, 3])) == [(0, 4, 3), (3, 9, 1), (4, 2, 2)]
    assert list(runs([])) == []
