"""torchrun's --rdzv-… options, with the meaning and the error sentences that `elasticd run` gives them."""

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

_OTHER_BACKENDS_KEYS = ("is_host", "store_type", "rank")
"""Scripts that start any backend pass them."""
_LAUNCH_CONFIG_TIMEOUT_S = 900
"""torch's LaunchConfig adds `timeout` with this number if the user gave none."""
_KEEP_ALIVE_INTERVAL_S = 5.0
"""torch's default of keep_alive_interval; with its 3 attempts, a lease of 15 s."""


@dataclass(frozen=True, slots=True)
class PluginOptions:
    run_id: str
    rendezvous: Rendezvous
    requirements: TorchrunRequirements
    policy: Policy


def parse_options(
    run_id: str, endpoint: str, min_nodes: int, max_nodes: int, local_addr: str | None, given: Mapping[str, Any]
) -> PluginOptions:
    """Raises UsageError."""
    conf = {key: str(value) for key, value in given.items() if key not in _OTHER_BACKENDS_KEYS}
    if "join_timeout" in conf or given.get("timeout") == _LAUNCH_CONFIG_TIMEOUT_S:
        conf.pop("timeout", None)
    if not {"lease", "renewal", "keep_alive_interval"} & conf.keys():
        conf["keep_alive_interval"] = str(_KEEP_ALIVE_INTERVAL_S)
    parsed = rendezvous.read_rendezvous(
        Namespace(
            nnodes=f"{min_nodes}:{max_nodes}",
            rdzv_backend="etcd",
            rdzv_endpoint=endpoint,
            rdzv_id=run_id,
            local_addr=conf.pop("local_addr", None) or local_addr,
            rdzv_conf=",".join(f"{key}={value}" for key, value in conf.items()),
            # Without a counterpart in torchrun:
            standalone=False,
            node_id=None,
            run=None,
            replace_timeout=None,
            hold_timeout=None,
        ),
        os.environ,
        Path.cwd(),
    )
    # The id becomes a part of keys.
    if not run_id or "/" in run_id or not run_id.isprintable() or run_id != run_id.strip():
        raise UsageError(f"--rdzv-id {run_id!r} must be printable, without '/' or spaces around it")
    known = {field.name for field in fields(Policy)}
    policy = Policy(**{name: value for name, value in parsed.policy_fields.items() if name in known})
    requirements = TorchrunRequirements(min_nodes, max_nodes, policy.last_call_timeout_s, policy.grow_debounce_s)
    return PluginOptions(run_id, parsed.rendezvous, requirements, policy)
