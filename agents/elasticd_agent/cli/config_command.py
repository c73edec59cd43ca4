"""`elasticd config`: checks agent.toml or a job file, shows the effective settings, prints templates.

It starts nothing and shows no secret: secrets are in files of their own, and only the names in `env` are shown.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from elasticd.errors import UsageError
from elasticd_agent.config.agent_settings import NodeSettings
from elasticd_agent.config.decode import to_toml
from elasticd_agent.config.documents import format_of, parse
from elasticd_agent.config.env_variables import config_keys, read_overrides
from elasticd_agent.config.job_file import JobFile, job_policy, read_job
from elasticd_agent.config.load import DEFAULT_FILE, MAX_BYTES, load, read_config
from elasticd_agent.config.quantities import Seconds
from elasticd_agent.config.run_model import POLICY_FIELDS
from elasticd_agent.model.job import Policy

_HELP = f"""\
usage: elasticd config check [FILE] [--job | --agent] [--json]
       elasticd config example [--job]

check reads FILE (default: {DEFAULT_FILE}), an agent's configuration or a job file, and shows the effective settings, or
one line with the error. The content tells the kind of file, unless --job or --agent is given. --json is for machines.
example prints a file with every key in it. Exit code: 0 valid, 2 invalid.
"""
_HIDDEN = "…"


def config(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Returns the exit code. Raises UsageError."""
    environ = os.environ if environ is None else environ
    verb, *rest = list(argv) or [""]
    if verb in ("-h", "--help") or "-h" in rest or "--help" in rest:
        print(_HELP, end="")
        return 0
    allowed = {"check": {"--job", "--agent", "--json"}, "example": {"--job", "--agent"}}.get(verb)
    if allowed is None:
        raise UsageError(f"{verb!r} is neither check nor example, as in: elasticd config check {DEFAULT_FILE}")
    options = {word for word in rest if word.startswith("-") and word != "-"}
    files = [word for word in rest if word not in options]
    if options - allowed:
        raise UsageError(f"unknown option {sorted(options - allowed)[0]}; elasticd config --help lists them")
    if {"--job", "--agent"} <= options:
        raise UsageError("--job and --agent contradict each other: a file is one of them")
    if len(files) > (verb == "check"):
        raise UsageError(f"one file at a time, not {files[-1]!r} as well")
    if verb == "example":
        from elasticd_agent.config.reference import template

        print(template("job" if "--job" in options else "agent"), end="")
        return 0
    given = "job" if "--job" in options else "agent" if "--agent" in options else None
    print(_check(Path(files[0]) if files else DEFAULT_FILE, given, "--json" in options, environ), end="")
    return 0


def _check(file: Path, given: str | None, as_json: bool, environ: Mapping[str, str]) -> str:
    kind = format_of(file.name)
    data, _ = read_config(file)
    table = parse(data, kind, str(file), MAX_BYTES)
    what = given or ("job" if "command" in table and "job" not in table else "agent")
    if what == "job":
        values = job_values(read_job(data, kind, str(file)))
        sources = dict.fromkeys(table, "file")
    else:
        values = settings_values(load(file, environ))
        sources = {key: "file" for key, _ in config_keys(NodeSettings) if _has(table, key)}
        sources |= {key: found.name for key, found in read_overrides(NodeSettings, environ, {}).items()}
    if as_json:
        return json.dumps({"file": str(file), "kind": what, "values": values, "sources": sources}, indent=2) + "\n"
    lines = [f"# {file}: nothing is wrong with it; {_FILE_KINDS[what]}. What would count:", *_toml(values, sources)]
    return "\n".join(lines) + "\n"


_FILE_KINDS = {"job": "it is a job file", "agent": "it is an agent's configuration"}


def _has(table: Mapping[str, Any], key: str) -> bool:
    outer, dot, name = key.partition(".")
    return name in table.get(outer, {}) if dot else outer in table


# ---- the values that count


def settings_values(settings: NodeSettings) -> dict[str, Any]:
    """By key, as a file would have them, tables inside; None where nothing is given."""
    return {
        field.encode_name: [job_values(job) for job in value]
        if field.name == "jobs"
        else _table(value)
        if isinstance(value, msgspec.Struct)
        else _plain(value)
        for field, value in _fields(settings)
    }


def _table(struct: msgspec.Struct) -> dict[str, Any]:
    return {field.encode_name: _plain(value) for field, value in _fields(struct)}


def _fields(struct: msgspec.Struct) -> list[tuple[msgspec.structs.FieldInfo, Any]]:
    return [(field, getattr(struct, field.name)) for field in msgspec.structs.fields(type(struct))]


def job_values(job: JobFile) -> dict[str, Any]:
    """By key; what the file does not give is what `elasticd run` would take. Values of variables are not shown."""
    policy, values = job_policy(job), {}
    for field, value in _fields(job):
        name = field.encode_name
        values[name] = _plain(_policy_value(policy, name) if value is None else value)
    values["env"] = dict.fromkeys(job.env, _HIDDEN)
    return values


def _policy_value(policy: Policy, key: str) -> Any:
    field = POLICY_FIELDS.get(key, "")
    value = getattr(policy, field, None)
    return Seconds(value) if value is not None and field.endswith("_s") else value


def _plain(value: Any) -> Any:
    if isinstance(value, (Path, Seconds)):
        return to_toml(value).strip('"')
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _toml(values: Mapping[str, Any], sources: Mapping[str, str], outer: str = "") -> list[str]:
    lines, tables = [], []
    for name, value in values.items():
        key = f"{outer}{name}"
        if isinstance(value, dict) and name != "env":
            tables += ["", f"[{key}]", *_toml(value, sources, f"{key}.")]
        elif name == "job":
            for job in value:
                tables += ["", "[[job]]", *_toml(job, dict.fromkeys(job, "file"), "")]
        else:
            source = "" if sources.get(key) in (None, "file") else f"  # {sources[key]}"
            lines.append(f"#{name}: not given" if value is None else f"{name} = {to_toml(value)}{source}")
    return [*lines, *tables]
