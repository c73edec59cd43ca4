"""How groups are left, by backend: torch's functions for NCCL are fakes that note what is asked of them, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elasticd.process_group import DefaultGroup
from elasticd.rejoin import transport
from tests.library.conftest import Start

CUDA = torch.device("cuda", 0)


class Device:
    """The default group of a process on a GPU: aborted once, and idle after that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.error: RuntimeError | None = None
        self.may_end = threading.Event()
        self.may_end.set()
        self.begun = threading.Event()
        monkeypatch.setattr(distributed_c10d, "_abort_process_group", self.abort)
        monkeypatch.setattr(torch.accelerator, "synchronize", self.synchronize)

    def abort(self) -> None:
        self.begun.set()
        assert self.may_end.wait(30)
        self.calls.append("abort")
        dist.destroy_process_group()

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(f"synchronize {device}")
        if self.error is not None:
            raise self.error


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Device(monkeypatch)
    if dist.is_initialized():
        dist.destroy_process_group()


GROUP = DefaultGroup(0, 1, CUDA, created_by_join=True)


def test_groups_of_a_gpu_are_aborted_before_the_device_is_waited_for(device: Device) -> None:
    """A kernel that waits for a dead rank ends by the abort only; `destroy_process_group` could wait for it."""
    transport.of_device(CUDA).leave(GROUP)
    assert device.calls == ["abort", "synchronize cuda:0"]
    assert not dist.is_initialized()


def test_rank_leaves_once_the_thread_that_interrupts_has_aborted(device: Device) -> None:
    groups = transport.of_device(CUDA)
    device.may_end.clear()
    threads = [threading.Thread(target=groups.interrupt), threading.Thread(target=groups.leave, args=(GROUP,))]
    threads[0].start()
    assert device.begun.wait(30)
    threads[1].start()
    assert device.calls == []
    device.may_end.set()
    for thread in threads:
        thread.join(30)
    assert device.calls == ["abort", "synchronize cuda:0"], "aborted once"


def test_device_that_raises_is_said(device: Device) -> None:
    device.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        transport.of_device(CUDA).leave(GROUP)


def test_ranks_on_gpus_restart_and_those_of_gloo_stay() -> None:
    assert transport.of_device(CUDA).reason_against() == "collectives of cuda devices cannot be left"
    assert transport.of_device(torch.device("cpu")).reason_against() == ""


@pytest.mark.parametrize("how", ["is interrupted", "leaves"])
def test_rank_that_has_left_can_be_sent_to_until_all_have_left(start: Start, tmp_path: Path, how: str) -> None:
    """A send that finds its peer gone may never end."""
    job = start("parts.py", str(tmp_path), how)
    assert job.codes() == [0, 0], [rank.errors() for rank in job.ranks]
    assert job.ranks[0].result() == {"notices": True}


@pytest.mark.parametrize(("limit", "held"), [(transport.SPARE_DESCRIPTORS, 0), (1024, 1)])
def test_no_connection_is_kept_where_the_next_round_needs_its_descriptor(
    start: Start, tmp_path: Path, limit: int, held: int
) -> None:
    """gloo aborts a process that has no descriptor for a connection."""
    job = start("parts.py", str(tmp_path), "has few descriptors", str(limit))
    assert job.results() == [{"held": held}] * 2
