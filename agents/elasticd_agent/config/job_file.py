"""A job file: what `elasticd run` is told on its command line, written down for daemons.

It exists so that a job can be handed in, kept in the store and started on any node. Its keys are the flags of
`elasticd run`, under their names, and are judged by that command's own checks, so that the two never disagree. It looks
at no disk; the node that runs the job does (limits.py, preflight.py).
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from elasticd.errors import UsageError
from elasticd_agent.config import run_options as arguments
from elasticd_agent.config.decode import ConfigError, decode
from elasticd_agent.config.documents import MAX_JOB_FILE_BYTES, FileFormat, parse
from elasticd_agent.config.inherited_env import SET_BY_ELASTICD, job_environment
from elasticd_agent.config.quantities import Seconds, encode_quantity, parse_count_range
from elasticd_agent.model.job import AgentSettings, JobSpec, Policy, Rendezvous, Streams
from elasticd_agent.model.job_dir import JobFiles
from elasticd_agent.system.devices import visible_gpus


class JobFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One job as it was written down. What is None was not given: the flag's own default counts."""

    id: str | None = None
    command: Annotated[tuple[str, ...], Meta(examples=['["train.py", "--epochs", "3"]'])]
    workdir: Annotated[Path, Meta(examples=['"/home/me/project"'])]
    module: bool = False
    no_python: bool = False
    python: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    nodes: int | str = 1
    workers: int | str = 1
    role: str | None = None
    checkpoint_dir: Path | None = None
    preload: tuple[str, ...] = ()
    virtual_local_rank: bool = False
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    max_restarts: int | None = None
    max_restarts_per_hour: int | None = None
    shutdown_timeout: Seconds | None = None
    grow: Literal["auto", "always", "never"] | None = None
    replace_timeout: Seconds | None = None
    hold_timeout: Seconds | None = None
    hang_floor: Seconds | None = None
    hang_factor: float | None = None
    stopped_after: Seconds | None = None
    slow_ceiling: Seconds | None = None
    slow_factor: float | None = None
    evidence_timeout: Seconds | None = None
    on_hang: Literal["restart", "report"] | None = None
    startup_ceiling: Seconds | None = None
    first_step_ceiling: Seconds | None = None
    progress_ceiling: Seconds | None = None
    join_timeout: Seconds | None = None
    last_call_timeout: Seconds | None = None
    lease: Seconds | None = None
    renewal: Seconds | None = None
    store_timeout: Seconds | None = None
    seen_timeout: Seconds | None = None
    adopt_timeout: Seconds | None = None
    store_away: Seconds | None = None
    grow_debounce: Seconds | None = None
    node_cooloff: Seconds | None = None

    @property
    def node_range(self) -> tuple[int, int]:
        """(MIN, MAX) nodes."""
        return parse_count_range(self.nodes)

    @property
    def slot_range(self) -> tuple[int, int]:
        """(MIN, MAX) slots, which are workers, on each node."""
        return parse_count_range(self.workers)


FLAGS = (
    "role",
    "max_restarts",
    "max_restarts_per_hour",
    "grow",
    "replace_timeout",
    "hold_timeout",
    "hang_floor",
    "hang_factor",
    "stopped_after",
    "slow_ceiling",
    "slow_factor",
    "evidence_timeout",
    "on_hang",
    "startup_ceiling",
    "first_step_ceiling",
    "progress_ceiling",
)
"""Keys that are flags of `elasticd run` with a value of their own."""
SWITCHES = ("module", "no_python", "virtual_local_rank")
RENDEZVOUS_KEYS = (
    "join_timeout",
    "last_call_timeout",
    "lease",
    "renewal",
    "store_timeout",
    "seen_timeout",
    "adopt_timeout",
    "store_away",
    "grow_debounce",
    "node_cooloff",
)
"""Keys that are --rdzv-conf's."""

_GPUS = "CUDA_VISIBLE_DEVICES"
_LOGS_BY_DAEMON = "the daemon keeps every worker's output; elasticd logs JOB --rank K shows it"
_RENDEZVOUS_BY_DAEMON = "the daemons know where their nodes meet"
JOB_KEY_HINTS: Mapping[str, str] = {
    "nnodes": 'write nodes, as in nodes = "2:8"',
    "nproc_per_node": 'write workers, as in workers = "1:8"',
    "rdzv_id": "write id",
    "rdzv_backend": _RENDEZVOUS_BY_DAEMON,
    "rdzv_endpoint": _RENDEZVOUS_BY_DAEMON,
    "rdzv_conf": "its times are keys by themselves, as in join_timeout and lease",
    "standalone": _RENDEZVOUS_BY_DAEMON,
    "monitor_interval": "the end of a worker is seen when it happens",
    "start_method": "it has no effect under torchrun either",
    "event_log_handler": "the daemon keeps every job's events",
    "run_path": "command is a script unless module or no_python say otherwise",
    "log_dir": _LOGS_BY_DAEMON,
    "redirects": _LOGS_BY_DAEMON,
    "tee": _LOGS_BY_DAEMON,
    "local_ranks_filter": _LOGS_BY_DAEMON,
    "node_rank": "nodes find their ranks by themselves",
    "master_addr": _RENDEZVOUS_BY_DAEMON,
    "master_port": _RENDEZVOUS_BY_DAEMON,
    "local_addr": "it is a key of the node's agent.toml",
    "logs_specs": _LOGS_BY_DAEMON,
    "numa_binding": "call os.sched_setaffinity in the script",
    "signals_to_handle": "elasticd cancel and drain stop a job",
    "event_log": "the daemon keeps every job's events",
    "metrics_port": "the daemon serves every job's metrics on its own port",
    "metrics_addr": "the daemon serves every job's metrics on its own port",
    "no_live": "a daemon has no terminal",
    "run": "the daemon counts the runs of a job",
    "node_id": "it is node in the node's agent.toml",
    "cwd": "write workdir",
    "args": 'they are part of command, as in command = ["train.py", "--epochs", "3"]',
    "script": 'write command, as in command = ["train.py"]',
    "environment": "write env",
    "name": "write id",
}
"""What `elasticd run` is told and a job file is not, and other words people try; why, or what to write."""


def read_job(data: bytes, kind: FileFormat, where: str) -> JobFile:
    """The job `data` describes, checked as far as can be without a node. Raises UsageError: one line, WHERE: KEY: …"""
    table = parse(data, kind, where)
    try:
        return decode_job(table)
    except ConfigError as error:
        raise UsageError(f"{where}: {error}") from None


def from_json(text: str) -> JobFile:
    """A job as `to_json` wrote it, perhaps another version's. Raises UsageError."""
    table = parse(text.encode("utf-8", "surrogatepass"), "json", "the job's description", 2 * MAX_JOB_FILE_BYTES)
    try:
        return decode_job(table)
    except ConfigError as error:
        raise UsageError(f"the job's description: {error}") from None


def to_json(job: JobFile) -> str:
    return msgspec.json.encode(job, enc_hook=encode_quantity).decode()


def decode_job(table: Mapping[str, Any]) -> JobFile:
    """Raises KeyWrong."""
    job = decode(table, JobFile, {JobFile: JOB_KEY_HINTS})
    check_job(job)
    return job


def run_model(
    job: JobFile,
    *,
    job_id: str,
    run: str,
    node: str,
    slots: tuple[int, ...],
    rendezvous: Rendezvous,
    files: JobFiles,
    devices: tuple[str, ...] | None = None,
    user: str | None = None,
) -> tuple[JobSpec, Policy, AgentSettings]:
    """What one node's runner does for this job, as `elasticd run` would have been told.

    `slots` are this node's slots that the job was given. `devices`: what all slots of the node stand for, as
    CUDA_VISIBLE_DEVICES spells them; () where slots are not GPUs, None: every GPU there is, as `elasticd run` counts
    them. `rendezvous` is where and as whom to meet; its numbers of nodes are the job's. `user` is who a job that names
    none runs as; None: whoever the daemon is. Raises UsageError.
    """
    low, high = job.slot_range
    if not low <= len(slots) <= high:
        raise UsageError(f"workers: {job.workers}, but there are {len(slots)} slot(s) for the job on node {node}")
    spec, policy, settings = _run(job, f"{low}:{len(slots)}")
    fewest, most = job.node_range
    if rendezvous.backend == "memory":
        if fewest > 1:
            raise UsageError(f"nodes: {job.nodes}, but a local store is one node's; the job needs store.backend etcd")
        most = 1
    gpus = visible_gpus(os.environ) if devices is None else devices
    if _GPUS in job.env:
        gpus = ()  # it is empty: the job wants none
    spec = replace(
        spec,
        job_id=job_id,
        run=run,
        devices=tuple(gpus[slot] for slot in slots) if max(slots) < len(gpus) else (),
        log_dir=files.logs,
        redirects=dict.fromkeys(range(len(slots)), Streams.BOTH),
        rendezvous=replace(rendezvous, node=node, min_nodes=fewest, max_nodes=most),
        environment=job_environment(os.environ, job.env, job.user or user),
    )
    settings = replace(settings, event_log=files.events, live=False, runtime_dir=files.runtime)
    return spec, policy, settings


def job_policy(job: JobFile) -> Policy:
    """The rules the job will be run by. Raises UsageError."""
    return _run(job, "1")[1]


def _run(job: JobFile, workers: str) -> tuple[JobSpec, Policy, AgentSettings]:
    """Through the command line's own checks; what only the command line could misread is put in afterwards."""
    argv = [f"--{name.replace('_', '-')}" for name in SWITCHES if getattr(job, name)]
    argv += [f"--{name.replace('_', '-')}={_text(getattr(job, name))}" for name in FLAGS if _given(job, name)]
    conf = [f"{name}={_text(getattr(job, name))}" for name in RENDEZVOUS_KEYS if _given(job, name)]
    argv += [f"--rdzv-conf={','.join(conf)}"] if conf else []
    argv += [f"--preload={','.join(job.preload)}"] if job.preload else []
    argv += [f"--nproc-per-node={workers}", "script"]
    python = job.python or sys.executable
    spec, policy, settings = arguments.parse_run(argv, {"PYTHON_EXEC": python}, job.workdir)
    spec = replace(
        spec,
        entrypoint=job.command[0],
        args=job.command[1:],
        checkpoint_dir=job.checkpoint_dir,
        duplicate_stdout_filters=job.duplicate_stdout_filters,
        duplicate_stderr_filters=job.duplicate_stderr_filters,
    )
    if job.shutdown_timeout is not None:
        policy = replace(policy, stop_grace_s=float(job.shutdown_timeout))
    return spec, policy, settings


def _given(job: JobFile, name: str) -> bool:
    return getattr(job, name) is not None


def _text(value: object) -> str:
    return f"{float(value):.9g}" if isinstance(value, float) else str(value)


# ---- checks


def check_job(job: JobFile) -> None:
    """Raises KeyWrong for what no node could run."""
    if not job.command or not job.command[0]:
        raise ConfigError(
            "command", 'is empty; write the script and its arguments, as in ["train.py", "--epochs", "3"]'
        )
    if job.command[0].startswith("-"):
        raise ConfigError("command", f"begins with {job.command[0]!r}: the script's name comes first")
    for key, text in (("id", job.id), ("python", job.python), ("user", job.user), ("role", job.role)):
        if text is not None and not text.strip():
            raise ConfigError(key, "is empty; leave it out, or name it")
        if text is not None and not text.isprintable():
            raise ConfigError(key, f"{text[:60]!r} holds a character that cannot be printed")
    if job.id is not None and job.id.startswith("-"):
        raise ConfigError("id", f"{job.id[:60]!r} begins with '-': commands would take it for an option")
    if job.python is not None and "/" in job.python and not job.python.startswith("/"):
        raise ConfigError("python", f"{job.python!r} is neither an absolute path nor a name on PATH; begin it with /")
    if job.module and job.no_python:
        raise ConfigError("no_python", "and module contradict each other: a module needs Python to run it")
    for key in ("nodes", "workers"):
        try:
            parse_count_range(getattr(job, key))
        except ValueError as error:
            raise ConfigError(key, str(error)) from None
    for name in job.env:
        if not name or "=" in name:
            raise ConfigError("env", f"{name!r} cannot be the name of a variable")
        if SET_BY_ELASTICD.fullmatch(name):
            raise ConfigError(f"env.{name}", "is set by elasticd itself, for every worker; leave it out")
    if job.env.get(_GPUS):
        raise ConfigError(
            f"env.{_GPUS}", "is set by the slots that the job gets; leave it out, or empty to hide all GPUs"
        )
    if (size := len(to_json(job).encode())) > MAX_JOB_FILE_BYTES:
        raise ConfigError(
            "env" if job.env else "command", f"makes a job of {size} bytes; at most {MAX_JOB_FILE_BYTES} are kept"
        )
    if job.hang_factor is not None and math.isnan(job.hang_factor):
        raise ConfigError("hang_factor", "must be a number")
    try:
        spec, _, _ = _run(job, f"{job.slot_range[0]}:{job.slot_range[1]}")
        if job.id is not None:
            replace(spec, job_id=job.id)
    except ConfigError:
        raise
    except UsageError as error:
        raise in_keys(str(error)) from None


_KEYS = {field.encode_name for field in msgspec.structs.fields(JobFile)}


def in_keys(sentence: str) -> ConfigError:
    """A sentence of the command line's, in the words of a job file: its flags are keys here."""
    said = re.sub(r"--rdzv-conf:? (?=[a-z_]+\b)|\bargument (?=-)| \(PYTHON_EXEC\)", "", sentence)
    said = re.sub(r"--nproc-per-node", "workers", said)
    said = re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), said)
    said = re.sub(r"\b([a-z_]+)_s\b(?= [0-9])", r"\1", said)
    if said.startswith("job id "):
        return ConfigError("id", said.removeprefix("job id "))
    first = re.match(r"([a-z_]+)(?:[:=]\s*|\s+)(.*)", said, re.DOTALL)
    if first and first[1] in _KEYS:
        return ConfigError(first[1], first[2])
    for beginning, key in (
        ("the Python interpreter", "python"),
        ("the script", "command"),
        ("the working directory", "workdir"),
        ("the program", "command"),
        ("-m ", "command"),
    ):
        if said.startswith(beginning):
            return ConfigError(key, said)
    words = re.findall("[a-z_]+", re.sub("'[^']*'", "", said))
    return ConfigError(next((word for word in words if word in _KEYS - {"user", "env", "id"}), ""), said)
