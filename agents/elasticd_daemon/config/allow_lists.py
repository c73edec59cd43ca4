"""The allow-lists of [limits] in agent.toml, checked when a job is submitted and on each node that is about to run it.

Anybody who may submit jobs need not be trusted with the whole machine. Paths are resolved as the kernel resolves them,
so that neither `..` nor a symbolic link leads out. What allowed code does then is limited by its user
(docs/security.md).
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from elasticd.checkpointing.storage.object_url import url_of
from elasticd_agent.model.phrases import listing
from elasticd_agent.system.bounded_io import DeadlineExceeded, run_within
from elasticd_agent.workers.launcher.requests import find_script
from elasticd_daemon.config.agent_settings import Limits
from elasticd_daemon.config.decode import ConfigError
from elasticd_daemon.config.job_file import JobFile


def own_user_name() -> str:
    """The name of this process's user; its number if it has none, as in a container."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


_HARMLESS_VARIABLES = re.compile(
    "OMP_(NUM_THREADS|PROC_BIND|PLACES|SCHEDULE|DYNAMIC)|MKL_(NUM_THREADS|DYNAMIC)|KMP_(AFFINITY|BLOCKTIME)"
    "|NCCL_(DEBUG|DEBUG_SUBSYS|SOCKET_IFNAME|SOCKET_FAMILY|ALGO|PROTO|BUFFSIZE|NTHREADS|M(IN|AX)_NCHANNELS|CROSS_NIC"
    "|NVLS_ENABLE|(IB|P2P|SHM)_[A-Z0-9_]+)|TORCH_NCCL_[A-Z0-9_]+|(GLOO|TP)_SOCKET_IFNAME|UCX_(TLS|NET_DEVICES)"
    "|CUDA_(DEVICE_MAX_CONNECTIONS|DEVICE_ORDER|LAUNCH_BLOCKING)|CUBLAS_WORKSPACE_CONFIG|PYTORCH_(CUDA_)?ALLOC_CONF"
    "|TORCH_(DISTRIBUTED_DEBUG|CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES)|PYTHON(UNBUFFERED|HASHSEED|FAULTHANDLER)"
    "|WANDB_(PROJECT|ENTITY|NAME|RUN_ID|RUN_GROUP|TAGS|MODE)|(HF_HUB|HF_DATASETS|TRANSFORMERS)_OFFLINE"
    "|TOKENIZERS_PARALLELISM|TZ|LANG|LC_[A-Z]+|JOB_[A-Z0-9_]+"
)
"""The variables of a job whose command is limited. A list of the dangerous ones would never be complete: any program
may take a library, a plugin or a compiler from its environment. JOB_ is for the job's own."""

PATHS_TIMEOUT_S = 5.0


def refusal(limits: Limits, job: JobFile, user: str | None) -> ConfigError | None:
    """Why the job may not run here, or None, within PATHS_TIMEOUT_S. `user` as in `user_refusal`."""
    try:
        return user_refusal(limits, job, user) or run_within(PATHS_TIMEOUT_S, lambda: path_refusal(limits, job))
    except DeadlineExceeded:
        return ConfigError("workdir", "its file system or that of the command does not answer")


def path_refusal(limits: Limits, job: JobFile) -> ConfigError | None:
    """Why the job's directories and command are not allowed. It waits for their file systems."""
    return _directory_refusal(limits, job) or _command_refusal(limits, job)


def user_refusal(limits: Limits, job: JobFile, user: str | None) -> ConfigError | None:
    """Why the job's user is not allowed. `user`: of jobs that name none; None: the agent's own."""
    runs_as = job.user or user or own_user_name()
    if limits.users is None or runs_as in limits.users:
        return None
    whom = repr(runs_as) if job.user else f"is not given, and {runs_as!r}, the user of the job,"
    return ConfigError("user", f"{whom} is not one of this node's [limits] users: {listing(limits.users, None)}")


def cgroup_limits(limits: Limits, job: JobFile) -> dict[str, int]:
    """The limits of the job's control group by controller: the lower one of the node's and the job's."""
    pairs = {
        "memory": (limits.job_memory_bytes, job.limits.memory),
        "pids": (limits.job_pids, job.limits.pids),
        "cpu": (limits.job_cpu_weight, job.limits.cpu_weight),
    }
    given = {controller: [limit for limit in pair if limit is not None] for controller, pair in pairs.items()}
    return {controller: min(values) for controller, values in given.items() if values}


def _directory_refusal(limits: Limits, job: JobFile) -> ConfigError | None:
    if limits.directories is None:
        return None
    allowed = tuple(map(_resolve, limits.directories))
    for key, path in (("workdir", job.workdir), ("checkpoint_dir", job.checkpoint_dir)):
        if path is not None and not any(_is_at_or_below(_resolve(path), directory) for directory in allowed):
            return ConfigError(
                key,
                f"{_describe_with_target(path)} is not below one of this node's [limits] directories: "
                f"{listing(allowed, None)}",
            )
    return None


def _command_refusal(limits: Limits, job: JobFile) -> ConfigError | None:
    if limits.commands is None:
        return None
    allowed = tuple(os.path.realpath(entry) + ("/" if entry.endswith("/") else "") for entry in limits.commands)
    listed = f"this node's [limits] commands: {listing(allowed, None)}"

    def check(key: str, path: str) -> ConfigError | None:
        real = os.path.realpath(path)
        if any(_is_at_or_below(real, entry.rstrip("/")) if entry.endswith("/") else real == entry for entry in allowed):
            return None
        return ConfigError(key, f"{_describe_with_target(Path(path))} is not one of {listed}")

    return (
        _program_refusal(job, check, listed) if job.no_python else _script_refusal(job, check, listed)
    ) or _other_code_refusal(job)


_CheckPath = Callable[[str, str], ConfigError | None]


def _program_refusal(job: JobFile, check: _CheckPath, listed: str) -> ConfigError | None:
    name = job.command[0]
    path = os.path.join(os.path.realpath(job.workdir), name) if "/" in name else shutil.which(name)
    return check("command", path) if path else ConfigError("command", f"{name!r} is not one of {listed}")


def _script_refusal(job: JobFile, check: _CheckPath, listed: str) -> ConfigError | None:
    name, workdir = job.command[0], os.path.realpath(job.workdir)
    script = find_script(job.module, name, Path(workdir))
    if script is None:
        return ConfigError("command", f"-m {name} is not below workdir, so it cannot be seen to be one of {listed}")
    if job.module and not _is_at_or_below(os.path.realpath(script), workdir):
        return ConfigError("command", f"-m {name} leads out of workdir by a link; name the directory it is in")
    error = check("command", str(script))
    if error is None and job.python is not None and not _same_program(job.python, sys.executable):
        error = check("python", _find_interpreter(job.python))
    return error


def _other_code_refusal(job: JobFile) -> ConfigError | None:
    limited = "it cannot be given where commands are limited"
    if job.preload:
        return ConfigError("preload", f"runs other modules than the command; {limited}")
    name = next((variable for variable in job.env if not _HARMLESS_VARIABLES.fullmatch(variable)), None)
    return ConfigError(f"env.{name}", f"could make a command run other code; {limited}") if name is not None else None


def _resolve(path: Path) -> str:
    """The path as the kernel resolves it; an object store's URL as it is (with `..` the job would be refused)."""
    return url_of(path) or os.path.realpath(path)


def _is_at_or_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _same_program(one: str, other: str) -> bool:
    # Not resolved: a virtual environment's interpreter is a link to one that has other modules.
    return os.path.normpath(_find_interpreter(one)) == os.path.normpath(other)


def _find_interpreter(python: str) -> str:
    return python if "/" in python else shutil.which(python) or python


def _describe_with_target(path: Path) -> str:
    """The path, and where it leads if that is elsewhere."""
    if url := url_of(path):
        return repr(url)
    real = os.path.realpath(path)
    return repr(str(path)) if real == str(path) else f"{str(path)!r} (which is {real!r})"
