"""A device's memory comes to the host in pieces that lie where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elasticd.checkpointing.at_fault import step_record
from elasticd.checkpointing.at_fault.step_record import StepRecord
from elasticd.checkpointing.state import device_copy, shard_plan, training_state


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


def test_default_device_of_a_script_is_for_its_own_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `torch.set_default_device("cuda")` memory of the host, which alone can be pinned, is asked for by name."""
    cpu, path, make_empty = torch.device("cpu"), str(tmp_path / "record"), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **how: make_empty(*size, **how))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    parameter = torch.ones(3)

    def use() -> list[Any]:
        record = StepRecord(path, [], [parameter])
        record.commit(1)
        found = step_record.read(path, 1, [])
        assert found is not None
        training_state.undo_seed_draw(training_state.torch_random_state())
        chunks = device_copy.GpuCopies(cpu).chunks
        around = shard_plan.archive_around.__wrapped__(torch.float32, torch.Size([3]))
        return [training_state.to_bytes(found.random_state), {chunk.device for chunk in chunks}, around]

    usual = use()
    with torch.device("meta"):
        assert use() == usual
