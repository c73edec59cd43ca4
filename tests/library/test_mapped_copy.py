"""Copies through mappings: every byte where a write would put it, whatever the sizes and whichever buffer."""

from __future__ import annotations

import os
import random

import pytest

from elasticd.checkpointing.mapped_copy import _FEWEST_BYTES, _PIECE_BYTES, MappedBuffers


@pytest.mark.parametrize("size", [0, 5, _FEWEST_BYTES, _FEWEST_BYTES + 3, 2 * _PIECE_BYTES + 77])
@pytest.mark.parametrize("offset", [0, 1, 4096, 100_001])
def test_each_copy_is_whole(size: int, offset: int) -> None:
    """Three copies into each of two buffers in turn: written, mapped, and through the mapping that was kept."""
    mapped = MappedBuffers()
    buffers = [os.memfd_create(f"test-{number}") for number in range(2)]
    for turn in range(6):
        fd = buffers[turn % 2]
        os.ftruncate(fd, offset + size + 10)
        content = random.Random(turn).randbytes(size)
        cuts = sorted(random.Random(turn).choices(range(size + 1), k=3))
        pieces = [content[start:stop] for start, stop in zip([0, *cuts], [*cuts, size], strict=True)]
        again = os.dup(fd)  # ranks get a new descriptor at each save
        mapped.copy(again, offset, size, map(memoryview, pieces))
        os.close(again)
        assert os.pread(fd, offset + size + 10, 0) == bytes(offset) + content + bytes(10)
    kept = [place[2] for place in mapped._places.values()]
    assert [each is not None for each in kept] == [size >= _FEWEST_BYTES] * 2
    for fd in buffers:
        os.close(fd)


def test_other_sizes_and_a_third_buffer() -> None:
    """A place that has changed is written again; only two buffers stay mapped."""
    mapped = MappedBuffers()
    buffers = [os.memfd_create(f"test-{number}") for number in range(3)]
    for number, (size, offset) in enumerate([(2 << 20, 0), (2 << 20, 0), (3 << 20, 0), (3 << 20, 4096), (1 << 20, 0)]):
        for fd in buffers:
            content = bytes([number + 1]) * size
            os.ftruncate(fd, offset + size)
            mapped.copy(fd, offset, size, iter([content]))
            assert os.pread(fd, size, offset) == content
    assert len(mapped._places) == 2
    for fd in buffers:
        os.close(fd)
