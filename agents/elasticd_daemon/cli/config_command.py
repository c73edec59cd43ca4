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
from elasticd_agent.config.command_parser import CommandParser
from elasticd_agent.config.quantities import Seconds
from elasticd_agent.config.run_model import POLICY_FIELDS
from elasticd_agent.model.job import Policy
from elasticd_daemon.config.agent_settings import NodeSettings
from elasticd_daemon.config.decode import to_toml
from elasticd_daemon.config.documents import format_of, parse
from elasticd_daemon.config.job_file import JobFile, job_policy, read_job
from elasticd_daemon.config.load import DEFAULT_FILE, MAX_BYTES, config_keys, load, read_config, read_overrides

_HIDDEN = "…"


def config(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Returns the exit code. Raises UsageError."""
    options = build_parser().parse_intermixed_args(argv)
    if options.verb == "example":
        from elasticd_daemon.config.reference import template

        if options.file is not None:
            raise UsageError("example reads no file; it prints one")
        print(template(options.kind or "agent"), end="")
    else:
        environ = os.environ if environ is None else environ
        print(_check(options.file or DEFAULT_FILE, options.kind, options.json, environ), end="")
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        "config",
        "check reads FILE, an agent's configuration or a job file, and shows the effective settings, or one line with "
        "the error. example prints a file with every key in it.",
        "Exit codes: 0 valid, 2 invalid. More: elasticd docs agent, elasticd docs jobs",
    )
    parser.add_argument("verb", choices=("check", "example"))
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help=f"default: {DEFAULT_FILE}")
    kind = parser.add_mutually_exclusive_group()
    for name, what in (("job", "a job file"), ("agent", "an agent's configuration")):
        text = f"it is {what}; otherwise the content tells the kind of file"
        kind.add_argument(f"--{name}", dest="kind", action="store_const", const=name, help=text)
    parser.add_argument("--json", action="store_true", help="with check: the settings for machines")
    return parser


def _check(file: Path, given: str | None, as_json: bool, environ: Mapping[str, str]) -> str:
    kind = format_of(file.name)
    data, _ = read_config(file)
    table = parse(data, kind, str(file), MAX_BYTES)
    what = given or ("job" if "command" in table else "agent")
    if what == "job":
        values = job_values(read_job(data, kind, str(file)))
        sources = dict.fromkeys(table, "file")
    else:
        values = settings_values(load(file, environ))
        sources = {key: "file" for key, _ in config_keys(NodeSettings) if _has(table, key)}
        sources |= {key: override.name for key, override in read_overrides(NodeSettings, environ, {}).items()}
    if as_json:
        return json.dumps({"file": str(file), "kind": what, "values": values, "sources": sources}, indent=2) + "\n"
    lines = [f"# {file}: nothing is wrong with it; {_FILE_KINDS[what]}. What would count:", *_toml(values, sources)]
    return "\n".join(lines) + "\n"


_FILE_KINDS = {"job": "it is a job file", "agent": "it is an agent's configuration"}


def _has(table: Mapping[str, Any], key: str) -> bool:
    outer, dot, name = key.partition(".")
    return name in table.get(outer, {}) if dot else outer in table


def settings_values(settings: NodeSettings) -> dict[str, Any]:
    """The values by key, as a file would have them, tables inside; None where nothing is given."""
    return {
        field.encode_name: _table(value) if isinstance(value, msgspec.Struct) else _plain(value)
        for field, value in _fields(settings)
    }


def _table(struct: msgspec.Struct) -> dict[str, Any]:
    return {field.encode_name: _plain(value) for field, value in _fields(struct)}


def _fields(struct: msgspec.Struct) -> list[tuple[msgspec.structs.FieldInfo, Any]]:
    return [(field, getattr(struct, field.name)) for field in msgspec.structs.fields(type(struct))]


def job_values(job: JobFile) -> dict[str, Any]:
    """The values by key; what the file does not give is what `elasticd run` would take. Values of variables are not
    shown.
    """
    policy, values = job_policy(job), {}
    for field, value in _fields(job):
        name = field.encode_name
        values[name] = _plain(_policy_value(policy, name) if value is None else value)
    values["env"] = dict.fromkeys(job.env, _HIDDEN)
    values["limits"] = {key: value for key, value in _table(job.limits).items() if value is not None}
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
        if isinstance(value, dict) and "command" not in values:  # a job's are inline
            tables += ["", f"[{key}]", *_toml(value, sources, f"{key}.")]
        else:
            source = "" if sources.get(key) in (None, "file") else f"  # {sources[key]}"
            lines.append(f"#{name}: not given" if value is None else f"{name} = {to_toml(value)}{source}")
    return [*lines, *tables]
