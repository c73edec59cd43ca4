"""Job files: the options of `elasticd run` for a job that is submitted to the agents.

It does not look at the disk; the node that runs the job does (allow_lists.py, preflight.py).

A key is a flag of the same name, so that what is learned from one counts for the other. What a flag means on a machine
and a job file cannot know (ports, endpoints, log directories) is no key: JOB_KEY_HINTS has the reason for each, and the
sentence of the error says it. The struct is the reference, too: `elasticd config example` and the page about job files
are made from its types, defaults and words.

The same file is read three times: when it is submitted, when a node is asked to run it, and when an older agent's
submission is continued after an upgrade. So checks of new jobs (`check_new_job`) are apart from checks of any job
(`check_job`): a rule that is added must not refuse a job that runs.
"""

from __future__ import annotations

import json
import math
import os
import pwd
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from elasticd.checkpointing.storage.object_url import resolve
from elasticd.errors import UsageError
from elasticd_agent.config.quantities import MAX_COUNT, Seconds, Size, encode_quantity, parse_count_range
from elasticd_agent.config.run_model import POLICY_FIELDS, RunModel, policy_with, preloaded_modules
from elasticd_agent.model.job import (
    EntrypointMode,
    JobSpec,
    Policy,
    Rendezvous,
    RunnerSettings,
    Streams,
    check_identifier,
    check_new_id,
    strip_interpreter,
)
from elasticd_agent.model.phrases import count
from elasticd_agent.system.gpus.devices import visible_gpus
from elasticd_daemon.config.decode import ConfigError, decode
from elasticd_daemon.config.documents import MAX_JOB_FILE_BYTES, FileFormat, parse
from elasticd_daemon.job_dir import JobFiles

VARIABLES_SET_BY_ELASTICD = re.compile(
    "(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|ELASTICD_.*|PYTHON_EXEC|PET_.*"
)
"""Variables of workers and of `elasticd run`: never a job's own."""
_AGENT_VARIABLES = re.compile(
    "PYTHON.*|VIRTUAL_ENV.*|CONDA_.*|NOTIFY_SOCKET|WATCHDOG_.*|LISTEN_.*|INVOCATION_ID|JOURNAL_STREAM|MAINPID|MANAGERPID"
    "|SYSTEMD_.*|MEMORY_PRESSURE_.*|(CREDENTIALS|RUNTIME|STATE|CACHE|LOGS|CONFIGURATION)_DIRECTORY|SUDO_.*|SSH_.*"
    "|XDG_.*|TERM|PWD|OLDPWD|SHLVL|_"
)
"""Variables of the agent's interpreter, of systemd, and of the shell that started it."""


def job_environment(daemon_env: Mapping[str, str], job_env: Mapping[str, str], user: str | None) -> dict[str, str]:
    """The environment that all processes of a job start from: the machine's settings, then the user's home, then the
    job's own.

    Raises UsageError when there is no such user.
    """
    env = {
        name: value
        for name, value in daemon_env.items()
        if not VARIABLES_SET_BY_ELASTICD.fullmatch(name) and not _AGENT_VARIABLES.fullmatch(name)
    }
    if user is not None:
        try:
            entry = pwd.getpwnam(user)
        except KeyError:
            raise UsageError(f"user: {user!r} does not exist on this machine; create it, or name another") from None
        env |= {"HOME": entry.pw_dir, "USER": user, "LOGNAME": user, "SHELL": entry.pw_shell or "/bin/sh"}
    return {**env, **job_env}


Pids = Annotated[int, msgspec.Meta(ge=1, le=2**22)]
CpuWeight = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class JobLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of a job's control group on one node; None: no limit."""

    memory: Size | None = None
    pids: Pids | None = None
    cpu_weight: CpuWeight | None = None


class JobFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One job as written. None: not given, so the default of the flag counts.

    A key without help here is a flag of the same name; without an example, its example is Policy's default.
    """

    id: Annotated[
        str | None,
        "The job's name, unique among jobs that have not ended. Not given: elasticd submit generates one.",
        '"llm-7b"',
    ] = None
    command: Annotated[
        tuple[str, ...],
        "The script and its arguments. A relative script is looked up in workdir.",
        '["train.py", "--epochs", "3"]',
    ]
    workdir: Annotated[Path, "The working directory of the job, on every node.", '"/home/me/project"']
    module: Annotated[bool, "The command is a module's name and its arguments, run as python -m does."] = False
    no_python: Annotated[bool, "The command is a program and its arguments, started as it is; not with module."] = False
    python: Annotated[
        str | None,
        "The interpreter, an absolute path or a name on the job's PATH: that of any virtual environment that has "
        "torch, with or without elasticd. Not given: the agent's own.",
        '"/home/me/venv/bin/python"',
    ] = None
    env: Annotated[
        dict[str, str],
        "Variables of the job's processes, beside those of the agent that describe the machine. The agent's own "
        "ELASTICD_, PYTHON and systemd variables are not passed on.",
        '{ OMP_NUM_THREADS = "4" }',
    ] = {}
    user: Annotated[str | None, "The user the job runs as. Not given: user in the node's agent.toml.", '"me"'] = None
    nodes: Annotated[
        int | str,
        "Number of nodes, N or MIN:MAX: the job starts with MIN, grows to MAX, and continues while MIN are left. With "
        'labels, as in node_labels: { count = "2:8", gpu = "h100" }.',
        '"2:8"',
    ] = 1
    workers: Annotated[int | str, "Number of slots, one worker each, on each node, N or MIN:MAX.", '"1:8"'] = 1
    node_labels: Annotated[
        tuple[str, ...], "Only nodes with all of these labels (labels in agent.toml) run the job.", '["gpu=h100"]'
    ] = ()
    priority: Annotated[
        Literal["high", "normal", "low"],
        "Pending jobs of a higher class start first; within a class, those submitted first. No job is ever evicted for "
        "another one.",
    ] = "normal"
    limits: Annotated[
        JobLimits,
        "The most that the job's processes may use on each node: memory, pids (their number, threads included), and "
        "cpu_weight, their share of a busy machine, 1 to 10,000, where 100 is usual. Nodes without control groups "
        "refuse the job (elasticd docs systemd).",
        '{ memory = "64GB", pids = 4096, cpu_weight = 50 }',
    ] = JobLimits()
    role: str | None = None
    checkpoint_dir: Annotated[
        Path | None,
        "The directory of session.checkpoint(), shared by all nodes of the job, or s3://BUCKET/PREFIX, gs://…, az://…; "
        "workers find it in ELASTICD_CHECKPOINT_DIR.",
        '"/checkpoints/llm-7b"',
    ] = None
    preload: Annotated[
        tuple[str, ...], "Modules imported once, before the workers are forked.", '["transformers"]'
    ] = ()
    virtual_local_rank: bool = False
    duplicate_stdout_filters: Annotated[
        tuple[str, ...], "Stdout lines that contain one of these words go to filtered_stdout.log as well.", '["loss"]'
    ] = ()
    duplicate_stderr_filters: Annotated[
        tuple[str, ...], "Stderr lines that contain one of these words go to filtered_stderr.log as well.", '["WARN"]'
    ] = ()
    max_restarts: int | None = None
    max_restarts_per_hour: int | None = None
    shutdown_timeout: Annotated[
        Seconds | None,
        "Time between SIGTERM and SIGKILL for a stopped worker. The survivors of a broken group get none: they can "
        "only wait for the dead.",
    ] = None
    grow: Literal["auto", "always", "never"] | None = None
    spares: Annotated[
        int,
        "Nodes beyond MAX that stand by: their workers run the script up to session.run(), and take the place of lost "
        "ones at once. With nodes = 1: slots beyond MAX of workers.",
        "1",
    ] = 0
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
    join_timeout: Annotated[Seconds | None, "How long the job waits for MIN nodes before it fails."] = None
    last_call_timeout: Annotated[Seconds | None, "How long the job waits for more nodes once MIN have joined."] = None
    lease: Annotated[Seconds | None, "A node counts as lost when it has not renewed its lease for this long."] = None
    renewal: Annotated[Seconds | None, "Interval between two renewals of the lease."] = None
    store_timeout: Annotated[Seconds | None, "Time limit of one request to the store."] = None
    seen_timeout: Annotated[
        Seconds | None, "A node that has not acknowledged a new round for this long is checked again."
    ] = None
    adopt_timeout: Annotated[
        Seconds | None, "How long a node without a lease stays a member while its workers train."
    ] = None
    store_away: Annotated[Seconds | None, "How long the job continues while the store is unavailable."] = None
    grow_debounce: Annotated[Seconds | None, "Nodes that join within this time enter the same round."] = None
    node_cooloff: Annotated[
        Seconds | None, "How long a node that was lost repeatedly waits before it may rejoin; it doubles each time."
    ] = None

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the most nodes."""
        return parse_count_range(self.nodes)

    @property
    def slot_range(self) -> tuple[int, int]:
        """The least and the most slots, which are workers, on each node."""
        return parse_count_range(self.workers)


_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
JOB_KEY_HINTS: Mapping[str, str] = {
    "nnodes": 'write nodes, as in nodes = "2:8"',
    "nproc_per_node": 'write workers, as in workers = "1:8"',
    "rdzv_conf": "its times are keys by themselves, as in join_timeout and lease",
    "monitor_interval": "the end of a worker is seen when it happens",
    "start_method": "it has no effect under torchrun either",
    "run_path": "command is a script unless module or no_python say otherwise",
    "node_rank": "nodes find their ranks by themselves",
    "local_addr": "it is a key of the node's agent.toml",
    "log_line_prefix_template": "elasticd logs JOB --rank K shows one rank's output",
    "print_completion": "elasticd has no scripts for shells",
    "integrate": "give the framework its callback, as docs/frameworks.md shows",
    "numa_binding": "call os.sched_setaffinity in the script",
    "signals_to_handle": "elasticd cancel and drain stop a job",
    "preemption_notices": "it is a key of the node's agent.toml",
    "no_live": "it is ignored",
    "quiet": "a daemon has no terminal",
    "run": "the daemon counts the runs of a job",
    "node_id": "it is node in the node's agent.toml",
    "cwd": "write workdir",
    "args": 'they are part of command, as in command = ["train.py", "--epochs", "3"]',
    "script": 'write command, as in command = ["train.py"]',
    "environment": "write env",
    "upload": "workdir must exist on every node that runs the job",
    **dict.fromkeys(("rdzv_id", "name"), "write id"),
    **dict.fromkeys(("event_log_handler", "event_log"), "the daemon keeps every job's events"),
    **dict.fromkeys(("metrics_port", "metrics_addr"), "the daemon serves every job's metrics on its own port"),
    **dict.fromkeys(
        ("rdzv_backend", "rdzv_endpoint", "standalone", "master_addr", "master_port"),
        "the daemons know where their nodes meet",
    ),
    **dict.fromkeys(
        ("log_dir", "redirects", "tee", "local_ranks_filter", "logs_specs"),
        "the daemon keeps every worker's output; elasticd logs JOB --rank K shows it",
    ),
}
"""Flags of `elasticd run` that are no keys, and other likely words: the reason, or what to write instead."""


def read_job(data: bytes, kind: FileFormat, where: str) -> JobFile:
    """The job `data` describes, checked as far as can be without a node. Raises UsageError: one line, WHERE: KEY: …"""
    table = parse(data, kind, where)
    try:
        job = decode_job(table)
        check_new_job(job)
    except ConfigError as error:
        raise UsageError(f"{where}: {error}") from None
    return job


def job_directories(job_json: str) -> tuple[Path, ...]:
    """The directories that a job needs on each of its nodes; none of an unreadable one."""
    try:
        job = from_json(job_json)
    except UsageError:
        return ()
    return tuple(Path(os.path.normpath(path)) for path in (job.workdir, job.checkpoint_dir) if path is not None)


def from_json(text: str) -> JobFile:
    """Return the job that `to_json` wrote, perhaps in another version. Raises UsageError."""
    table = parse(text.encode("utf-8", "surrogatepass"), "json", "the job's description", 2 * MAX_JOB_FILE_BYTES)
    try:
        return decode_job(table)
    except ConfigError as error:
        raise UsageError(f"the job's description: {error}") from None


def to_json(job: JobFile) -> str:
    """Return the job as JSON without defaults, as it is kept in the store."""
    return msgspec.json.encode(job, enc_hook=encode_quantity).decode()


def decode_job(table: Mapping[str, Any]) -> JobFile:
    """Return the job that a table of plain values describes. Raises ConfigError."""
    job = decode(_expand_node_labels(table), JobFile, {JobFile: JOB_KEY_HINTS})
    check_job(job)
    return job


def _expand_node_labels(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """nodes = { count = "2:8", gpu = "h100" } -> nodes = "2:8", node_labels = ["gpu=h100"]."""
    nodes, listed = table.get("nodes"), table.get("node_labels", [])
    if not isinstance(nodes, dict) or not isinstance(listed, list):
        return table
    labels = []
    for name, value in nodes.items():
        if name != "count":
            if isinstance(value, bool) or not isinstance(value, (str, int)):  # 570.10 would be 570.1, true True
                raise ConfigError(f"nodes.{name}", f'is a label and must be text; write it as in {name} = "h100"')
            labels.append(f"{name}={value}")
    return {**table, "nodes": nodes.get("count", 1), "node_labels": [*listed, *labels]}


def runner_model(
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
) -> RunModel:
    """The work of one node's runner for this job. Raises UsageError.

    `slots`: the slots of this node that the job got. `devices`: the GPU of each slot of the node, as in
    CUDA_VISIBLE_DEVICES; () where slots are not GPUs, None: every GPU, as `elasticd run` counts them. `rendezvous`: the
    store; its numbers of nodes are replaced by the job's. `user`: the user of a job that names none, None: the agent's.
    """
    low, high = job.slot_range
    fewest, most = job.node_range
    most_slots = high + (job.spares if most == 1 else 0)
    if not low <= len(slots) <= most_slots:
        raise UsageError(f"workers: {job.workers}, but the job has {count(len(slots), 'slot')} on node {node}")
    workers = min(high, len(slots))
    spares = len(slots) - workers if most == 1 else job.spares
    if rendezvous.backend == "memory":
        if fewest > 1:
            raise UsageError(f"nodes: {job.nodes}, but a local store is one node's; the job needs store.backend etcd")
        most, spares = 1, len(slots) - workers
    # CUDA_VISIBLE_DEVICES can only be empty in `env`: the job wants no GPU.
    gpus = () if _GPUS_VARIABLE in job.env else visible_gpus(os.environ) if devices is None else devices
    spec = JobSpec(
        python=job.python or sys.executable,
        mode=EntrypointMode.EXEC if job.no_python else EntrypointMode.MODULE if job.module else EntrypointMode.SCRIPT,
        entrypoint=job.command[0],
        args=job.command[1:],
        cwd=job.workdir,
        job_id=job_id,
        run=run,
        role=job.role or "default",
        min_workers=low,
        max_workers=workers,
        spares=spares,
        devices=tuple(gpus[slot] for slot in slots) if max(slots) < len(gpus) else (),
        checkpoint_dir=None if job.checkpoint_dir is None else resolve(job.checkpoint_dir),
        preload=preloaded_modules(job.preload),
        log_dir=files.logs,
        redirects=dict.fromkeys(range(len(slots)), Streams.BOTH),
        duplicate_stdout_filters=job.duplicate_stdout_filters,
        duplicate_stderr_filters=job.duplicate_stderr_filters,
        virtual_local_rank=job.virtual_local_rank,
        rendezvous=replace(rendezvous, node=node, min_nodes=fewest, max_nodes=most),
        environment=job_environment(os.environ, job.env, job.user or user),
    )
    return RunModel(spec, job_policy(job), RunnerSettings(files.events, runtime_dir=files.runtime))


def job_policy(job: JobFile) -> Policy:
    """The rules for the job. Raises UsageError."""
    given = {field: getattr(job, key, None) for key, field in POLICY_FIELDS.items()}
    return policy_with({field: value for field, value in given.items() if value is not None})


# ---- checks


def check_job(job: JobFile) -> None:
    """Raises ConfigError for a job that no node could run."""
    _check_texts(job)
    for key in ("nodes", "workers"):
        try:
            parse_count_range(getattr(job, key))
        except ValueError as error:
            raise ConfigError(key, str(error)) from None
    if not 0 <= job.spares <= MAX_COUNT:
        raise ConfigError("spares", f"{job.spares}: it is a number of spares, from 0 to {MAX_COUNT}")
    check_memory_limit("limits.memory", job.limits.memory)
    _check_env(job.env)
    if (size := len(to_json(job).encode())) > MAX_JOB_FILE_BYTES:
        key = "env" if job.env else "command"
        raise ConfigError(key, f"makes a job of {size} bytes; at most {MAX_JOB_FILE_BYTES} are kept")
    if job.hang_factor is not None and math.isnan(job.hang_factor):
        raise ConfigError("hang_factor", "must be a number")
    try:
        job_policy(job)
        preloaded_modules(job.preload)
        if job.id is not None:
            check_identifier("id", job.id)
    except UsageError as error:
        raise ConfigError.of(error) from None


def check_new_job(job: JobFile) -> None:
    """Check what is asked of new jobs only; those that were submitted to an earlier version go on. Raises
    ConfigError.
    """
    try:
        if job.id is not None:
            check_new_id("id", job.id)
    except UsageError as error:
        raise ConfigError.of(error) from None
    if not (job.module or job.no_python) and (instead := strip_interpreter(job.command)):
        key, words = instead
        text = f"command = {json.dumps(words, ensure_ascii=False)}" + (f", {key} = true" if key else "")
        raise ConfigError("command", f"begins with a script, not with {job.command[0]!r}; write: {text}")


def check_memory_limit(key: str, limit: int | None) -> None:
    """Raises ConfigError for a limit that no control group could have."""
    if limit is not None and not 1 <= limit <= 2**60:
        raise ConfigError(key, f"must be from 1 to {2**60}")


def _check_texts(job: JobFile) -> None:
    """Check the job's names and its command: not empty, printable, and no option where a name is expected."""
    if not job.command or not job.command[0]:
        example = '["train.py", "--epochs", "3"]'
        raise ConfigError("command", f"is empty; write the script and its arguments, as in {example}")
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


def _check_env(env: Mapping[str, str]) -> None:
    """Check the variables: names that are possible, and none that elasticd sets for every worker."""
    for name in env:
        if not name or "=" in name:
            raise ConfigError("env", f"{name!r} cannot be the name of a variable")
        if VARIABLES_SET_BY_ELASTICD.fullmatch(name):
            raise ConfigError(f"env.{name}", "is set by elasticd itself, for every worker; leave it out")
    if env.get(_GPUS_VARIABLE):
        raise ConfigError(
            f"env.{_GPUS_VARIABLE}", "is set by the slots of the job; leave it out, or empty to hide all GPUs"
        )


_SUBJECT_KEYS = {
    "the Python interpreter": "python",
    "the script": "command",
    "the program": "command",
    "-m ": "command",
    "the working directory": "workdir",
}


def in_file_terms(error: UsageError) -> ConfigError:
    """An error of preflight or of the run, which name flags, with the key of the job file."""
    text = str(error).replace(" (PYTHON_EXEC)", "").replace("--no-python", "no_python")
    if flag := re.match(r"--(?:rdzv-conf:? )?([a-z-]+):? ", text):
        return ConfigError(flag[1].replace("-", "_"), text[flag.end() :])
    return ConfigError(next((key for start, key in _SUBJECT_KEYS.items() if text.startswith(start)), ""), text)
