"""What torch knows of the collectives of this process: how many were issued, how long they may take, which they were.

It exists so that the rank that issued fewer than the others can be named. It looks only at what the script has
imported and made, so it never imports torch, makes no group and keeps none alive. A script may put a class of its own
in place of torch's process group: one that cannot count, or raises whatever it likes, counts as unknown. Of groups
other than the default one nothing is known here. Like record.py it is also loaded by file.
"""

from __future__ import annotations

import sys
from typing import Any

UNKNOWN = -1
_C10D = "torch.distributed.distributed_c10d"


def default_group() -> Any:
    """The default process group, None while there is none. Let go of it soon: who drops it last destroys it."""
    c10d: Any = sys.modules.get(_C10D)
    try:
        return None if c10d is None else c10d.GroupMember.WORLD
    except (AttributeError, NameError):  # it is being imported
        return None


class Collectives:
    """Counts what the default process group has issued."""

    def __init__(self) -> None:
        self._c10d: Any = None
        self._deaf = 0  # the id of a group that cannot count: asking it again would cost every step an exception

    def issued(self) -> int:
        """So far; -1 while there is no group, or none that counts. Asked once a step: hence no calls of our own."""
        if self._c10d is None:
            self._c10d = sys.modules.get(_C10D)
            if self._c10d is None:
                return UNKNOWN
        group = None
        try:
            group = self._c10d._world.default_pg  # what GroupMember.WORLD answers with
            if group is None or (self._deaf and id(group) == self._deaf):
                return UNKNOWN
            number = group._get_sequence_number_for_group()
        except Exception:  # noqa: BLE001 the group may be of any class, and the script must not notice that we asked
            number = None
        if type(number) is int and number >= 0:
            return number
        self._deaf = id(group)
        return UNKNOWN

    def reset(self) -> None:
        """There is another group now, perhaps one that counts."""
        self._deaf = 0


def timeout_ms(group: Any) -> int:
    """The longest that a collective of `group` may take, by its backends' own timeouts; 0 if they do not say."""
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return int(max(backend.options._timeout.total_seconds() for backend in backends) * 1000)
    except Exception:  # noqa: BLE001 as above
        return 0


def flight_recorder_dump() -> bytes | None:
    """What PyTorch's flight recorder holds, as its JSON; None where this torch has none (before 2.8).

    For gloo. With the last 2000 collectives, as many as it keeps unless TORCH_FR_BUFFER_SIZE says otherwise, it is
    0.9 MB and takes 25 ms with the GIL held.
    """
    dump: Any = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    try:
        return None if dump is None else bytes(dump())
    except Exception:  # noqa: BLE001 as above
        return None
