"""The keys of agent.toml and of job files in words, for docs/agent.md, docs/jobs.md and `elasticd config example`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import Literal

import msgspec

from elasticd_agent.config.agent_settings import NodeSettings
from elasticd_agent.config.decode import default_toml, meta_of
from elasticd_agent.config.elasticd_flags import ELASTICD_FLAGS
from elasticd_agent.config.env_variables import config_keys
from elasticd_agent.config.flag import Flag
from elasticd_agent.config.job_file import RENDEZVOUS_KEYS, JobFile
from elasticd_agent.config.torchrun_flags import TORCHRUN_FLAGS

JOB_KEY_HELP: Mapping[str, tuple[str, str]] = {
    "id": (
        "The job's name, unlike that of any other that has not ended. Not given: elasticd submit makes one up; a "
        "[[job]] in agent.toml needs one.",
        '"llm-7b"',
    ),
    "command": (
        "The script and its arguments. A relative script is looked for in workdir.",
        '["train.py", "--lr=0.1"]',
    ),
    "workdir": ("The directory the job runs in, on every node.", '"/home/me/project"'),
    "module": ("The command is a module's name and its arguments, run as python -m does.", "false"),
    "no_python": ("The command is a program and its arguments, started as it is; not with module.", "false"),
    "python": (
        "The interpreter, an absolute path or a name on the job's PATH: that of any virtual environment that has "
        "torch; elasticd need not be in it. Not given: the daemon's own.",
        '"/home/me/venv/bin/python"',
    ),
    "env": (
        "Variables of the job's processes, beside those of the daemon that describe the machine. The daemon's own "
        "ELASTICD_, PYTHON and systemd variables are not passed on.",
        '{ OMP_NUM_THREADS = "4" }',
    ),
    "user": ("Who the job runs as. Not given: user in the node's agent.toml.", '"me"'),
    "nodes": (
        "How many nodes, N or MIN:MAX: it starts with MIN, takes up to MAX, and goes on while MIN are left.",
        '"2:8"',
    ),
    "workers": ("How many slots, which are workers, on each node, N or MIN:MAX.", '"1:8"'),
    "checkpoint_dir": (
        "Where session.checkpoint() writes, a directory that all nodes of the job share; the workers find it in "
        "ELASTICD_CHECKPOINT_DIR.",
        '"/checkpoints/llm-7b"',
    ),
    "preload": ("Modules imported once, before the workers are forked.", '["transformers"]'),
    "duplicate_stdout_filters": (
        "Stdout lines that contain one of these words go to filtered_stdout.log as well.",
        '["loss"]',
    ),
    "duplicate_stderr_filters": (
        "Stderr lines that contain one of these words go to filtered_stderr.log as well.",
        '["WARN"]',
    ),
    "shutdown_timeout": (
        "How long a stopped worker has before SIGKILL. The survivors of a broken group get none: they can only wait "
        "for the dead.",
        '"30s"',
    ),
    "join_timeout": ("How long MIN nodes may take to come together before the job is given up.", '"10m"'),
    "last_call_timeout": ("How long, once MIN nodes are there, the job waits for more before it begins.", '"5s"'),
    "lease": ("A node is lost to the job when it has not renewed its lease for so long.", '"3s"'),
    "renewal": ("How often it renews it.", '"1s"'),
    "store_timeout": ("How long the store may take to answer one request.", '"900ms"'),
    "seen_timeout": ("A node that has not seen a new round for so long is looked at again.", '"1s"'),
    "adopt_timeout": ("How long a node without a lease counts as there while its workers train.", '"60s"'),
    "store_away": ("How long the job goes on while the store does not answer.", '"5m"'),
    "grow_debounce": ("Newcomers within this time are taken in together.", '"1s"'),
    "node_cooloff": ("How long a node that was lost again waits before it is taken in; it doubles each time.", '"5s"'),
}
"""What a key does, and an example or the default; of keys that are not flags by themselves."""


@dataclass(frozen=True, slots=True)
class KeyDoc:
    """One key. `example` is what a file could say; `default` "" where leaving it out means something else."""

    key: str
    help: str
    default: str
    example: str
    reloadable: bool = False


def agent_keys() -> Iterator[KeyDoc]:
    for key, field in config_keys(NodeSettings):
        meta = meta_of(field)
        default = default_toml(field)
        example = str(meta.examples[0]) if meta and meta.examples else default
        reloaded = bool(meta and meta.extra and meta.extra.get("reload"))
        yield KeyDoc(key, meta.description or "" if meta else "", "" if default == "[]" else default, example, reloaded)


def job_keys() -> Iterator[KeyDoc]:
    flags = {flag.dest: flag for flag in (*TORCHRUN_FLAGS, *ELASTICD_FLAGS)}
    for field in msgspec.structs.fields(JobFile):
        name = field.encode_name
        default = default_toml(field)
        if name in JOB_KEY_HELP:
            says, example = JOB_KEY_HELP[name]
            if name in (*RENDEZVOUS_KEYS, "shutdown_timeout"):
                default = example
            yield KeyDoc(name, says, "" if default in ("[]", "{}") else default, example)
        else:
            flag = flags[name]
            yield KeyDoc(
                name, _flags_to_keys(f"{flag.help} {flag.default_reason or ''}".strip()), _default(flag), _example(flag)
            )


def _flags_to_keys(text: str) -> str:
    return re.sub(r"--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), text)


def _default(flag: Flag) -> str:
    if isinstance(flag.default, str) and re.fullmatch(r"[0-9.]+[a-z]+|[a-z]+", flag.default):
        return f'"{flag.default}"'
    return "" if flag.default in (None, "", ()) else str(flag.default).lower()


def _example(flag: Flag) -> str:
    return _default(flag) or {"max_restarts": "10"}.get(flag.dest, '"30s"')


# ---- templates


def template(which: Literal["agent", "job"]) -> str:
    """A file with every key in it, commented out but for those that must be there."""
    return "".join(_agent_template() if which == "agent" else _job_template())


def _agent_template() -> Iterator[str]:
    yield "# agent.toml, for `elasticd agent --config FILE`. Every key may be left out; docs/agent.md says more.\n"
    yield "# Values shown are the defaults, or an example where there is none.\n"
    table = ""
    for row in agent_keys():
        outer, _, name = row.key.rpartition(".")
        if outer != table:
            table = outer
            yield f"\n[{outer}]\n"
        yield f"\n{_comment(row.help)}#{name} = {row.example}\n"
    yield "\n# Jobs that this node hands in by itself; docs/jobs.md has the keys.\n#[[job]]\n"
    for name in ("id", "command", "workdir"):
        yield f"#{name} = {JOB_KEY_HELP[name][1]}\n"


def _job_template() -> Iterator[str]:
    yield "# A job file, for `elasticd submit FILE`. command and workdir must be there; docs/jobs.md says more.\n"
    yield "# Values shown are the defaults, or an example where there is none.\n"
    for row in job_keys():
        mark = "" if row.key in ("command", "workdir") else "#"
        yield f"\n{_comment(row.help)}{mark}{row.key} = {row.example}\n"


def _comment(text: str) -> str:
    return fill(text, 110, initial_indent="# ", subsequent_indent="# ") + "\n"
