"""torch's flight recorders: which one has the collectives of a process group, what it says of the device, and its dump.

ProcessGroupNCCL and gloo write into a recorder of their own. Of any other backend torch has an instance by the
backend's name if a FlightRecorderHook is attached to the group: torch 2.15 attaches one to every group of nccl2, the
class that it makes for "nccl"; 2.14 attaches none, and what such a group waits in is unknown. This module asks what the
script has made, and makes nothing.
"""

from __future__ import annotations

import binascii
import json
import sys
from collections.abc import Iterator
from typing import Any

from elasticd.heartbeat.collectives import sequence_number

_C10D_MODULE = "torch.distributed.distributed_c10d"
_C10D_BINDINGS_MODULE = "torch._C._distributed_c10d"
NCCL, GLOO = "nccl", "gloo"
UNKNOWN_COUNTS = (-1, -1)
"""The counts of a group of which no recorder has what is completed."""


def flight_recorder_dump() -> bytes | None:
    """A flight recorder as JSON, None before torch 2.8; with 2000 collectives 0.9 MB and 25 ms with the GIL held.

    If the process has made an NCCL group, its recorder is dumped: its collectives are what the other ranks wait for,
    even if this rank has issued none. "recorder" is its name, "gloo" what gloo's recorder has beside it, if there are
    such groups, and "unrecorded" the groups whose collectives are in neither.
    """
    try:
        groups = _recorder_table(sys.modules[_C10D_MODULE]._world)
    except Exception:  # noqa: BLE001 the script's groups may be of any class, and it must not notice the call
        groups = []
    used = {group["recorder"] for group in groups}
    newest, recorder, beside = b"", "", b""
    for name in (NCCL, *sorted(used - {"", NCCL, GLOO}), GLOO):
        if dump := _try_dump(name):
            newest, recorder = dump, name
            if b'"entries":' in newest or name in used - {GLOO} or json.loads(newest).get("comm_lib_version"):
                break
    if not newest:
        return None
    if GLOO in used and recorder != GLOO:
        beside = _try_dump(GLOO)
    dumped = (recorder, GLOO) if beside else (recorder,)
    unrecorded = [group for group in groups if not group["complete"] or group["recorder"] not in dumped]
    facts = json.dumps({"recorder": recorder, "unrecorded": unrecorded}).encode()[:-1]
    return facts + (b', "gloo": ' + beside if beside else b"") + b", " + newest.lstrip()[1:]


class GroupCountReader:
    """The counts of NCCL's groups. It remembers the names of the hooks' numbers: to read them is costly."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, int], str] = {}

    def read(self, max_groups: int) -> tuple[tuple[int, int, int], ...]:
        """(group, enqueued, completed) of the process' groups that are not gloo's, the pending and the unknown ones
        first: the numbers of their last collectives; UNKNOWN_COUNTS where no recorder has them.

        A group is a checksum of its name and ranks, which all of its ranks know. Empty where torch has no recorder of
        NCCL, or it is switched off.
        """
        reading, counts_by_group = _RecorderReading(self._names), []
        try:
            world = sys.modules[_C10D_MODULE]._world
            for group in list(world.pg_map):
                name = f"{group.group_name} {sorted(world.pg_group_ranks[group])}"
                counts = reading.counts(world, group)
                if counts is not None:
                    counts_by_group.append((binascii.crc32(name.encode()) or 1, *counts))
        except Exception:  # noqa: BLE001 as above
            return ()
        return tuple(sorted(counts_by_group, key=lambda counts: 0 <= counts[1] <= counts[2])[:max_groups])


class _RecorderReading:
    """The recorders' content at one moment; each is read at most once."""

    def __init__(self, names: dict[tuple[str, int], str]) -> None:
        self._names = names
        self._status: dict[str, dict[int, tuple[int, int]]] = {}
        self._entries: dict[tuple[str, bool], list[dict[str, Any]]] = {}

    def counts(self, world: Any, group: Any) -> tuple[int, int] | None:
        """(enqueued, completed); None for a group of gloo's, and where NCCL's recorder is switched off."""
        try:
            for backend in _backends(group):
                recorder = _recorder_of(world, group, backend)
                if recorder == NCCL:
                    return self._nccl_counts(backend.uid, sequence_number(group))
                if recorder != GLOO:
                    return (
                        self._hook_counts(recorder, group, backend)
                        if _records_completion(recorder, group, backend)
                        else UNKNOWN_COUNTS
                    )
        except Exception:  # noqa: BLE001 as above
            return UNKNOWN_COUNTS
        return None

    def _nccl_counts(self, uid: int, issued: int) -> tuple[int, int] | None:
        """`uid` is local_id_ of ProcessGroupNCCL.hpp; it has a status from the group's first collective on.

        After a send or a receive the status has the number of that one, of which ranks have different numbers. A number
        above that of the collectives that were issued is one.
        """
        try:
            status = self._last_collectives(NCCL)
        except Exception:  # noqa: BLE001 as above
            return None
        enqueued, completed = status.get(uid, (0, 0))
        if 0 <= issued < enqueued:
            return issued, issued
        return max(0, enqueued), max(0, completed)

    def _hook_counts(self, recorder: str, group: Any, backend: Any) -> tuple[int, int]:
        """A hook numbers all operations of its group from 0, point-to-point ones as well, of which ranks have different
        numbers; the backend counts its collectives.
        """
        last, issued = self._last_collectives(recorder), backend._get_sequence_number_for_group()
        if not any(enqueued > completed for enqueued, completed in last.values()):
            return issued, issued
        self._learn_names(recorder, last)
        # A group that was made anew has the name of the last one, and no number before its first operation.
        number = max((number for number in last if self._names[recorder, number] == group.group_name), default=None)
        if number is None or last[number][0] <= last[number][1]:
            return issued, issued
        enqueued, completed = last[number]
        if enqueued + 1 == issued:  # collectives only
            return issued, completed + 1
        pending = {
            entry["collective_seq_id"]
            for entry in self._read_entries(recorder, only_pending=True)
            if entry["pg_id"] == number and not entry["is_p2p"] and entry["collective_seq_id"] <= issued + 1
        }
        enqueued = max((issued, *pending))
        return enqueued, enqueued - len(pending)

    def _last_collectives(self, recorder: str) -> dict[int, tuple[int, int]]:
        """The last enqueued and completed collective by the recorder's number of a group."""
        if recorder not in self._status:
            status = json.loads(_dump(recorder, includeCollectives=False))["pg_status"]
            self._status[recorder] = {
                int(number): _enqueued_and_completed(numbers) for number, numbers in status.items()
            }
        return self._status[recorder]

    def _learn_names(self, recorder: str, last: dict[int, tuple[int, int]]) -> None:
        """Learn the groups' names from entries: only these tell which group a number stands for."""
        if all((recorder, number) in self._names for number in last):
            return
        for entry in self._read_entries(recorder, only_pending=False):
            self._names[recorder, entry["pg_id"]] = entry["process_group"][0]
        for number in last:
            self._names.setdefault((recorder, number), "")

    def _read_entries(self, recorder: str, only_pending: bool) -> list[dict[str, Any]]:
        if (recorder, only_pending) not in self._entries:
            self._entries[recorder, only_pending] = json.loads(_dump(recorder, onlyActive=only_pending)).get(
                "entries", []
            )
        return self._entries[recorder, only_pending]


def _enqueued_and_completed(status: dict[str, str]) -> tuple[int, int]:
    enqueued, completed = (int(status.get(f"last_{what}_collective", -1)) for what in ("enqueued", "completed"))
    return enqueued, completed


def _try_dump(recorder: str) -> bytes:
    """b"" where torch has no such recorder."""
    try:
        return bytes(_dump(recorder))
    except Exception:  # noqa: BLE001 as above, and torch may lack the function
        return b""


def _dump(recorder: str, **arguments: Any) -> Any:
    torch = sys.modules[_C10D_BINDINGS_MODULE]
    if recorder == NCCL:
        return torch._dump_nccl_trace_json(**arguments)
    return torch._dump_fr_trace_json(**arguments, **({} if recorder == GLOO else {"backend": recorder}))


def _backends(group: Any) -> Iterator[Any]:
    for device in group._device_types:
        backend = group._get_backend(device)
        yield getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps each


def _recorder_of(world: Any, group: Any, backend: Any) -> str:
    """The recorder that has what `backend` issues for `group`; "" for none."""
    if hasattr(backend, "uid"):
        return NCCL
    name = str(backend._get_backend_name())
    hooked = group in getattr(world, "pg_flight_recorder_hooks", ())
    return name.replace(":", "_") if name == GLOO or hooked else ""


def _records_completion(recorder: str, group: Any, backend: Any) -> bool:
    """The recorder has what is completed. To a hook the backend reports it, if that and the group can."""
    reported = all(getattr(holder, "supports_completion_hooks", False) for holder in (group, backend))
    return recorder in (NCCL, GLOO) or (recorder != "" and reported)


def _recorder_table(world: Any) -> list[dict[str, Any]]:
    """Every backend of every group, its recorder, and whether that has what is completed."""
    recorded: list[dict[str, Any]] = []
    for group in list(world.pg_map):
        for backend in _backends(group):
            recorder = _recorder_of(world, group, backend)
            entry: dict[str, Any] = {
                "process_group": [group.group_name, group.group_desc],
                "backend": str(backend._get_backend_name()),
            }
            entry |= {"recorder": recorder, "complete": _records_completion(recorder, group, backend)}
            if entry not in recorded[-1:]:  # one backend for several devices
                recorded.append(entry)
        if any(hasattr(group._get_backend(device), "wrapped_pg") for device in group._device_types):
            hidden = {"backend": GLOO, "recorder": "", "complete": True}  # which compares arguments before each call
            recorded.append({"process_group": [group.group_name, group.group_desc]} | hidden)
    return recorded
