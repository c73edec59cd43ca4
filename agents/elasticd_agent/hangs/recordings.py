"""Pure: one rank's flight recording -> the end of what it issued in each group, and a deviation from its usual order.

Input is the JSON of torch's recorders (versions 2.x): NCCL's, gloo's, or that of a hook for another backend; unknown
parts count as absent. Sequence numbers are per process group.

A recording is a window: a ring of the last collectives, written while the rank may continue. So a number that is
missing at the beginning says nothing, and one that is missing at the end says that the rank had not issued it when the
recording was made. Numbers of two groups are never compared, and two recordings are compared by number and by what all
ranks must agree on (`comparable_kind`), since shapes may differ between ranks where the backend allows it.

A recorder lives as long as its process, and a group that is made anew has the name of the one before: in a process that
stays for another round, or makes its groups a second time. So only the entries of the last group of a name count, and
none of a name that no group has any more.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from elasticd.bounded_json import JsonObject
from elasticd_agent.model.reports import DEFAULT_GROUP_NAME, GroupTail

Deviation = Literal["", "skipped", "other"]
"""A difference of a rank's last collectives from their usual order: none, one that was left out, another one."""
MAX_TAILS = 16
_NCCL, _GLOO = "nccl", "gloo"
_TAIL, _RECENT, _MIN_HISTORY = 8, 8, 24
"""Collectives of a tail; those that may be out of order; and how many are needed to know the usual order."""
_SAME_SIZE_OPERATIONS = re.compile(
    r"all_?reduce\w*|broadcast|reduce|_all_gather_base|all_gather_(?:into_tensor|single)\w*"
    r"|_reduce_scatter_base|reduce_scatter_(?:tensor|single)\w*"
)
"""Operations that have as many bytes on all ranks, of which the recorders keep the inputs. In an all_to_all and in
NCCL's lists each rank has its own; of a scatter only the source has any. A collective of any other name may be one
of those."""


_MAX_NUMBER = 1 << 62
_STATUS = ("enqueued", "completed")
_ELEMENT_BYTES = dict.fromkeys(("byte", "char", "bool"), 1) | dict.fromkeys(("short", "half", "bfloat16"), 2)
_ELEMENT_BYTES |= dict.fromkeys(("int", "float"), 4) | dict.fromkeys(("long", "double"), 8)
"""The bytes of an element, by c10's names."""


@dataclass(frozen=True, slots=True)
class IssuedCollective:
    """One collective as a rank issued it."""

    kind: str  #: "all_reduce of 3×4 float"
    done: bool
    backend: str


@dataclass(frozen=True, slots=True)
class Recording:
    """One rank's recorder: what it issued, by process group and number."""

    issued_by_group: Mapping[str, Mapping[int, IssuedCollective]]
    issue_order: tuple[tuple[str, str], ...] = ()  #: (group, kind) of all in the order in which they were issued

    not_by_gloo: bool = (
        False  #: true if it is by another recorder than gloo's, which does not have the same collectives
    )
    groups_in_job: frozenset[str] = frozenset()  #: the groups all of whose members are ranks of this job
    members: Mapping[str, int] = field(default_factory=dict)  #: a checksum of each group's ranks
    unrecorded_backends: Mapping[str, str] = field(default_factory=dict)
    """The backends of the groups whose collectives are in no recorder."""
    gloo_recording: Recording | None = None
    """The recording of gloo's recorder, if this is of another one: by a group of its own, or by one with both
    backends."""

    def deviation(self) -> Deviation:
        """The way in which one of the last collectives follows another that it never followed before; "" if none
        does."""
        if len(self.issue_order) < _MIN_HISTORY:
            return ""
        pairs = list(zip(self.issue_order, self.issue_order[1:], strict=False))
        usual = set(pairs[:-_RECENT])
        known = {group for pair in usual for group, _ in pair}  # in a group of its own the first one is always new
        recent = [pair for pair in pairs[-_RECENT:] if {group for group, _ in pair} <= known]
        new = next((pair for pair in recent if pair not in usual), None)
        if new is None:
            return ""
        before, after = new
        between = {second for first, second in usual if first == before}
        return "skipped" if any((kind, after) in usual for kind in between) else "other"

    def tails(self) -> tuple[GroupTail, ...]:
        """The end of what was issued in each group, those first in which the rank may wait."""
        tails = [] if self.gloo_recording is None else list(self.gloo_recording.tails())
        for group, issued in self.issued_by_group.items():
            pending = next((number for number in sorted(issued) if not issued[number].done), 0)
            last = max(issued, default=0)
            first = pending or last
            shown = [number for number in sorted(issued) if number >= first - 1][:_TAIL]
            kinds = [(number, issued[number].kind) for number in dict.fromkeys([*shown, *sorted(issued)[-_TAIL:]])]
            backend = issued[last].backend if issued else _GLOO
            own, members = group in self.groups_in_job, self.members.get(group, 0)
            tails.append(GroupTail(group, last, pending, tuple(kinds), backend, own, members=members))
        for group, backend in self.unrecorded_backends.items():
            tails.append(GroupTail(group, 0, backend=backend, in_job=group in self.groups_in_job, unrecorded=True))
        tails.sort(key=lambda tail: (not tail.pending, not tail.unrecorded and tail.in_job))
        return tuple(tails[:MAX_TAILS])


def parse(data: Mapping[str, Any]) -> Recording | None:
    """One rank's recording; None if it is none."""
    # Before the first collective there are only facts about the recorder itself.
    if not isinstance(data.get("entries", [] if "version" in data else None), list):
        return None
    groups: dict[str, dict[int, IssuedCollective]] = defaultdict(dict)
    order = []
    completed, listed = _last_completed(data), _listed_groups(data)
    for entry in _entries_of_living_groups(data, listed):
        number = _natural_number(entry.get("collective_seq_id"))
        if number is None:
            continue
        backend, _, operation = str(entry.get("profiling_name", "?")).rpartition(":")
        # gloo's state stays "scheduled", as a hook's does if the backend does not report the end. ProcessGroupNCCL's is
        # "completed", and there "retired" without it has timed out. A hook's status counts other operations, too.
        done = entry.get("state") == "completed" or (backend != _NCCL and entry.get("retired") is True)
        done = done or (backend in (_NCCL, _GLOO) and number <= completed.get(str(entry.get("pg_id")), -1))
        kind = " of ".join(filter(None, (operation[:80], _describe_sizes(entry))))
        groups[_group_name(entry)][number] = IssuedCollective(kind, done, backend)
        order.append((_group_name(entry), comparable_kind(kind, backend)))
    nccl = _is_not_by_gloo(data, groups)
    for group, (own, unused) in listed.items():
        # What a rank has never issued is known of gloo's groups only, and not from NCCL's recorder.
        if group not in groups and (not own or (unused and not nccl)):
            groups[group] = {}
    in_job = frozenset(group for group, (own, _) in listed.items() if own)
    beside, gloo = data.get("gloo"), None
    # By gloo's alone a rank would have no group of NCCL, whose messages are in no recorder.
    if isinstance(beside, dict) and nccl and groups:
        gloo = parse(beside | {"recorder": _GLOO, "gloo": None, "process_groups": data.get("process_groups")})
    return Recording(dict(groups), tuple(order), nccl, in_job, _members(data), _unrecorded_backends(data), gloo)


def _members(data: Mapping[str, Any]) -> dict[str, int]:
    listed = data.get("process_groups")
    groups = [group for group in listed if isinstance(group, dict)] if isinstance(listed, list) else []
    return {_group_name(group): _natural_number(group.get("members")) or 0 for group in groups}


def _entries_of_living_groups(data: Mapping[str, Any], listed: Mapping[str, tuple[bool, bool]]) -> list[JsonObject]:
    """The collectives of the last group of each name; none of a group that has been destroyed, or that has issued
    nothing since it was made anew."""
    entries = [entry for entry in data.get("entries", ()) if isinstance(entry, dict)]
    last = {_group_name(entry): entry.get("pg_id") for entry in entries}
    if listed and isinstance(data.get("process_groups"), list):  # all of them, by the heartbeat thread
        last = {group: number for group, number in last.items() if group in listed and not listed[group][1]}
    collectives = (entry for entry in entries if entry.get("is_p2p") is not True)
    return [one for one in collectives if (name := _group_name(one)) in last and one.get("pg_id") == last[name]]


def comparable_kind(kind: str, backend: str) -> str:
    """The part of a collective's kind that all ranks must have in common: its name, and perhaps how many bytes."""
    operation, _, sizes = kind.partition(" of ")
    if not _SAME_SIZE_OPERATIONS.fullmatch(operation) and (operation, backend) != ("all_gather", _GLOO):
        return operation
    first, _, more = sizes.partition(" and ")
    return f"{operation} of {', '.join(map(_bytes_or_elements, first.split(', ')))} {more}"


def _bytes_or_elements(size: str) -> str:
    """The bytes, or elements, of "2×2 float"; the backends compare neither shapes nor types."""
    shape, _, dtype = size.rpartition(" ")
    elements = math.prod(int(n) for n in shape.split("×") if n.isdecimal())
    return str(elements * _ELEMENT_BYTES[dtype]) if dtype in _ELEMENT_BYTES else f"{elements} {dtype}"


def _listed_groups(data: Mapping[str, Any]) -> dict[str, tuple[bool, bool]]:
    """The listed groups: whether each is of this job only, and whether it is one of gloo that was never used.

    The heartbeat thread lists all groups. NCCL's own dump has the ranks of its groups, empty for a group with members
    of another program; its default group's, too, if such a group came first.
    """
    listed, config = data.get("process_groups"), data.get("pg_config")
    if isinstance(listed, list):
        groups = [entry for entry in listed if isinstance(entry, dict)]
        return {
            _group_name(entry): (
                entry.get("in_job") is True,
                entry.get("unused") is True and _is_only_gloo(entry.get("backend")),
            )
            for entry in groups
        }
    members = {
        _group_name({"process_group": [entry.get("name"), entry.get("desc")]}): _has_ranks(entry.get("ranks"))
        for entry in (config.values() if isinstance(config, dict) else ())
        if isinstance(entry, dict)
    }
    return {group: (known, False) for group, known in members.items() if known and members.get(DEFAULT_GROUP_NAME)}


def _is_only_gloo(backend: object) -> bool:
    """True if all of them are gloo; of "cpu:gloo,cuda:nccl" the other backend's collectives are counted."""
    return all(name.endswith(_GLOO) for name in str(backend).split(","))


def _has_ranks(text: object) -> bool:
    """ "[0, 1]" """
    try:
        return bool(json.loads(str(text)))
    except ValueError:
        return False


def _is_not_by_gloo(data: Mapping[str, Any], groups: Mapping[str, Mapping[int, IssuedCollective]]) -> bool:
    """The heartbeat thread names the recorder. In a dump by torch only NCCL's, once it was used, has a version."""
    backends = {collective.backend for issued in groups.values() for collective in issued.values()} - {""}
    named = data.get("recorder")
    if backends or named:
        return bool((backends or {str(named)}) - {_GLOO})
    return bool(data.get("comm_lib_version") or data.get("nccl_version"))


def _unrecorded_backends(data: Mapping[str, Any]) -> dict[str, str]:
    listed = data.get("unrecorded")
    groups = [group for group in listed if isinstance(group, dict)] if isinstance(listed, list) else []
    return {_group_name(group): str(group.get("backend", "")) for group in groups}


def _group_name(entry: Mapping[str, Any]) -> str:
    """The group's name with its number: all tensor-parallel groups of a mesh share one description, and all others have
    "undefined"."""
    names = entry.get("process_group")
    if isinstance(names, list) and len(names) == 2:
        number, described = str(names[0]), str(names[1])
        if described == "default_pg" or number == "0":
            return DEFAULT_GROUP_NAME
        return f"group {number}" if described in ("", "undefined") else f"{described[:40]} (group {number})"
    return f"group {entry.get('pg_id', '?')}"


def _last_completed(data: Mapping[str, Any]) -> dict[str, int]:
    """The last completed collective by the number of the group; unknown where more are enqueued than are recorded:
    gloo's status counts sends and receives, too, and NCCL's has the number of the last one in a collective's place."""
    status = data.get("pg_status")
    if not isinstance(status, dict):
        return {}
    entries = (entry for entry in data.get("entries", ()) if isinstance(entry, dict))
    recorded = {str(entry.get("pg_id")): _natural_number(entry.get("collective_seq_id")) or 0 for entry in entries}
    last = {}
    for group, numbers in status.items():
        if not isinstance(numbers, dict):
            continue
        enqueued, completed = (_natural_number(numbers.get(f"last_{what}_collective")) for what in _STATUS)
        if completed is not None and (enqueued or 0) <= recorded.get(group, _MAX_NUMBER):
            last[group] = completed
    return last


def _describe_sizes(entry: Mapping[str, Any]) -> str:
    sizes = entry.get("input_sizes")
    dtypes = entry.get("input_dtypes")
    if not isinstance(sizes, list):
        return ""
    types = dtypes if isinstance(dtypes, list) else []
    shown = [
        f"{'×'.join(str(n) for n in size) if isinstance(size, list) else size} {str(kind).lower()}".strip()
        for size, kind in zip(sizes[:3], [*types, "", "", ""], strict=False)
    ]
    more = f" and {len(sizes) - 3} more" if len(sizes) > 3 else ""
    return ", ".join(shown) + more


def _natural_number(value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_NUMBER else None
