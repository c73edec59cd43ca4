"""torch's process groups and flight recorders as the heartbeat thread finds them: of NCCL, gloo, and of hooks.

As torch 2.13, 2.14 and 2.15 write them: NCCL's recorder by the backend's `uid`, with the numbers of collectives; a
hook's by a number that only entries explain, with the numbers of all operations, from 0.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import pytest

Kind = Literal["nccl", "nccl2", "nccl2 of 2.14", "gloo", "wrapped"]
"""The backend of "nccl" by default up to 2.14 (`nccl-legacy` later), from 2.15 on, and in 2.14 if the variable asks for
it; that of the CPU; NCCL with TORCH_DISTRIBUTED_DEBUG=DETAIL.
"""

C10D = "torch._C._distributed_c10d"
"""torch's extension module that has the functions of recorders."""


@dataclass(frozen=True)
class Operation:
    number: int
    collective: int
    p2p: bool


@dataclass(eq=False)
class FakeGroup:
    name: str
    ranks: tuple[int, ...]
    kind: Kind
    uid: int
    """Of NCCL's backend, or the number of the hook."""
    reports_completion: bool = True
    operations: list[Operation] = field(default_factory=list)
    done: int = 0
    """So many of them, the first ones."""
    collectives: int = 0
    _device_types: tuple[str, ...] = ("cuda",)
    gloo: FakeGroup | None = None
    """What `cpu:gloo,cuda:nccl` issues through gloo, under numbers of its own."""

    @property
    def group_name(self) -> str:
        return self.name

    @property
    def group_desc(self) -> str:
        return "default_pg" if self.name == "0" else "undefined"

    @property
    def supports_completion_hooks(self) -> bool:
        return self.kind == "nccl2" and self.reports_completion

    @property
    def recorder(self) -> str:
        return {"nccl": "nccl", "wrapped": "nccl", "gloo": "gloo", "nccl2": "nccl2"}.get(self.kind, "")

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return len(self.ranks)

    def _get_sequence_number_for_group(self) -> int:
        return self.collectives

    def _get_backend(self, device: str) -> Any:
        if device == "cpu":
            return SimpleNamespace(_get_backend_name=lambda: "gloo")
        name = self.kind.partition(" ")[0] if self.kind != "wrapped" else "nccl"
        own = {"uid": self.uid} if name == "nccl" else {}
        backend = SimpleNamespace(
            _get_backend_name=lambda: name,
            _get_sequence_number_for_group=lambda: self.collectives,
            supports_completion_hooks=self.kind == "nccl2",
            **own,
        )
        return SimpleNamespace(wrapped_pg=backend) if self.kind == "wrapped" else backend

    def issue(self, count: int = 1, *, p2p: bool = False, recorded: bool = True) -> None:
        """`recorded` False: while a graph is captured, when only the backend counts."""
        for _ in range(count):
            self.collectives += not p2p
            number = self.operations[-1].number + 1 if self.operations else 0
            if recorded:
                at = self.operations[-1].collective + (not p2p) if self.operations else int(not p2p)
                self.operations.append(Operation(number, at, p2p))

    def complete(self, count: int = 1) -> None:
        self.done += count

    def at(self, enqueued: int, completed: int) -> FakeGroup:
        """Issue and complete collectives until these are the counts."""
        self.issue(enqueued - self.collectives)
        self.complete(completed - self.done)
        return self

    @property
    def status(self) -> dict[str, str]:
        last, completed = (self._number_in_status(some) for some in (len(self.operations), self.done))
        each = {"last_enqueued_collective": last, "last_started_collective": -1, "last_completed_collective": completed}
        return {name: str(value) for name, value in each.items()}

    def _number_in_status(self, operations: int) -> int:
        """Of the last one of so many. ProcessGroupNCCL counts messages and collectives apart, and shows either."""
        if not operations:
            return -1
        last = self.operations[operations - 1]
        if self.kind == "nccl2":
            return last.number
        return sum(one.p2p for one in self.operations[:operations]) if last.p2p else last.collective

    def entries(self, only_active: bool) -> list[dict[str, Any]]:
        prefix = self.recorder or "none"
        return [
            {
                "collective_seq_id": one.collective,
                "is_p2p": one.p2p,
                "op_id": one.number,
                "pg_id": self.uid,
                "process_group": [self.group_name, self.group_desc],
                "profiling_name": f"{prefix}:{'send 0->1' if one.p2p else 'all_reduce'}",
                "input_sizes": [[4]],
                "input_dtypes": ["Float"],
                "retired": at < self.done or not self.reports_completion,
                "state": "completed" if at < self.done and self.kind != "gloo" else "scheduled",
            }
            for at, one in enumerate(self.operations)
            if not (only_active and at < self.done)
        ]


class FakeTorch:
    """Its table of groups and its recorders; `install` makes them what the heartbeat's modules find."""

    def __init__(self, capacity: int = 2000) -> None:
        self.capacity = capacity
        self.made: list[FakeGroup] = []
        self.store = object()
        self.world = SimpleNamespace(pg_map={}, pg_group_ranks={}, pg_flight_recorder_hooks={}, default_pg=None)
        self.calls: list[tuple[str, bool]] = []

    def group(self, name: str, ranks: tuple[int, ...], kind: Kind, **more: Any) -> FakeGroup:
        found = FakeGroup(name, ranks, kind, len(self.made), **more)
        self.made.append(found)
        backend = "gloo" if kind == "gloo" else "nccl"
        if "cpu" in found._device_types:
            found.gloo = FakeGroup(name, ranks, "gloo", len(self.made))
            self.made.append(found.gloo)
            backend = f"cpu:gloo,cuda:{backend}"
        self.world.pg_map[found] = (backend, self.store)
        self.world.default_pg = self.world.default_pg or found
        self.world.pg_group_ranks[found] = dict.fromkeys(ranks)
        if kind == "nccl2":
            self.world.pg_flight_recorder_hooks[found] = None
        return found

    def destroy(self) -> None:
        """All groups. What was recorded stays."""
        for table in (self.world.pg_map, self.world.pg_group_ranks, self.world.pg_flight_recorder_hooks):
            table.clear()

    def dump(self, recorder: str, entries: bool, only_active: bool) -> bytes:
        self.calls.append((recorder, entries))
        groups = [one for one in self.made if one.recorder == recorder]
        config = {one.name: {"name": one.name, "desc": one.group_desc, "ranks": str(list(one.ranks))} for one in groups}
        found: dict[str, Any] = {
            "version": "2.10",
            "comm_lib_version": "2.29.7" if recorder == "nccl" and groups else "",
            "pg_config": config,
            "pg_status": {str(one.uid): one.status for one in groups if one.operations},
        }
        if entries and (listed := deque((one for each in groups for one in each.entries(only_active)), self.capacity)):
            found["entries"] = list(listed)
        return json.dumps(found).encode()

    def install(self, monkeypatch: pytest.MonkeyPatch, *, records_gloo: bool = True) -> FakeTorch:
        def nccl(includeCollectives: bool = True, onlyActive: bool = False) -> bytes:  # noqa: N803 torch's names
            return self.dump("nccl", includeCollectives, onlyActive)

        def others(
            includeCollectives: bool = True,  # noqa: N803
            onlyActive: bool = False,  # noqa: N803
            backend: str = "",
        ) -> bytes:
            assert backend or records_gloo
            return self.dump(backend or "gloo", includeCollectives, onlyActive)

        functions = SimpleNamespace(_dump_nccl_trace_json=nccl, _dump_fr_trace_json=others)
        monkeypatch.setitem(sys.modules, C10D, functions)
        monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", SimpleNamespace(_world=self.world))
        return self
