"""PyTorch's flight recorder, several ranks' -> which collective, of what size, and who has not issued it.

It exists because a rank's recorder alone says little: the rank to blame is the one whose list is shorter than the
others', or differs. It reads the JSON that torch's NCCL and gloo recorders give (versions 2.x) and takes what it does
not know for absent. Sequence numbers are per process group; the clock of an entry is its own rank's. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_GROUPS = 16
_DEFAULT = "default group"


@dataclass(frozen=True, slots=True)
class IssuedCollective:
    """One collective as a rank issued it."""

    number: int
    operation: str
    sizes: str
    done: bool

    def __str__(self) -> str:
        return f"#{self.number} {self.operation}{' of ' + self.sizes if self.sizes else ''}"


@dataclass(frozen=True, slots=True)
class Recording:
    """One rank's recorder: what it issued, by process group and number."""

    entries: int
    groups: Mapping[str, Mapping[int, IssuedCollective]]


@dataclass(frozen=True, slots=True)
class GroupComparison:
    """One process group, all ranks that have a recording.

    `last` is by rank the last collective it issued (None: none); `pending` the first one that was not finished.
    `waiting_for` is the first one that some rank issued and another did not, and `lacking` are those others, as far as
    they wait in nothing themselves. `differing` has, for the first number at which ranks issued different things, the
    ranks by what they issued.
    """

    group: str
    last: Mapping[int, IssuedCollective | None]
    waiting_for: IssuedCollective | None = None
    missing: tuple[int, ...] = ()
    differing: Mapping[str, tuple[int, ...]] | None = None
    pending: Mapping[int, IssuedCollective] | None = None


def parse(data: Mapping[str, Any]) -> Recording | None:
    """One rank's recording; None if it is none."""
    # Before the first collective there is only what is said of the recorder itself.
    entries = data.get("entries", [] if "version" in data else None)
    if not isinstance(entries, list):
        return None
    groups: dict[str, dict[int, IssuedCollective]] = defaultdict(dict)
    completed = _completed(data)
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("is_p2p") is True:
            continue
        number = _whole(entry.get("collective_seq_id"))
        if number is None:
            continue
        backend, _, operation = str(entry.get("profiling_name", "?")).rpartition(":")
        # gloo's state stays "scheduled"; NCCL's is "completed", and there "retired" without it has timed out.
        done = entry.get("state") == "completed" or (backend == "gloo" and entry.get("retired") is True)
        done = done or number <= completed.get(str(entry.get("pg_id")), -1)
        groups[_group(entry)][number] = IssuedCollective(number, operation[:80], _sizes(entry), done)
    return Recording(len(entries), dict(groups))


def compare(recorded: Mapping[int, Recording]) -> list[GroupComparison]:
    """What the ranks' recordings say together, the group that something is wrong with first."""
    names = sorted({name for one in recorded.values() for name in one.groups})
    found = [_compare(name, {rank: one.groups.get(name, {}) for rank, one in recorded.items()}) for name in names]
    return sorted(found, key=lambda one: (one.differing is None and not one.missing, not one.pending))[:MOST_GROUPS]


def _compare(name: str, ranks: Mapping[int, Mapping[int, IssuedCollective]]) -> GroupComparison:
    # A subgroup's recordings are on its own ranks only; the default group has everyone, and who lacks it is behind.
    members = {rank: issued for rank, issued in ranks.items() if issued or name == _DEFAULT}
    last = {rank: issued[max(issued)] if issued else None for rank, issued in members.items()}
    reached = {rank: one.number if one is not None else 0 for rank, one in last.items()}
    least, most = min(reached.values(), default=0), max(reached.values(), default=0)
    pending = {
        rank: first
        for rank, issued in members.items()
        if (first := next((issued[n] for n in sorted(issued) if not issued[n].done), None)) is not None
    }
    lacking = tuple(rank for rank in sorted(reached) if reached[rank] == least < most and rank not in pending)
    issued_it = next((issued[least + 1] for issued in members.values() if least + 1 in issued), None)
    return GroupComparison(name, last, issued_it if lacking else None, lacking, _differing(members), pending)


def _differing(members: Mapping[int, Mapping[int, IssuedCollective]]) -> dict[str, tuple[int, ...]] | None:
    for number in sorted({number for issued in members.values() for number in issued}):
        said: dict[str, list[int]] = defaultdict(list)
        for rank, issued in sorted(members.items()):
            if number in issued:
                said[_kind(issued[number])].append(rank)
        if len(said) > 1:
            common = Counter({what: len(who) for what, who in said.items()}).most_common()
            return {f"#{number} {what}": tuple(said[what]) for what, _ in common}
    return None


def _kind(issued: IssuedCollective) -> str:
    return f"{issued.operation}{' of ' + issued.sizes if issued.sizes else ''}"


def _group(entry: Mapping[str, Any]) -> str:
    """All tensor-parallel groups of a mesh have one description, and all others "undefined": the number is the name."""
    names = entry.get("process_group")
    if isinstance(names, list) and len(names) == 2:
        number, described = str(names[0]), str(names[1])
        if described == "default_pg" or number == "0":
            return _DEFAULT
        return f"group {number}" if described in ("", "undefined") else f"{described[:40]} (group {number})"
    return f"group {entry.get('pg_id', '?')}"


def _completed(data: Mapping[str, Any]) -> dict[str, int]:
    status = data.get("pg_status")
    if not isinstance(status, dict):
        return {}
    each = {name: one.get("last_completed_collective") for name, one in status.items() if isinstance(one, dict)}
    return {name: number for name, one in each.items() if (number := _whole(one)) is not None}


def _sizes(entry: Mapping[str, Any]) -> str:
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


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and value.lstrip("-").isdecimal() and len(value) < 20 else None
