"""What torchrun's --rdzv-… options say, read as `elasticd run` reads them.

It exists because torchrun hands them over parsed: a key means here what it means there, and a misspelled one is
refused with the same sentence. It never looks at the network.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from elasticd.errors import UsageError
from elasticd_agent.config import rendezvous_options as rendezvous
from elasticd_agent.model.job import Policy, Rendezvous
from elasticd_agent.torchrun_plugin.plan import TorchrunRequirements

_NOT_OURS = ("is_host", "store_type", "rank")
"""torchrun's own for other backends; scripts that start any backend pass them along."""
_LAUNCHERS_TIMEOUT_S = 900
"""torch's LaunchConfig adds `timeout` with this number, as an int, where the user gave none."""


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """All times are seconds."""

    run_id: str
    rendezvous: Rendezvous
    requirements: TorchrunRequirements
    lease_s: float
    renewal_s: float
    store_timeout_s: float
    join_timeout_s: float


def parse_options(
    run_id: str, endpoint: str, min_nodes: int, max_nodes: int, local_addr: str | None, given: Mapping[str, Any]
) -> PluginOptions:
    """Raises UsageError."""
    conf = {key: str(value) for key, value in given.items() if key not in _NOT_OURS}
    if "join_timeout" in conf or given.get("timeout") == _LAUNCHERS_TIMEOUT_S:
        conf.pop("timeout", None)
    meeting = rendezvous.read_rendezvous(
        Namespace(
            nnodes=f"{min_nodes}:{max_nodes}",
            rdzv_backend="etcd",
            rdzv_endpoint=endpoint,
            rdzv_id=run_id,
            local_addr=conf.pop("local_addr", None) or local_addr,
            rdzv_conf=",".join(f"{key}={value}" for key, value in conf.items()),
            # What torchrun does not have:
            standalone=False,
            node_id=None,
            run=None,
            replace_timeout=None,
            hold_timeout=None,
        ),
        os.environ,
        Path.cwd(),
    )
    _check_id(run_id)
    known = {field.name for field in fields(Policy)}
    numbers = Policy(**{name: value for name, value in meeting.policy_fields.items() if name in known})
    return PluginOptions(
        run_id=run_id,
        rendezvous=meeting.rendezvous,
        requirements=TorchrunRequirements(min_nodes, max_nodes, numbers.last_call_s, numbers.grow_debounce_s),
        lease_s=numbers.lease_s,
        renewal_s=numbers.renewal_s,
        store_timeout_s=numbers.store_timeout_s,
        join_timeout_s=numbers.join_timeout_s,
    )


def _check_id(run_id: str) -> None:
    # It becomes a part of keys.
    if not run_id or "/" in run_id or not run_id.isprintable() or run_id != run_id.strip():
        raise UsageError(f"--rdzv-id {run_id!r} must be printable, without '/' or spaces around it")
