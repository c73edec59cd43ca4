"""Buffers: a torn header, or one of another version, is no state; a copy into mapped memory is like a written one."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elasticd.checkpointing.memory import buffers, mapped_buffer
from elasticd.checkpointing.memory.buffers import Buffers, Snapshot, WriteTask
from elasticd.checkpointing.memory.mapped_buffer import MappedBuffer, MappedBuffers
from elasticd.checkpointing.storage import manifest
from elasticd.checkpointing.storage.manifest import NO_CHECKSUM, Manifest

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[list[int]]:
    made = [os.memfd_create(f"test-{number}") for number in range(3)]
    yield made
    for fd in made:
        os.close(fd)


def held(memory: list[int]) -> list[int | None]:
    """The steps that a writer finds when it starts."""
    return [snapshot and snapshot.draft.step for snapshot in Buffers(memory[0], memory[1:]).held]


def snapshot(step: int) -> Snapshot:
    draft = Manifest(1, step, None, 2, 100, NO_CHECKSUM, "job", "run", None, 0.0)
    return Snapshot(draft, step, WriteTask("/checkpoints", 3, "by a test", "", "", 0, 0.01))


def described(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A header with a right digest, as another version of this package may have written it."""
    fields = json.loads(snapshot(1).to_json())
    data = json.dumps(fields if (found := change(fields)) is None else found).encode()
    return len(data).to_bytes(8, "little") + hashlib.sha256(data).digest() + data


def of_manifest(**fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        draft = {**json.loads(found["draft"]), **fields}
        del draft["seal"]
        found["draft"] = json.dumps({**draft, "seal": manifest.seal_of(draft)})

    return change


HEADERS: dict[str, bytes] = {
    "nothing": bytes(100),
    "no digest": (50).to_bytes(8, "little") + bytes(92),
    "longer than the file": (1 << 40).to_bytes(8, "little") + bytes(92),
    "beginning of another one": described(lambda _: None)[:90],
    "one bit differs": described(lambda _: None).replace(b'"number": 1', b'"number": 3'),
    "no object": described(lambda _: [1, 2]),
    "no draft": described(lambda fields: fields.pop("draft") and None),
    "a task with more fields": described(lambda fields: fields["task"].update(later=1)),
    "a task with fewer fields": described(lambda fields: fields["task"].pop("keep") and None),
    "a later manifest": described(of_manifest(version="2.0")),
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_header_that_is_none_of_ours_is_no_state(memory: list[int], header: bytes) -> None:
    two = Buffers(memory[0], memory[1:])
    two.write_header(0, snapshot(7))
    two.write_header(1, snapshot(8))
    assert held(memory) == [7, 8]
    os.pwrite(memory[0], header, MIB)
    assert held(memory) == [7, None]


def test_header_is_gone_once_its_buffer_is_filled_again(memory: list[int]) -> None:
    two = Buffers(memory[0], memory[1:])
    two.write_header(0, snapshot(7))
    two.write_header(1, snapshot(8))
    two.erase_header(two.newest_whole() or 0)
    assert held(memory) == [7, None]
    assert Buffers(memory[0], memory[1:]).newest_whole() == 0


def test_other_buffer_gets_memory_and_keeps_its_size(memory: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_PREALLOCATED_PIECE_BYTES", MIB)
    two = Buffers(memory[0], memory[1:])
    os.posix_fallocate(memory[1], 0, 5 * MIB // 2)
    os.ftruncate(memory[2], MIB)
    two.preallocate_others(0)
    found = os.fstat(memory[2])
    assert (found.st_size, found.st_blocks * 512) == (MIB, 5 * MIB // 2)


def mapped(fd: int, pieces: dict[int, bytes]) -> MappedBuffer:
    """A buffer that was copied into once, and is mapped."""
    buffer = MappedBuffer()
    copy(buffer, fd, pieces)
    wait_until_mapped()
    return buffer


def wait_until_mapped() -> None:
    for thread in threading.enumerate():
        if thread.name == "elasticd-buffer":
            thread.join()


def copy(buffer: MappedBuffer, fd: int, pieces: dict[int, bytes]) -> None:
    buffer.begin_copy(fd)
    for offset, data in pieces.items():
        buffer.write(offset, memoryview(bytearray(data)))
    buffer.end_copy()
    for offset, data in pieces.items():
        assert os.pread(fd, len(data), offset) == data


@pytest.mark.parametrize("populate", [22, 99], ids=["this kernel", "an older kernel"])
def test_second_copy_goes_to_mapped_memory(memory: list[int], monkeypatch: pytest.MonkeyPatch, populate: int) -> None:
    monkeypatch.setattr(mapped_buffer, "_POPULATE_READ", populate)
    pieces = {0: b"a" * 100, 5000: b"b" * MIB}
    buffer = mapped(memory[1], pieces)
    monkeypatch.setattr(mapped_buffer, "write_at", None)
    copy(buffer, memory[1], {offset: data.swapcase() for offset, data in pieces.items()})
    assert buffer.fits


def test_pieces_of_any_size_are_whole(memory: list[int]) -> None:
    """Written, mapped, and mapped again; of bytes and of memory, at odd offsets."""
    pieces = [b"", b"a", b"b" * 4095, b"c" * MIB, b"d" * 4097]
    buffer, offsets = MappedBuffer(), [1, *(1 + end for end in itertools.accumulate(map(len, pieces)))]
    for turn in range(3):
        buffer.begin_copy(memory[1])
        for offset, piece in zip(offsets, pieces, strict=False):
            buffer.write(offset, piece if turn % 2 else memoryview(bytearray(piece)))
        buffer.end_copy()
        assert os.pread(memory[1], 2 * MIB, 0) == b"\0" + b"".join(pieces)
        pieces = [piece.swapcase() for piece in pieces]
        wait_until_mapped()
    assert buffer.fits


@pytest.mark.parametrize("size", [100, 2 * MIB], ids=["shorter than what is mapped", "longer"])
def test_file_of_another_size_is_written(memory: list[int], size: int) -> None:
    """An access beyond the end of the file would kill the process."""
    buffer = mapped(memory[1], {0: b"a" * MIB})
    os.ftruncate(memory[1], size)
    copy(buffer, memory[1], {0: b"b" * 50, 3 * MIB // 2: b"c" * 50})
    assert not buffer.fits
    buffers = MappedBuffers()
    first = buffers.begin_copy(memory[1])
    assert buffers.begin_copy(memory[1]) is first
    first.fits = False
    assert buffers.begin_copy(memory[1]) is not first
