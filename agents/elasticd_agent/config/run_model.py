"""One run of a job as a typed value, and the rules that its three front ends share.

Flags (run_options), job files (job_file) and agent.toml's [store] (store_options) all end in these values. Each front
end names in its errors what the person wrote; the checks are those of the values themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from elasticd.errors import UsageError
from elasticd_agent.model.job import JobSpec, Policy, RunnerSettings, option_name

POLICY_FIELDS: Mapping[str, str] = {option_name(field.name): field.name for field in fields(Policy)}
"""The field of Policy by option, which flags and keys spell with underscores."""


class RunModel(NamedTuple):
    """The job to run, its rules, and the settings of the agent's output."""

    spec: JobSpec
    policy: Policy
    settings: RunnerSettings


def job_id_prefix(entrypoint: str, module: bool) -> str:
    """The beginning of the id of a job that has none: train-lm for train_lm.py and for the module pkg.train_lm."""
    last = entrypoint.rpartition(".")[2] if module else Path(entrypoint).stem
    return re.sub(r"[^a-z0-9]+", "-", last.lower())[:40].strip("-") or "job"


def policy_with(given: Mapping[str, Any]) -> Policy:
    """The policy with these fields. A time that follows from another is shortened with it, so that one key is enough.

    The defaults' own proportions are kept, so that Policy's rules hold where only one of the times is given. Raises
    UsageError.
    """
    usual, numbers = Policy(), dict(given)
    lease = numbers.setdefault("lease_s", usual.lease_s)
    seen = numbers.setdefault("seen_timeout_s", usual.seen_timeout_s)
    renewal = numbers.setdefault("renewal_s", lease * usual.renewal_s / usual.lease_s)
    store = [usual.store_timeout_s, lease * usual.store_timeout_s / usual.lease_s, seen * usual.store_timeout_s]
    if lease > renewal:
        store.append((lease - renewal) * usual.store_timeout_s / (usual.lease_s - usual.renewal_s))
    numbers.setdefault("store_timeout_s", min(store))
    join = numbers.setdefault("join_timeout_s", usual.join_timeout_s)
    numbers.setdefault("last_call_timeout_s", min(usual.last_call_timeout_s, join / 2))
    return Policy(**numbers)


def preloaded_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once. Raises UsageError: `preload NAME …`."""
    modules = tuple(dict.fromkeys(name.strip() for name in names))
    for name in modules:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"preload {name!r} is not a module's name as in pkg.module")
    return modules
