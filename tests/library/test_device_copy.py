"""A device's memory comes to the host in pieces that lie where they belong."""

from __future__ import annotations

import pytest
import torch

from elasticd.checkpointing.state import device_copy


def test_pieces_of_all_sizes_are_put_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "CHUNK_BYTES", 128)
    sizes = (1, 127, 128, 129, 500, 64, 64, 3, 0, 1000)
    storages = [torch.randint(256, (size,), dtype=torch.uint8).untyped_storage() for size in sizes]
    expected, parts = bytearray(), []
    for number, storage in enumerate(storages):
        start = min(number, len(storage))
        parts.append((len(expected), storage, start, len(storage)))
        expected += bytes(storage.tolist()[start:])
    found, most = bytearray(len(expected)), 0
    for place, data in device_copy.copy_pieces(torch.device("cpu"), parts):
        found[place : place + len(data)] = data
        most = max(most, len(data))
    assert found == expected
    assert most == 128
    for batch in device_copy.chunk_batches(parts):
        ends = [at + len(piece) for at, _, piece in batch]
        assert ends[-1] <= 128
        assert all(end <= at for end, (at, _, _) in zip(ends, batch[1:], strict=False))
    assert [len(batch) for batch in device_copy.chunk_batches([(0, storages[2], 0, 128)])] == [1]
