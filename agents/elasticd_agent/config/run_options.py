"""The command line of `elasticd run`, parsed into a RunModel.

The parser is made from the tables in torchrun_flags.py and elasticd_flags.py and follows argparse wherever torchrun
does. It touches neither the disk nor the network (preflight.py does) and never imports torch.

A command line that works with torchrun works here: same names, same spellings, same abbreviations, same PET_ variables,
same defaults. A flag of torchrun is honored, accepted without effect, or refused with a sentence; which one is a column
of the table, and docs/torchrun.md is generated from it. Flags of our own cannot be abbreviated, since a new one could
make an abbreviation of torchrun's ambiguous.

What the values mean is decided here and nowhere else: the number of workers for `gpu` or `auto`, the address of the
workers' store, streams and filters for each rank. The rest of the agent reads a JobSpec and never an option.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from elasticd.checkpointing.storage.object_url import resolve
from elasticd.errors import UsageError
from elasticd_agent.config.elasticd_flags import ELASTICD_FLAGS
from elasticd_agent.config.flag import Flag, Treatment, ValueType
from elasticd_agent.config.notice_options import parse_notice_service
from elasticd_agent.config.quantities import parse_count_range
from elasticd_agent.config.rendezvous_options import RendezvousOptions, read_rendezvous
from elasticd_agent.config.run_model import POLICY_FIELDS, RunModel, job_id_prefix, policy_with, preloaded_modules
from elasticd_agent.config.torchrun_flags import TORCHRUN_FLAGS
from elasticd_agent.model.job import EntrypointMode, JobSpec, RunnerSettings, Streams
from elasticd_agent.model.phrases import did_you_mean
from elasticd_agent.system.durations import parse_duration
from elasticd_agent.system.gpus.devices import cpu_count, visible_gpus

_USAGE_HEAD = """\
usage: elasticd run [options] SCRIPT [script's arguments]

Runs SCRIPT in several worker processes, as torchrun does, and restarts them in a fraction of a second when one fails.
With --max-restarts N the job is given up after N restarts; without it, after 3 in a row without progress (no new
highest step, no new checkpoint) or after more than --max-restarts-per-hour (60).
Several nodes are one job when the same command is started on each, with a place to meet:
  elasticd run --nnodes 2:8 --rdzv-backend etcd --rdzv-endpoint HOST:2379 --rdzv-id JOB train.py
Exit code: 0 succeeded, 1 the job failed, 2 usage, 75 requeue the job, 128+n stopped by signal n.
"""


_JOB_VARIABLE = "ELASTICD_JOB"
"""A worker's: the directory in its environment is that of its own job, and not of one that it starts."""


class RunParser(argparse.ArgumentParser):
    """argparse, but a mistake is a UsageError, and our own options cannot be abbreviated (see docs/torchrun.md)."""

    def error(self, message: str) -> NoReturn:
        """Raise a mistake of the command line as UsageError: one line and exit code 2."""
        # argparse's "the following arguments are required: …"; from Python 3.13 on it names only the first one.
        if message.endswith(("training_script", "training_script_args")):
            message = "the script to run is missing, as in: elasticd run train.py"
        raise UsageError(message)

    def format_help(self) -> str:
        return help_text()

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # --max-r must go on meaning --max-restarts: argparse only asks here for what is not spelled out.
        own = {flag.dest for flag in ELASTICD_FLAGS}
        return [match for match in super()._get_option_tuples(option_string) if match[0].dest not in own]


def build_parser(environ: Mapping[str, str]) -> RunParser:
    """The parser; PET_ variables in `environ` are its defaults. Raises UsageError when one of them makes no sense."""
    parser = RunParser(prog="elasticd run")
    for flag in (*TORCHRUN_FLAGS, *ELASTICD_FLAGS):
        default = _default_or_variable(flag, environ)
        if flag.value_type is ValueType.SWITCH:
            parser.add_argument(*flag.all_spellings, action="store_true", default=default)
        else:
            parser.add_argument(
                *flag.all_spellings,
                action="append" if flag.is_repeatable else "store",
                type=_PARSERS[flag.value_type],
                default=None if flag.is_repeatable else default,
                choices=flag.choices,
            )
    parser.add_argument("training_script", type=str)
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def parse_run(argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> RunModel:
    """Return the request of `elasticd run argv…`.

    Raises UsageError; --help prints and raises SystemExit(0).
    """
    parsed, unknown = build_parser(environ).parse_known_args(list(argv))
    if unknown:
        raise UsageError(_unknown_option_error(unknown[0]))
    if _JOB_VARIABLE not in environ:
        parsed.checkpoint_dir = parsed.checkpoint_dir or environ.get("ELASTICD_CHECKPOINT_DIR") or None
    for flag in TORCHRUN_FLAGS:
        if flag.treatment is Treatment.REFUSED and getattr(parsed, flag.dest) != flag.default:
            raise UsageError(f"{flag.documented_spellings[-1]} is not supported: {flag.help}")
    options = read_rendezvous(parsed, environ, cwd)
    given = {field: getattr(parsed, option, None) for option, field in POLICY_FIELDS.items()}
    given |= {"shutdown_timeout_s": _shutdown_timeout_s(parsed, environ), **options.policy_fields}
    policy = policy_with({field: value for field, value in given.items() if value is not None})
    settings = RunnerSettings(
        event_log=_absolute_path(parsed.event_log, cwd),
        metrics_port=parsed.metrics_port,
        metrics_addr=parsed.metrics_addr,
        quiet=parsed.quiet,
        notice_services=tuple(map(parse_notice_service, parsed.preemption_notices)),
    )
    return RunModel(_job_spec(parsed, options, environ, cwd), policy, settings)


def help_text() -> str:
    """The text of --help, from the tables."""
    from textwrap import fill  # only --help needs it

    def entry(flag: Flag) -> str:
        says = flag.help
        if flag.default not in (None, "", (), False) and flag.treatment is Treatment.HONORED:
            says += f" Default: {flag.default}."
        return f"  {flag.usage}\n" + fill(says, 108, initial_indent=" " * 8, subsequent_indent=" " * 8)

    def section(title: str, flags: Sequence[Flag]) -> str:
        return "\n".join([f"\n{title}:", *(entry(flag) for flag in flags)])

    honored = [flag for flag in TORCHRUN_FLAGS if flag.treatment is Treatment.HONORED]
    idle = ", ".join(flag.documented_spellings[-1] for flag in TORCHRUN_FLAGS if flag.treatment is Treatment.NO_EFFECT)
    refused = ", ".join(flag.documented_spellings[-1] for flag in TORCHRUN_FLAGS if flag.treatment is Treatment.REFUSED)
    return "\n".join(
        [
            _USAGE_HEAD.rstrip("\n"),
            section("elasticd's own options", ELASTICD_FLAGS),
            section("torchrun's options (or their PET_ variables)", honored),
            f"\nAccepted, without effect: {idle}.\nRefused, each with its reason:\n{refused}.\n",
        ]
    )


# ---- values


def _parse_list(text: str) -> tuple[str, ...]:
    """Split a list at its commas; a doubled comma is one that belongs to an item."""
    return tuple(item.replace("\0", ",") for item in text.replace(",,", "\0").split(","))


_parse_list.__name__ = "list"  # argparse puts it into "invalid … value"


def _parse_seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time as in 500ms, 5s, 2m or 1.5h") from None


_PARSERS: Mapping[ValueType, Any] = {
    ValueType.TEXT: str,
    ValueType.INT: int,
    ValueType.FLOAT: float,
    ValueType.DURATION: _parse_seconds,
    ValueType.LIST: _parse_list,
}


def _default_or_variable(flag: Flag, environ: Mapping[str, str]) -> Any:
    """Return a flag's default, or the value of its PET_ variable. Raises UsageError where that makes no sense."""
    text = environ.get(flag.variable) if flag.variable else None
    if text is None:
        return flag.default
    try:
        value = bool(int(text)) if flag.value_type is ValueType.SWITCH else _PARSERS[flag.value_type](text)
    except ValueError:
        expected = "1 or 0" if flag.value_type is ValueType.SWITCH else f"a valid {flag.value_type.value}"
        raise UsageError(f"{flag.variable}={text!r} must be {expected}") from None
    if flag.choices and value not in flag.choices:
        raise UsageError(f"{flag.variable}={text!r} must be one of {', '.join(flag.choices)}")
    return value


_OTHER_LAUNCHERS_OPTIONS = {  # of deepspeed and accelerate launch
    **dict.fromkeys(("num-gpus", "num-accelerators", "num-processes"), "--nproc-per-node N, for each node"),
    **dict.fromkeys(("num-nodes", "num-machines"), "--nnodes N"),
    **dict.fromkeys(("hostfile", "include", "exclude"), "the same command on each node, with --rdzv-endpoint"),
    "machine-rank": "--node-rank N",
    "main-process-ip": "--master-addr A",
    "main-process-port": "--master-port P",
}


def _unknown_option_error(option: str) -> str:
    spelled = option.split("=", 1)[0]
    if instead := _OTHER_LAUNCHERS_OPTIONS.get(spelled.lstrip("-").replace("_", "-")):
        return f"{spelled} is another launcher's option; write {instead}"
    names = [name for flag in (*TORCHRUN_FLAGS, *ELASTICD_FLAGS) for name in flag.documented_spellings]
    return f"unknown option {spelled}; {did_you_mean(spelled, names, 'elasticd run --help lists them')}"


def _absolute_path(text: str | None, cwd: Path) -> Path | None:
    return None if text is None else cwd / text


# ---- what it means


def _job_spec(parsed: argparse.Namespace, options: RendezvousOptions, environ: Mapping[str, str], cwd: Path) -> JobSpec:
    """Return the job that the options describe, with paths made absolute and ids chosen."""
    low, high = _parse_nproc(parsed.nproc_per_node, environ)
    # torchrun leaves every GPU visible to every worker; we do, too, unless slots can be set aside or have one GPU each.
    slots = high + (parsed.spares if options.rendezvous.max_nodes == 1 else 0)
    gpus = visible_gpus(environ) if low < slots or parsed.virtual_local_rank else ()
    if high <= len(gpus) < slots:
        raise UsageError(f"--spares {parsed.spares}: {high} workers leave {len(gpus) - high} of {len(gpus)} GPUs free")
    mode = _mode(parsed)
    if parsed.integrate == "auto":
        _check_integration(parsed, mode, low < high or options.rendezvous.min_nodes < options.rendezvous.max_nodes)
    address, port = _round_store_address(parsed) if options.rendezvous.backend == "memory" else ("localhost", None)
    if parsed.log_dir == os.devnull and (parsed.redirects, parsed.tee) != ("0", "0"):
        raise UsageError(f"--log-dir {os.devnull} keeps no log files: --redirects and --tee have nothing to write to")
    return JobSpec(
        python=environ.get("PYTHON_EXEC", sys.executable),
        mode=mode,
        entrypoint=parsed.training_script,
        args=tuple(parsed.training_script_args),
        cwd=cwd,
        job_id=options.job_id or f"{job_id_prefix(parsed.training_script, parsed.module)}-{os.urandom(4).hex()}",
        run=os.urandom(8).hex() if options.run is None else options.run,
        role=parsed.role,
        min_workers=low,
        max_workers=high,
        spares=parsed.spares,
        devices=gpus[:slots] if len(gpus) >= slots else (),
        checkpoint_dir=None if parsed.checkpoint_dir is None else resolve(cwd / parsed.checkpoint_dir),
        preload=_parse_preload(parsed.preload or []),
        integrate=parsed.integrate == "auto",
        log_dir=_absolute_path(parsed.log_dir or None, cwd),
        redirects=_parse_streams("--redirects", parsed.redirects, high),
        tee=_parse_streams("--tee", parsed.tee, high),
        local_ranks_filter=_parse_local_ranks(parsed.local_ranks_filter),
        duplicate_stdout_filters=parsed.duplicate_stdout_filters,
        duplicate_stderr_filters=parsed.duplicate_stderr_filters,
        master_addr=address,
        master_port=port,
        virtual_local_rank=parsed.virtual_local_rank,
        numa_binding=parsed.numa_binding,
        signals=tuple(dict.fromkeys(name.strip() for name in parsed.signals_to_handle.split(","))),
        rendezvous=options.rendezvous,
    )


def _check_integration(parsed: argparse.Namespace, mode: EntrypointMode, world_size_varies: bool) -> None:
    """Refuse what the callbacks' defaults cannot keep: the global batch follows from the number of ranks."""
    if parsed.checkpoint_dir is None:
        raise UsageError("--integrate auto needs --checkpoint-dir, where the callbacks save")
    if world_size_varies:
        raise UsageError(
            "--integrate auto takes the global batch from the number of workers, and a range lets that change: give "
            "one number, or write the callback with global_batch= into the script (elasticd docs frameworks)"
        )
    if mode is EntrypointMode.EXEC:
        raise UsageError("--integrate auto is for Python scripts, and --no-python starts a program")


def _mode(parsed: argparse.Namespace) -> EntrypointMode:
    if parsed.run_path:
        return EntrypointMode.SCRIPT
    if parsed.no_python and parsed.module:
        raise UsageError("--no-python and -m contradict each other: a module needs Python to run it")
    return (
        EntrypointMode.EXEC if parsed.no_python else EntrypointMode.MODULE if parsed.module else EntrypointMode.SCRIPT
    )


def _parse_nproc(text: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the least and the most workers of this node, from a number, a range, or torchrun's words."""
    counts = [
        str(_count_devices(word, environ)) if word in ("gpu", "cpu", "auto") else word for word in text.split(":")
    ]
    try:
        return parse_count_range(":".join(counts))
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {error}") from None


def _count_devices(kind: str, environ: Mapping[str, str]) -> int:
    """Return how many workers `gpu`, `cpu` or `auto` mean on this machine."""
    gpus = 0 if kind == "cpu" else len(visible_gpus(environ))
    if kind == "gpu" and not gpus:
        raise UsageError("--nproc-per-node gpu: no NVIDIA GPU can be seen from here; give a number, or cpu")
    return gpus or cpu_count()


def _round_store_address(parsed: argparse.Namespace) -> tuple[str, int | None]:
    """The address where the workers' store listens, and MASTER_ADDR, on one node: torchrun's rules."""
    if parsed.standalone or parsed.rdzv_backend != "static":
        return "localhost", None
    if parsed.rdzv_endpoint:
        host, colon, port = parsed.rdzv_endpoint.rpartition(":")
        if not colon or not port.isdigit():
            raise UsageError(f"--rdzv-endpoint {parsed.rdzv_endpoint!r} is not HOST:PORT")
        address, number = host, int(port)
    elif parsed.master_port is not None:
        address, number = parsed.master_addr, parsed.master_port
    else:
        return "localhost", None
    return address.strip("[]") or "localhost", number or None


def _parse_streams(option: str, text: str, workers: int) -> dict[int, Streams]:
    """Return the streams that go to a file or to the console, by local rank."""
    if re.fullmatch("[0-3]", text):
        return dict.fromkeys(range(workers), Streams(int(text))) if text != "0" else {}
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise UsageError(f"{option} {text!r} is neither 0, 1, 2, 3 nor RANK:STREAMS,… as in 0:3,1:1")
    pairs = (item.split(":") for item in text.split(","))
    return {int(rank): Streams(int(streams)) for rank, streams in pairs}


def _parse_local_ranks(text: str) -> frozenset[int] | None:
    """Return the local ranks whose output is shown; None for all."""
    if not text:
        return None
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdigit() for item in items):
        raise UsageError(f"--local-ranks-filter {text!r} is not a list of local ranks as in 0,1,2")
    return frozenset(map(int, items))


def _parse_preload(given: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    try:
        return preloaded_modules(name for group in given for name in group)
    except UsageError as error:
        raise UsageError(f"--{error}") from None


def _shutdown_timeout_s(parsed: argparse.Namespace, environ: Mapping[str, str]) -> float | None:
    """None: Policy's default."""
    name, seconds = "--shutdown-timeout", parsed.shutdown_timeout
    if seconds is None:
        name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        if (text := environ.get(name)) is None:
            return None
        try:
            seconds = int(text)
        except ValueError:
            raise UsageError(f"{name}={text!r} must be a number of seconds") from None
    if seconds < 0:
        raise UsageError(f"{name} {seconds}: a time cannot be negative; 0 kills at once")
    return float(seconds)
