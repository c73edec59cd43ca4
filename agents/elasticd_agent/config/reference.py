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
from elasticd_agent.config.job_file import JobFile
from elasticd_agent.config.run_model import POLICY_FIELDS
from elasticd_agent.config.torchrun_flags import TORCHRUN_FLAGS
from elasticd_agent.model.job import Policy
from elasticd_agent.system.durations import setting_text

JOB_KEY_HELP: Mapping[str, tuple[str, str]] = {
    "id": (
        "The job's name, unique among jobs that have not ended. Not given: elasticd submit generates one; a [[job]] "
        "in agent.toml needs one.",
        '"llm-7b"',
    ),
    "command": ("The script and its arguments. A relative script is looked up in workdir.", '["train.py", "--lr=0.1"]'),
    "workdir": ("The working directory of the job, on every node.", '"/home/me/project"'),
    "module": ("The command is a module's name and its arguments, run as python -m does.", "false"),
    "no_python": ("The command is a program and its arguments, started as it is; not with module.", "false"),
    "python": (
        "The interpreter, an absolute path or a name on the job's PATH: that of any virtual environment that has "
        "torch, with or without elasticd. Not given: the agent's own.",
        '"/home/me/venv/bin/python"',
    ),
    "env": (
        "Variables of the job's processes, beside those of the agent that describe the machine. The agent's own "
        "ELASTICD_, PYTHON and systemd variables are not passed on.",
        '{ OMP_NUM_THREADS = "4" }',
    ),
    "user": ("The user the job runs as. Not given: user in the node's agent.toml.", '"me"'),
    "nodes": (
        "Number of nodes, N or MIN:MAX: the job starts with MIN, grows to MAX, and continues while MIN are left.",
        '"2:8"',
    ),
    "workers": ("Number of slots, one worker each, on each node, N or MIN:MAX.", '"1:8"'),
    "checkpoint_dir": (
        "The directory of session.checkpoint(), shared by all nodes of the job; workers find it in "
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
        "Time between SIGTERM and SIGKILL for a stopped worker. The survivors of a broken group get none: they can "
        "only wait for the dead.",
        "",
    ),
    "join_timeout": ("How long the job waits for MIN nodes before it fails.", ""),
    "last_call_timeout": ("How long the job waits for more nodes once MIN have joined.", ""),
    "lease": ("A node counts as lost when it has not renewed its lease for this long.", ""),
    "renewal": ("Interval between two renewals of the lease.", ""),
    "store_timeout": ("Time limit of one request to the store.", ""),
    "seen_timeout": ("A node that has not acknowledged a new round for this long is checked again.", ""),
    "adopt_timeout": ("How long a node without a lease stays a member while its workers train.", ""),
    "store_away": ("How long the job continues while the store is unavailable.", ""),
    "grow_debounce": ("Nodes that join within this time enter the same round.", ""),
    "node_cooloff": ("How long a node that was lost repeatedly waits before it may rejoin; it doubles each time.", ""),
}
"""The help and an example of the keys that are no flags; "" where the default of Policy is the example."""


@dataclass(frozen=True, slots=True)
class KeyDoc:
    """One key. `example`: a possible value; `default`: "" where there is none."""

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
        name, default = field.encode_name, default_toml(field)
        if name in JOB_KEY_HELP:
            text, example = JOB_KEY_HELP[name]
            if not example:
                default = example = f'"{setting_text(getattr(Policy(), POLICY_FIELDS[name]))}"'
            yield KeyDoc(name, text, "" if default in ("[]", "{}") else default, example)
        else:
            flag = flags[name]
            text = re.sub(r"--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), flag.help)
            yield KeyDoc(name, f"{text} {flag.default_reason or ''}".strip(), _default(flag), _example(flag))


def _default(flag: Flag) -> str:
    if isinstance(flag.default, str) and re.fullmatch(r"[0-9.]+[a-z]+|[a-z]+", flag.default):
        return f'"{flag.default}"'
    return "" if flag.default in (None, "", ()) else str(flag.default).lower()


def _example(flag: Flag) -> str:
    return _default(flag) or {"max_restarts": "10"}.get(flag.dest, '"30s"')


# ---- templates


def template(which: Literal["agent", "job"]) -> str:
    """A file with every key in it, commented out except the required ones."""
    return "".join(_agent_template() if which == "agent" else _job_template())


def _agent_template() -> Iterator[str]:
    yield "# agent.toml, for `elasticd agent --config FILE`. Every key is optional; see docs/agent.md.\n"
    yield "# Values shown are the defaults, or an example where there is none.\n"
    table = ""
    for row in agent_keys():
        outer, _, name = row.key.rpartition(".")
        if outer != table:
            table = outer
            yield f"\n[{outer}]\n"
        yield f"\n{_comment(row.help)}#{name} = {row.example}\n"
    yield "\n# Jobs that this node submits by itself; docs/jobs.md has the keys.\n#[[job]]\n"
    for name in ("id", "command", "workdir"):
        yield f"#{name} = {JOB_KEY_HELP[name][1]}\n"


def _job_template() -> Iterator[str]:
    yield "# A job file, for `elasticd submit FILE`. command and workdir are required; see docs/jobs.md.\n"
    yield "# Values shown are the defaults, or an example where there is none.\n"
    for row in job_keys():
        mark = "" if row.key in ("command", "workdir") else "#"
        yield f"\n{_comment(row.help)}{mark}{row.key} = {row.example}\n"


def _comment(text: str) -> str:
    return fill(text, 110, initial_indent="# ", subsequent_indent="# ") + "\n"
