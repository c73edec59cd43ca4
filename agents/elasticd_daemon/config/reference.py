"""The keys of agent.toml and of job files in words, for docs/agent.md, docs/jobs.md and `elasticd config example`.

The reference is made from the structs that decode the files, so it cannot name a key that does not exist, or miss one.
A key that is a flag of `elasticd run` has the flag's help; a key without a flag has its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import fill
from typing import Literal

import msgspec

from elasticd_agent.config.elasticd_flags import ELASTICD_FLAGS
from elasticd_agent.config.flag import Flag
from elasticd_agent.config.run_model import POLICY_FIELDS
from elasticd_agent.config.torchrun_flags import TORCHRUN_FLAGS
from elasticd_agent.model.job import Policy
from elasticd_agent.system.durations import format_duration
from elasticd_daemon.config.agent_settings import NodeSettings
from elasticd_daemon.config.decode import default_toml, meta_of
from elasticd_daemon.config.job_file import JobFile
from elasticd_daemon.config.load import config_keys


@dataclass(frozen=True, slots=True)
class KeyDoc:
    """One key. `example`: a possible value; `default`: "" where there is none."""

    key: str
    help: str
    default: str
    example: str
    reloadable: bool = False


def agent_keys() -> Iterator[KeyDoc]:
    """Yield the keys of agent.toml, in the order of the file."""
    for key, field in config_keys(NodeSettings):
        meta = meta_of(field)
        default = default_toml(field)
        yield KeyDoc(key, meta.help, "" if default == "[]" else default, meta.example or default, meta.reloadable)


def job_keys() -> Iterator[KeyDoc]:
    """Yield the keys of a job file, in the order of the file."""
    flags = {flag.dest: flag for flag in (*TORCHRUN_FLAGS, *ELASTICD_FLAGS)}
    for field in msgspec.structs.fields(JobFile):
        name, default, meta = field.encode_name, default_toml(field), meta_of(field)
        if meta.help:
            if name in POLICY_FIELDS:
                default = f'"{format_duration(getattr(Policy(), POLICY_FIELDS[name]))}"'
            yield KeyDoc(name, meta.help, "" if default in ("[]", "{}") else default, meta.example or default)
        else:
            flag = flags[name]
            text = re.sub(r"--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), flag.help)
            default = _flag_default(flag)
            example = default or {"max_restarts": "10"}.get(name, '"30s"')
            yield KeyDoc(name, f"{text} {flag.default_reason or ''}".strip(), default, example)


def _flag_default(flag: Flag) -> str:
    if isinstance(flag.default, str) and re.fullmatch(r"[0-9.]+[a-z]+|[a-z]+", flag.default):
        return f'"{flag.default}"'
    return "" if flag.default in (None, "", ()) else str(flag.default).lower()


# ---- templates


def template(which: Literal["agent", "job"]) -> str:
    """A file with every key in it, commented out except the required ones."""
    return "".join(_agent_template() if which == "agent" else _job_template())


def _agent_template() -> Iterator[str]:
    yield "# agent.toml, for `elasticd agent --config FILE`. Every key is optional; see elasticd docs agent.\n"
    yield "# Values shown are the defaults, or an example where there is none.\n"
    table = ""
    for row in agent_keys():
        outer, _, name = row.key.rpartition(".")
        if outer != table:
            table = outer
            yield f"\n[{outer}]\n"
        yield f"\n{_comment(row.help)}#{name} = {row.example}\n"


def _job_template() -> Iterator[str]:
    yield "# A job file, for `elasticd submit FILE`. command and workdir are required; see elasticd docs jobs.\n"
    yield "# Values shown are the defaults, or an example where there is none.\n"
    for row in job_keys():
        mark = "" if row.key in ("command", "workdir") else "#"
        yield f"\n{_comment(row.help)}{mark}{row.key} = {row.example}\n"


def _comment(text: str) -> str:
    return fill(text, 110, initial_indent="# ", subsequent_indent="# ") + "\n"
