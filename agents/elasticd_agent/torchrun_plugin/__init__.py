"""The torchrun plug-in: `torchrun --rdzv-backend=elasticd --rdzv-endpoint=HOST:2379 …` meets over etcd v3.

It exists so that a job that stays with torchrun gets a rendezvous that notices a lost node and never hands a new group
a dead group's addresses. torchrun loads `get_handler` (entry point group `torchrun.handlers`) whenever it starts,
whatever backend was asked for, so this file imports nothing until a handler is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def get_handler() -> Callable[[Any], Any]:
    """The entry point: torchrun registers what this returns as the maker of handlers named "elasticd"."""
    return create


def create(params: Any) -> Any:
    """A `RendezvousHandler` for torch's `RendezvousParameters`. Raises UsageError; talks to nobody yet."""
    from elasticd_agent.torchrun_plugin.handler import make_etcd_handler
    from elasticd_agent.torchrun_plugin.options import parse_options

    conf = parse_options(
        params.run_id, params.endpoint, params.min_nodes, params.max_nodes, params.local_addr, params.config
    )
    return make_etcd_handler(conf)
