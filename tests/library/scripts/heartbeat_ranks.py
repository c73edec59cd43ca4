"""Ranks with a heartbeat thread, which halt where a test looks at their heartbeats: a request opens the next gate."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elasticd.heartbeat import record as heartbeat
from elasticd.heartbeat import thread as heartbeat_thread
from elasticd.heartbeat.optimizer_hook import install_optimizer_hook
from elasticd.heartbeat.thread import HeartbeatThread

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
writer = heartbeat.from_environment()
thread = HeartbeatThread(writer, os.environ["ELASTICD_HEARTBEAT"] + ".flight")


def gate(number: int) -> None:
    deadline = time.monotonic() + 60
    while writer.request < number:
        assert time.monotonic() < deadline
        time.sleep(0.005)
        time.sleep(0.005)  # a second place to be seen at


def all_reduce(times: int) -> None:
    for _ in range(times):
        dist.all_reduce(torch.ones(3))


def join() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=77))


def training() -> None:
    """Steps of two collectives each; in the fourth rank 1 stops between them, in the fifth before. Then another
    group."""
    thread.start()
    gate(1)
    join()
    install_optimizer_hook(writer)
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(3):
        all_reduce(2)
        optimizer.step()
    gate(2)
    all_reduce(1)
    if RANK == 1:
        gate(3)
    all_reduce(1)
    optimizer.step()
    if RANK == 1:
        gate(4)
    all_reduce(2)
    gate(5)
    dist.destroy_process_group()
    gate(6)
    os.environ["MASTER_PORT"] = str(int(os.environ["OTHER_PORT"]))
    join()
    all_reduce(1)
    gate(7)


def waiting_with_a_timeout() -> None:
    """Rank 0 waits in a barrier with a timeout, in a group with another timeout than the default one, and as usual."""
    thread.start()
    join()
    group = dist.new_group(timeout=timedelta(seconds=555))
    waits = (
        lambda: dist.monitored_barrier(timeout=timedelta(seconds=600)),
        lambda: dist.all_reduce(torch.ones(3), group=group),
        lambda: all_reduce(1),
    )
    for number, wait in enumerate(waits, 1):
        if RANK == 1:
            gate(number)
        wait()


def receiving_in_a_group() -> None:
    """Rank 0 receives one message after the other on the same line, and is nearly always there."""
    thread.start()
    join()
    group = dist.new_group()
    all_reduce(1)
    for number in range(1, 4):
        if RANK == 1:
            gate(number)
            dist.send(torch.ones(3), 0, group=group)
        else:
            dist.recv(torch.ones(3), 1, group=group)
    gate(4)


def joining() -> None:
    """Rank 1 comes later to the process group."""
    thread.start()
    if RANK == 1:
        gate(1)
    join()
    gate(2)


def joining_too_many() -> None:
    """As many ranks as an argument says, for four seconds."""
    heartbeat_thread.REPORT_SIZE_AFTER_S = 0.5
    thread.start()
    with contextlib.suppress(dist.DistStoreError):
        dist.init_process_group("gloo", world_size=int(sys.argv[2]), rank=RANK, timeout=timedelta(seconds=4))


def holding_the_gil() -> None:
    thread.start()
    gate(1)
    ctypes.PyDLL(None).sleep(1000)


def a_class_of_its_own() -> None:
    """A process group in python: it has a sequence number only if it says so."""
    thread.start()

    class Mute(dist.ProcessGroup):
        pass

    class Loud(dist.ProcessGroup):
        def _get_sequence_number_for_group(self) -> Any:
            raise RuntimeError("do not ask")

    class Counts(dist.ProcessGroup):
        def _get_sequence_number_for_group(self) -> int:
            return 123

    for number, kind in enumerate((Mute, Loud, Counts), 1):
        dist.GroupMember.WORLD = kind(0, 1)
        gate(number)
        dist.GroupMember.WORLD = None


def exits() -> None:
    """Children that end in every way, with pulses as dense as can be and a group alive; how each ended."""
    children = []
    for number in range(int(sys.argv[2])):
        path = f"{os.environ['ELASTICD_HEARTBEAT']}-{number}"
        heartbeat.create(path)
        pid = os.fork()
        if pid == 0:
            mine = heartbeat.HeartbeatWriter(path)
            HeartbeatThread(mine, path + ".flight", period_s=0.0001).start()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            all_reduce(1 + number)
            with heartbeat.HeartbeatReader(path) as reader:
                reader.request_dump()
            if number % 3 == 1:
                dist.destroy_process_group()
            if number % 3 == 2:
                raise RuntimeError("on purpose")
            sys.exit(7)
        children.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    sys.stdout.write(json.dumps(statuses) + "\n")


globals()[sys.argv[1]]()
