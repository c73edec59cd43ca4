"""The spec that all nodes of one job must agree on: its document, a difference in words, and the agreement itself.

A node started as part of another job, or with other rules, is refused with the field that differs. As under torchrun,
roles and arguments are each node's own; nodes of one role run one script. A machine's own settings are left out: its
slots, its interpreter's and its script's directory, its output, its name and its addresses.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from elasticd import bounded_json
from elasticd.errors import StoreRefused
from elasticd_agent.model.codec import VERSION
from elasticd_agent.model.job import TERMINATED_EXIT_CODE, EntrypointMode, JobSpec, Policy, option_name
from elasticd_agent.model.keys import Keys, decode_record, encode_record
from elasticd_agent.model.records import Round, is_later_run
from elasticd_agent.store import Store

_ABANDONED_RUN_REASON = "a later run of this job has begun and no node of this run is left"
_REPLACED_JOB_REASON = "another command has begun under this job's id"

_FIELD_LABELS = {
    "entrypoint": "the script",
    "args": "the script's arguments",
    "mode": "how the script is started",
    "run": "--run",
    "min_nodes": "--nnodes MIN",
    "max_nodes": "--nnodes MAX",
    "spares": "--spares",
    "checkpoints": "--checkpoint-dir",
    "max_restarts": "--max-restarts",
    "max_restarts_per_hour": "--max-restarts-per-hour",
    "grow": "--grow",
    "on_hang": "--on-hang",
}
_SHARED_POLICY_FIELDS = (
    "max_restarts",
    "max_restarts_per_hour",
    "grow",
    "grow_debounce_s",
    "lease_s",
    "seen_timeout_s",
    "last_call_timeout_s",
    "join_timeout_s",
    "replace_timeout_s",
    "adopt_timeout_s",
    "node_cooloff_s",
    "on_hang",
    "hang_floor_s",
    "hang_factor",
    "stopped_after_s",
    "evidence_timeout_s",
    "slow_ceiling_s",
    "slow_factor",
    "startup_ceiling_s",
    "first_step_ceiling_s",
    "progress_ceiling_s",
)
"""The fields of Policy that the planner uses: any node may lead, and the rules must not change with the leader."""
_PER_ROLE_FIELDS = ("entrypoint", "mode")
_PER_NODE_FIELDS = ("version", "role", "args")
_MAX_VALUE_CHARS = 100
"""A sentence must stay one line."""


def spec_document(spec: JobSpec, policy: Policy) -> dict[str, Any]:
    """A node's spec as plain JSON values; the job's first node writes it to the store."""
    module = spec.mode is EntrypointMode.MODULE
    return {
        "version": VERSION,
        "entrypoint": spec.entrypoint if module else PurePath(spec.entrypoint).name,
        "args": list(spec.args),
        "mode": spec.mode.value,
        "role": spec.role,
        "min_nodes": spec.rendezvous.min_nodes,
        "max_nodes": spec.rendezvous.max_nodes,
        "spares": spec.spares if spec.rendezvous.max_nodes > 1 else 0,  # slots are a machine's own
        "run": spec.run,
        "checkpoints": spec.checkpoint_dir is not None,
        **{name: getattr(policy, name) for name in _SHARED_POLICY_FIELDS},
    }


def mismatch(mine: bytes, theirs: bytes, log: Callable[[str], None]) -> str | None:
    """Why a node with spec `mine` cannot take part in the job of spec `theirs`; None if it can.

    Arguments that differ within one role are logged: allowed, and sometimes a mistake.
    """
    try:
        ours, other = bounded_json.loads(mine), bounded_json.loads(theirs)
        version = str(other.get("version", VERSION))
        if version.partition(".")[0] != VERSION.partition(".")[0]:
            return f"its first node speaks version {version}, this one {VERSION}; run the same major version everywhere"
        why = differences(ours, other)
        if not why and ours["role"] == other.get("role") and ours["args"] != other.get("args", ours["args"]):
            log(f"allowed, but of one role: {_difference('args', ours['args'], other['args'])}, the job's first node")
        return why or None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return "the spec written by its first node cannot be decoded"


def _run_of(document: bytes) -> str:
    """The run of a node's spec; "" if it cannot be decoded."""
    try:
        return str(bounded_json.loads(document).get("run"))
    except (ValueError, AttributeError, RecursionError):
        return ""


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """One phrase naming every field in which two documents must not differ and do; or "".

    "the script is 'a.py' here, 'b.py' there". A field that only one of them has is another
    version's, and no difference.
    """
    own = (
        _PER_NODE_FIELDS
        if mine.get("role") == theirs.get("role", mine.get("role"))
        else (*_PER_NODE_FIELDS, *_PER_ROLE_FIELDS)
    )
    names = [name for name in mine if name in theirs and name not in own]
    return "; ".join(_difference(name, mine[name], theirs[name]) for name in names if mine[name] != theirs[name])


def _difference(name: str, mine: Any, theirs: Any) -> str:
    texts = [shlex.join(map(str, value)) if isinstance(value, list) else value for value in (mine, theirs)]
    if all(isinstance(text, str) for text in texts):
        # Long values are shown where they begin to differ.
        parted = next((at for at, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
        texts = [repr(_shorten_around(text, parted)) for text in texts]
    shown = [_VALUE_TEXTS.get(text, text) if text is None or isinstance(text, bool) else text for text in texts]
    label = _FIELD_LABELS.get(name, option_name(name))
    return f"{label} {'are' if name == 'args' else 'is'} {shown[0]} here, {shown[1]} there"


_VALUE_TEXTS = {True: "given", False: "not given", None: "not given"}


def _shorten_around(text: str, at: int) -> str:
    if len(text) <= _MAX_VALUE_CHARS:
        return text
    begin = max(0, at - _MAX_VALUE_CHARS // 2)
    end = begin + _MAX_VALUE_CHARS
    return ("…" if begin else "") + text[begin:end] + ("…" if end < len(text) else "")


# ---- the agreement


def stopped_round(round: Round, why: str) -> Round:
    """The same Round as a terminal one."""
    return replace(
        round, members=(), last_checkpoint=None, cause="", reason=why, outcome="stopped", exit_code=TERMINATED_EXIT_CODE
    )


@dataclass
class SpecAgreement:
    """The first agent of a job writes the job's spec to the store; every other one compares its own with it.

    An earlier run whose nodes are all gone may have no recorded end: all of its nodes were killed, or each of them left
    it to another one. Then a later run records it. The wait for an earlier run's nodes is bounded.
    """

    _store: Store
    _keys: Keys
    _spec: bytes
    _timeout_s: float
    _log: Callable[[str], None]
    _deadline: float | None = None
    agreed: bool = False

    def __post_init__(self) -> None:
        self._accepted = self._spec

    def try_to_agree(self, now: float) -> bool:
        """Write or compare the spec; True once this node's is the job's. Raises StoreRefused for another job, and
        StoreUnavailable."""
        if self.agreed:
            return True
        why = self._write_or_compare()
        if not why:
            self.agreed = True
        elif self._deadline is None:
            self._deadline = now + self._timeout_s
            self._log(f"{why}; waiting for them")
        elif now >= self._deadline:
            raise StoreRefused(f"{why}, for {self._timeout_s:g} s (join_timeout)")
        return self.agreed

    def invalidate(self) -> None:
        """The store may have come back empty, and another job may have written its spec first."""
        self.agreed = False

    def restore_spec(self) -> None:
        """Write the spec of the Round that runs into a store that has lost it. Raises StoreUnavailable."""
        stored = self._store.read(self._keys.spec)
        if stored is None or (stored.value != self._spec and mismatch(self._spec, stored.value, self._log) is not None):
            self._store.compare_and_swap(self._keys.spec, None if stored is None else stored.version, self._spec)

    def _write_or_compare(self) -> str:
        """Write or compare the spec; the nodes of an earlier run that must leave first, in words, or ""."""
        store, keys = self._store, self._keys
        stored_spec = store.read(keys.spec)
        if stored_spec is None:
            return "" if store.compare_and_swap(keys.spec, None, self._spec) else self._write_or_compare()
        if stored_spec.value in (self._spec, self._accepted):
            return ""
        if (why := mismatch(self._spec, stored_spec.value, self._log)) is None:
            self._accepted = stored_spec.value
            return ""
        stored_round = store.read(keys.round)
        last = None if stored_round is None else decode_record(Round, keys.round, stored_round.value)
        reason, run = "", _run_of(self._spec)
        if last is None or not last.terminal:
            if not is_later_run(run, _run_of(stored_spec.value)):
                raise StoreRefused(f"job {keys.job!r} runs with a different command: {why}")
            if left := sorted(key.removeprefix(keys.nodes) for key in store.list(keys.nodes)):
                return f"nodes of an earlier run of this job have not left: {', '.join(left)}"
            reason = _ABANDONED_RUN_REASON
        elif last.run == run and last.outcome != "stopped":
            reason = _REPLACED_JOB_REASON  # its end would be taken for this one's
        if reason and stored_round is not None and last is not None:
            over = stopped_round(replace(last, number=last.number + 1), reason)
            if not store.compare_and_swap(keys.round, stored_round.version, encode_record(over)):
                return self._write_or_compare()
        return "" if store.compare_and_swap(keys.spec, stored_spec.version, self._spec) else self._write_or_compare()
