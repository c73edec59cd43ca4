"""Pure: the answer of NCCL's RAS, as JSON or as text, -> how far each rank is behind in each of its communicators.

A thread of NCCL in each process answers, also while the GIL is held and without torch's recorder, for all processes of
the job at once. It knows what was launched, not what is completed. JSON (2.28.7 and newer) has all counts. The text
(2.24 and newer) names ranks only where counts differ, those in the minority. Ranks that did not answer are in neither.
Unknown parts count as absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elasticd_agent.model.reports import LaunchCount

COUNTED_OPERATIONS = ("AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter")
"""All ranks of a communicator launch them equally often. Others are made of messages between two ranks."""
_ANY_OPERATION = "collective"
"""NCCL 2.24 and 2.25 give one count for all."""
_MAX_COUNT = 1 << 62
_COMMUNICATOR_LINE = re.compile(r"#\d+-\d+ \(([0-9a-f]{1,16})\)")
_DIFFERENCE_LINE = re.compile(r"  Communicator ranks have different (\w+) (?:operation )?")
_COUNT_LINE = re.compile(r"  \d+ ranks have (?:launched up to operation (\d{1,18})|not launched any operations)$")
_RANK_COUNT_LINE = re.compile(
    r"  Rank \d+ has (?:launched up to operation (\d{1,18})|not launched any operations)"
    r" -- GPU .{1,60} managed by process (\d{1,10}) on node (\S+)$"
)
_RANK_LINE = re.compile(r"  Rank \d+ -- GPU .{1,60} managed by process (\d{1,10}) on node (\S+)$")


@dataclass(frozen=True, slots=True)
class ProcessLaunchCount:
    """A process of a communicator, and what it has launched there."""

    host: str  #: the address of its node
    pid: int
    count: LaunchCount


def parse_differences(answer: bytes) -> list[ProcessLaunchCount]:
    """Find the operations of which ranks of a communicator have launched different numbers."""
    text = answer.decode("utf-8", "replace")
    start = text.find("{\n")
    if start >= 0 and "\n#" not in text[:start]:
        try:
            data = json.loads(text[start:])
        except (ValueError, RecursionError):
            return []
        return list(_parse_json(data)) if isinstance(data, dict) else []
    return list(_parse_text(text))


def _parse_json(data: Mapping[str, Any]) -> Iterator[ProcessLaunchCount]:
    for communicator in _objects(data.get("communicators")):
        # The hash alone is not unique.
        name = f"{communicator.get('hash')}:{communicator.get('secondary_hash')}"[:80].removeprefix("0x")
        ranks = [rank for rank in _objects(communicator.get("ranks")) if _is_initialized(rank)]
        for operation in COUNTED_OPERATIONS:
            counted = [(rank, count) for rank in ranks if (count := _count(rank, operation)) is not None]
            most = max((count for _, count in counted), default=0)
            if all(count == most for _, count in counted):
                continue
            for rank, count in counted:
                host, pid = rank.get("host"), rank.get("pid")
                if isinstance(host, str) and isinstance(pid, int) and pid > 0:
                    yield ProcessLaunchCount(host, pid, LaunchCount(name, operation, count, most))


def _objects(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _is_initialized(rank: Mapping[str, Any]) -> bool:
    """It is neither being made nor torn down: others may be ahead with that."""
    status = rank.get("status")
    if not isinstance(status, dict) or status.get("init_state") != 0:
        return False
    return not any(status.get(name) for name in ("finalize_called", "destroy_flag", "abort_flag"))


def _count(rank: Mapping[str, Any], operation: str) -> int | None:
    counts = rank.get("collective_counts")
    count = counts.get(operation) if isinstance(counts, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < _MAX_COUNT else None


def _parse_text(text: str) -> Iterator[ProcessLaunchCount]:
    """Read the sections of communicators, and in each those of operations, which have the most frequent count first."""
    name = operation = ""
    found: list[tuple[str, int, int]] = []  # (host, pid, count)
    most = count = 0
    for line in [*text.splitlines(), "#"]:
        section, different = _COMMUNICATOR_LINE.match(line), _DIFFERENCE_LINE.match(line)
        if section or different or line.startswith("#"):
            yield from (
                ProcessLaunchCount(host, pid, LaunchCount(name, operation, of, most)) for host, pid, of in found
            )
            found, most, operation = [], 0, ""
        if section:
            name = section[1]
        elif different and name and different[1] in (*COUNTED_OPERATIONS, _ANY_OPERATION):
            operation = different[1]
        elif operation and (together := _COUNT_LINE.match(line)):
            count = int(together[1] or 0)
            most = max(most, count)
        elif operation and (alone := _RANK_COUNT_LINE.match(line)):
            most = max(most, int(alone[1] or 0))
            found.append((alone[3], int(alone[2]), int(alone[1] or 0)))
        elif operation and (one := _RANK_LINE.match(line)):
            found.append((one[2], int(one[1]), count))
