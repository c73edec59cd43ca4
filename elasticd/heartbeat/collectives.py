"""The collectives of this process: how many were issued, how long they may take, which they were.

The counts name the rank that issued fewer than the others. This module uses only what the script has imported and
created: it never imports torch, makes no group and keeps none alive. A script may replace torch's process group by a
class of its own: one that cannot count, or raises any exception, counts as unknown. Only the default group is counted.
"""

from __future__ import annotations

import sys
from typing import Any

UNKNOWN = -1
_C10D = "torch.distributed.distributed_c10d"


def default_group() -> Any:
    """The default process group, None while there is none. Drop it soon: the last reference destroys it."""
    c10d: Any = sys.modules.get(_C10D)
    try:
        return None if c10d is None else c10d.GroupMember.WORLD
    except (AttributeError, NameError):  # it is being imported
        return None


class Collectives:
    """Counts what the default process group has issued."""

    def __init__(self) -> None:
        self._c10d: Any = None
        # The id of a group that cannot count: another attempt would cost every step an exception.
        self._uncounted = 0

    def issued(self) -> int:
        """So far; -1 while there is no group that counts. It runs once a step, so it calls no function of ours."""
        if self._c10d is None:
            self._c10d = sys.modules.get(_C10D)
            if self._c10d is None:
                return UNKNOWN
        group = None
        try:
            group = self._c10d._world.default_pg  # the value of GroupMember.WORLD
            if group is None or (self._uncounted and id(group) == self._uncounted):
                return UNKNOWN
            number = group._get_sequence_number_for_group()
        except Exception:  # noqa: BLE001 the group may be of any class, and the script must not notice the call
            number = None
        if type(number) is int and number >= 0:
            return number
        self._uncounted = id(group)
        return UNKNOWN

    def reset(self) -> None:
        """There is another group now, perhaps one that counts."""
        self._uncounted = 0


def timeout_ms(group: Any) -> int:
    """The longest timeout of the group's backends; 0 if unknown."""
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return int(max(backend.options._timeout.total_seconds() for backend in backends) * 1000)
    except Exception:  # noqa: BLE001 as above
        return 0


def flight_recorder_dump() -> bytes | None:
    """PyTorch's flight recorder as JSON, None before 2.8; with 2000 collectives 0.9 MB and 25 ms with the GIL held."""
    dump: Any = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    try:
        return None if dump is None else bytes(dump())
    except Exception:  # noqa: BLE001 as above
        return None
