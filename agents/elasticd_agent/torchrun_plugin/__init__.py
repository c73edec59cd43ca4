"""elasticd's rendezvous for torchrun: `torchrun --rdzv-backend=elasticd --rdzv-endpoint=HOST:2379 …`, over etcd v3.

Entry point: `get_handler` (group `torchrun.handlers`), which torchrun loads at every start, whatever its backend; so
this file imports nothing until a handler is created. Threads: torchrun's main thread and one of member.py. It never
restarts workers: torchrun does, when the handler reports a membership change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def get_handler() -> Callable[[Any], Any]:
    """torchrun registers the result as the factory of handlers named "elasticd"."""
    return create_handler


def create_handler(params: Any) -> Any:
    """A `RendezvousHandler` for torch's `RendezvousParameters`, not connected yet. Raises UsageError."""
    from elasticd_agent.torchrun_plugin.handler import make_etcd_handler
    from elasticd_agent.torchrun_plugin.options import parse_options

    conf = parse_options(
        params.run_id, params.endpoint, params.min_nodes, params.max_nodes, params.local_addr, params.config
    )
    return make_etcd_handler(conf)
