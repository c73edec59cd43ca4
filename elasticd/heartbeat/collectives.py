"""The collectives of this process: how many were issued, and how long they may take.

The counts name the rank that issued fewer than the others. This module uses only what the script has imported and
created: it never imports torch, makes no group and keeps none alive. A script may replace torch's process group by a
class of its own: one that cannot count, or raises any exception, counts as unknown. Only the default group is counted.
"""

from __future__ import annotations

import binascii
import sys
from typing import Any

UNKNOWN_COUNT = -1
_C10D_MODULE = "torch.distributed.distributed_c10d"
MAX_GROUPS_READ = 16


def default_group() -> Any:
    """The default process group, None while there is none. Drop it soon: the last reference destroys it."""
    c10d: Any = sys.modules.get(_C10D_MODULE)
    try:
        return None if c10d is None else c10d.GroupMember.WORLD
    except (AttributeError, NameError):  # it is being imported
        return None


class CollectiveCounter:
    """Counts what the default process group has issued."""

    def __init__(self) -> None:
        self._c10d: Any = None
        # The id of a group that cannot count: another attempt would cost every step an exception.
        self._uncounted = 0

    def issued(self) -> int:
        """The collectives issued so far; -1 while there is no group that counts. It runs once a step, so it calls no
        function of ours."""
        if self._c10d is None:
            self._c10d = sys.modules.get(_C10D_MODULE)
            if self._c10d is None:
                return UNKNOWN_COUNT
        group = None
        try:
            group = self._c10d._world.default_pg  # the value of GroupMember.WORLD
            if group is None or (self._uncounted and id(group) == self._uncounted):
                return UNKNOWN_COUNT
            number = group._get_sequence_number_for_group()
        except Exception:  # noqa: BLE001 the group may be of any class, and the script must not notice the call
            number = None
        if type(number) is int and number >= 0:
            return number
        self._uncounted = id(group)
        return UNKNOWN_COUNT

    def on_new_group(self) -> None:
        """There is another group now, perhaps one that counts."""
        self._uncounted = 0


def only_default_group_exists() -> bool:
    """True if the default group is the only one, so that every collective is one of all ranks."""
    try:
        return len(sys.modules[_C10D_MODULE]._world.pg_map) == 1
    except (AttributeError, KeyError, NameError):  # not imported, or it is being imported
        return False


def sequence_number(group: Any) -> int:
    """The number of what the group has issued, with gloo also of sends and receives; -1 if unknown."""
    try:
        return int(group._get_sequence_number_for_group())
    except Exception:  # noqa: BLE001 as above
        return UNKNOWN_COUNT


def group_timeout_ms(group: Any) -> int:
    """The longest timeout of the group's backends; 0 if unknown."""
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return int(max(backend.options._timeout.total_seconds() for backend in backends) * 1000)
    except Exception:  # noqa: BLE001 as above
        return 0


def longest_timeout_ms(default: Any) -> int:
    """The longest timeout of the process groups, as far as they are few; that of the default one if more is not
    known."""
    try:
        groups = list(sys.modules[_C10D_MODULE]._world.pg_map)[:MAX_GROUPS_READ]
    except Exception:  # noqa: BLE001 as above
        groups = []
    return max(map(group_timeout_ms, [default, *groups]))


def process_group_table(rank: str, world_size: str) -> list[dict[str, Any]]:
    """The groups in torch's table: "process_group", "backend", "unused", "members", a checksum of its ranks, and
    "in_job": whether all of its members are ranks of this job. The recorder knows only those that were used.

    Groups of different ranks may have one name: those of a mesh do in older versions of torch, where NCCL
    splits a communicator.

    A script may make a group with another program, an inference engine for instance, over a store of its own, or be
    called by RPC. The default group is the job's if it has this rank and size, which the agent gave.
    """
    try:
        world = sys.modules[_C10D_MODULE]._world
        default = world.default_pg
        rpc = sys.modules.get("torch.distributed.rpc.api")
        called = rpc is not None and rpc._is_current_rpc_agent_set()
        closed = not called and (str(default.rank()), str(default.size())) == (rank, world_size)
        store = base_store(world.pg_map[default][1])
        return [
            {
                "process_group": [group.group_name, group.group_desc],
                "backend": str(backend),
                "unused": group._get_sequence_number_for_group() == 0,
                "members": binascii.crc32(str(sorted(world.pg_group_ranks.get(group, ()))).encode()),
                "in_job": closed and store is not None and base_store(own) is store,
            }
            for group, (backend, own) in list(world.pg_map.items())
        ]
    except Exception:  # noqa: BLE001 as above
        return []


def base_store(store: Any) -> Any:
    """The one that all stores with a prefix share."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
