"""`elasticd config`: checks agent.toml or a job file, and prints templates. It starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.config.command_parser import CommandParser
from elasticd_agent.model.phrases import listing
from elasticd_daemon.config.agent_settings import NodeSettings
from elasticd_daemon.config.documents import format_of, parse
from elasticd_daemon.config.job_file import read_job
from elasticd_daemon.config.load import DEFAULT_FILE, MAX_CONFIG_BYTES, load, read_config, read_overrides


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
        file = options.file or DEFAULT_FILE
        print(f"{file}: nothing is wrong with it; {_check_file(file, options.kind, environ)}")
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        "config",
        "check reads FILE, an agent's configuration or a job file, and prints one line: that nothing is wrong with it, "
        "or the error. example prints a file with every key in it.",
        "Exit codes: 0 valid, 2 invalid. More: elasticd docs agent, elasticd docs jobs",
    )
    parser.add_argument("verb", choices=("check", "example"))
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help=f"default: {DEFAULT_FILE}")
    kind = parser.add_mutually_exclusive_group()
    for name, what in (("job", "a job file"), ("agent", "an agent's configuration")):
        text = f"it is {what}; otherwise the content tells the kind of file"
        kind.add_argument(f"--{name}", dest="kind", action="store_const", const=name, help=text)
    return parser


def _check_file(file: Path, given: str | None, environ: Mapping[str, str]) -> str:
    kind = format_of(file.name)
    data, _ = read_config(file)
    if (given or ("job" if "command" in parse(data, kind, str(file), MAX_CONFIG_BYTES) else "agent")) == "job":
        read_job(data, kind, str(file))
        return "it is a job file"
    load(file, environ)
    overrides = [override.name for override in read_overrides(NodeSettings, environ).values()]
    instead = f"; these variables count more than it: {listing(overrides, None)}" if overrides else ""
    return f"it is an agent's configuration{instead}"
