"""Every option of `elasticd run`, in two tables: torchrun's own, and ours.

They exist so that the parser, the page docs/torchrun.md and the test that compares us with the installed torch all
read the same words. A torchrun option is honored, accepted without effect, or refused with its sentence. Nothing here
parses.

`python -m elasticd_agent.torchrun_flags` prints docs/torchrun.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What follows the option on the command line."""

    TEXT = "text"
    INT = "integer"
    FLOAT = "number"
    LIST = "comma-separated list"  # ",," is a comma inside an item
    SWITCH = "switch"  # nothing follows


class Treatment(Enum):
    """What elasticd does with it."""

    HONORED = "honored"
    NO_EFFECT = "accepted, without effect"
    REFUSED = "refused"  # any value but the default; `says` is the sentence


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. `default` is torchrun's, unless `differs` says why ours is another (and `default` is ours)."""

    names: tuple[str, ...]
    kind: Kind
    says: str
    default: str | int | float | tuple[str, ...] | bool | None = None
    treatment: Treatment = Treatment.HONORED
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    env: bool = True
    differs: str | None = None
    repeatable: bool = False

    @property
    def dest(self) -> str:
        """The name argparse would give it: the first long spelling."""
        long = next(name for name in self.names if name.startswith("--"))
        return long[2:].replace("-", "_")

    @property
    def variable(self) -> str | None:
        """The PET_ environment variable that stands in for the option when it is not given."""
        return f"PET_{self.dest.upper()}" if self.env else None

    @property
    def spellings(self) -> tuple[str, ...]:
        """What help and docs show; the underscore spellings are understood without being repeated everywhere."""
        return tuple(name for name in self.names if "_" not in name)


def _both(dashed: str, *short: str) -> tuple[str, ...]:
    """torchrun spells every option of several words with dashes and with underscores."""
    underscored = "--" + dashed[2:].replace("-", "_")
    return (*short, dashed) if underscored == dashed else (*short, dashed, underscored)


TORCHRUN: tuple[Flag, ...] = (
    Flag(
        _both("--nnodes"),
        Kind.TEXT,
        "This version runs one node: 1 or 1:1; anything else is refused.",
        default="1:1",
        metavar="N",
    ),
    Flag(
        _both("--nproc-per-node"),
        Kind.TEXT,
        "Workers on this node: a number, gpu, cpu, auto, or MIN:MAX (ours): start with MAX, and while a slot keeps "
        "failing go on with fewer, down to MIN. gpu and auto count NVIDIA GPUs, minding CUDA_VISIBLE_DEVICES; xpu and "
        "other accelerators are refused: give the number.",
        default="1",
        metavar="N",
    ),
    Flag(
        _both("--rdzv-backend"),
        Kind.TEXT,
        "static and c10d are the same on one node; others (etcd, etcd-v2, plug-ins) are refused.",
        default="static",
        metavar="NAME",
    ),
    Flag(
        _both("--rdzv-endpoint"),
        Kind.TEXT,
        "With the static backend: HOST:PORT is where the workers' store listens, as --master-addr and --master-port. "
        "With c10d: no effect, nobody needs to be met on one node.",
        default="",
        metavar="HOST:PORT",
    ),
    Flag(
        _both("--rdzv-id"),
        Kind.TEXT,
        "The job's id, TORCHELASTIC_RUN_ID for the workers; none means a random one. (torchrun replaces it by a "
        "random one unless a backend or port is given.)",
        default="none",
        metavar="ID",
    ),
    Flag(
        _both("--rdzv-conf"),
        Kind.TEXT,
        "Read, for its form only: one node has no rendezvous to configure.",
        default="",
        treatment=Treatment.NO_EFFECT,
        metavar="K=V,…",
    ),
    Flag(
        _both("--standalone"),
        Kind.SWITCH,
        "One node, a free port, a random job id; --rdzv-backend, --rdzv-endpoint and --rdzv-id are ignored.",
        default=False,
    ),
    Flag(
        _both("--max-restarts"),
        Kind.INT,
        "Given: a hard total of restarts, as in torchrun. Not given: 3 in a row without progress (no new highest step, "
        "no new checkpoint) and --max-restarts-per-hour.",
        differs="torchrun's default is 0, no restarts at all; a supervisor that gives up at once would be of no use.",
        metavar="N",
    ),
    Flag(
        _both("--monitor-interval"),
        Kind.FLOAT,
        "The end of a worker is seen when it happens; nothing is polled.",
        default=0.1,
        treatment=Treatment.NO_EFFECT,
        metavar="S",
    ),
    Flag(
        _both("--start-method"),
        Kind.TEXT,
        "Concerns Python functions, which torchrun's command line never starts either.",
        default="spawn",
        treatment=Treatment.NO_EFFECT,
        choices=("spawn", "fork", "forkserver"),
        metavar="NAME",
    ),
    Flag(
        _both("--event-log-handler"),
        Kind.TEXT,
        "torch's event handlers run inside torchrun's process; use --event-log FILE for one JSON object per event.",
        default="null",
        treatment=Treatment.REFUSED,
        metavar="NAME",
    ),
    Flag(
        _both("--role"),
        Kind.TEXT,
        "The workers' role, ROLE_NAME in their environment.",
        default="default",
        metavar="NAME",
    ),
    Flag(_both("--module", "-m"), Kind.SWITCH, "The script is a module's name, run as python -m does.", default=False),
    Flag(_both("--no-python"), Kind.SWITCH, "The script is a program, started as it is; not with -m.", default=False),
    Flag(
        _both("--run-path"),
        Kind.SWITCH,
        "Runs the script as a script: that is what runpy.run_path imitates. Overrides --no-python and -m.",
        default=False,
    ),
    Flag(
        _both("--log-dir"),
        Kind.TEXT,
        "Where worker logs go, in a directory per job, round and local rank; /dev/null keeps none.",
        metavar="DIR",
    ),
    Flag(
        _both("--redirects", "-r"),
        Kind.TEXT,
        "Which streams go to log files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; or per "
        "local rank, 0:3,1:1.",
        default="0",
        metavar="STREAMS",
    ),
    Flag(
        _both("--tee", "-t"),
        Kind.TEXT,
        "Which streams go to log files and to the console; written as --redirects.",
        default="0",
        metavar="STREAMS",
    ),
    Flag(
        _both("--local-ranks-filter"),
        Kind.TEXT,
        "Local ranks whose output reaches the console, 0,1,2; the log files keep everything.",
        default="",
        metavar="RANKS",
    ),
    Flag(
        _both("--duplicate-stdout-filters"),
        Kind.LIST,
        "Stdout lines that contain one of these words go to filtered_stdout.log as well; ',,' is a comma in a word.",
        default=(),
        metavar="WORDS",
    ),
    Flag(
        _both("--duplicate-stderr-filters"),
        Kind.LIST,
        "Stderr lines that contain one of these words go to filtered_stderr.log as well; ',,' is a comma in a word.",
        default=(),
        metavar="WORDS",
    ),
    Flag(
        _both("--node-rank"),
        Kind.INT,
        "On one node it is 0; another rank is refused where torchrun would mind it (static backend).",
        default=0,
        metavar="N",
    ),
    Flag(
        _both("--master-addr"),
        Kind.TEXT,
        "With --master-port and the static backend: the address of this machine where the workers' store listens.",
        default="127.0.0.1",
        metavar="ADDR",
    ),
    Flag(
        _both("--master-port"),
        Kind.INT,
        "Static backend: the port of the workers' store, 0 for a free one; in use, it is an error. Not given: any.",
        metavar="PORT",
    ),
    Flag(
        _both("--local-addr"),
        Kind.TEXT,
        "Says which address other nodes should use; one node has no others.",
        treatment=Treatment.NO_EFFECT,
        metavar="ADDR",
    ),
    Flag(
        _both("--logs-specs"),
        Kind.TEXT,
        "torch's log plug-ins run inside torchrun's process; --log-dir, --redirects and --tee say where logs go.",
        treatment=Treatment.REFUSED,
        metavar="NAME",
        env=False,
    ),
    Flag(
        _both("--numa-binding"),
        Kind.TEXT,
        "Workers are forked from one warm process, so no numactl can be put in front of each; bind the whole job "
        "(numactl … elasticd run …), or call os.sched_setaffinity in the script.",
        treatment=Treatment.REFUSED,
        choices=("node", "socket", "exclusive", "core-complex"),
        metavar="MODE",
        env=False,
    ),
    Flag(
        _both("--signals-to-handle"),
        Kind.TEXT,
        "Signals that stop the job when sent to elasticd; they are passed on to the workers.",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAMES",
    ),
    Flag(
        _both("--shutdown-timeout"),
        Kind.INT,
        "Seconds a stopped worker has before SIGKILL; else TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30. The survivors of a "
        "broken group get none: they can only wait for the dead.",
        metavar="S",
    ),
    Flag(
        _both("--virtual-local-rank"),
        Kind.SWITCH,
        "Every worker sees LOCAL_RANK=0 and its own GPU as device 0.",
        default=False,
    ),
)

OWN: tuple[Flag, ...] = (
    Flag(
        ("--checkpoint-dir",),
        Kind.TEXT,
        "Where session.checkpoint() writes; the workers find it in ELASTICD_CHECKPOINT_DIR.",
        metavar="DIR",
        env=False,
    ),
    Flag(
        ("--preload",),
        Kind.LIST,
        "Modules imported once, before the workers are forked; may be repeated.",
        default=(),
        metavar="MOD,…",
        env=False,
        repeatable=True,
    ),
    Flag(
        ("--event-log",),
        Kind.TEXT,
        "Appends one JSON object per event to FILE (docs/events.md).",
        metavar="FILE",
        env=False,
    ),
    Flag(
        ("--metrics-port",),
        Kind.INT,
        "Serves Prometheus metrics on this port; 0 for a free one.",
        metavar="PORT",
        env=False,
    ),
    Flag(
        ("--metrics-addr",),
        Kind.TEXT,
        "The address metrics are served on.",
        default="127.0.0.1",
        metavar="ADDR",
        env=False,
    ),
    Flag(
        ("--max-restarts-per-hour",),
        Kind.INT,
        "Restarts within one hour before the job is given up; without effect when --max-restarts is given.",
        default=60,
        metavar="N",
        env=False,
    ),
    Flag(("--no-live",), Kind.SWITCH, "Plain log lines, also on a terminal.", default=False, env=False),
    Flag(
        ("--run",),
        Kind.TEXT,
        "A token that tells this run of the job from others: only the same run may share a checkpoint directory. "
        "Default: a random one.",
        metavar="TOKEN",
        env=False,
    ),
)


def page() -> str:
    """docs/torchrun.md, from the tables."""
    lines = [
        "# elasticd run and torchrun, option by option",
        "",
        "<!-- Written by `make docs` from agents/elasticd_agent/torchrun_flags.py; a test keeps it in step. -->",
        "",
        "Any script that runs under `torchrun` runs under `elasticd run`. Each of torchrun's options is honored,",
        "accepted without effect, or refused with a sentence and exit code 2. Spellings with `_` for `-` are",
        "understood, and so are the abbreviations torchrun understands. Where an option is not given, its `PET_`",
        "variable counts, as in torchrun; `1` or `0` for switches.",
        "",
        "`PYTHON_EXEC` names the interpreter, as in torchrun; `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` stands in for",
        "`--shutdown-timeout`.",
        "",
        "## torchrun's options",
        "",
        "| option | variable | default | | what it does here |",
        "|---|---|---|---|---|",
        *(_row(flag, torchrun=True) for flag in TORCHRUN),
        "",
        "## elasticd's own",
        "",
        "These cannot be abbreviated, so that torchrun's abbreviations keep their meaning; only `--event-log` and",
        "`--run`, spelled out, are ours and no longer short for `--event-log-handler` and `--run-path`.",
        "",
        "| option | default | what it does |",
        "|---|---|---|",
        *(_row(flag, torchrun=False) for flag in OWN),
        "",
    ]
    return "\n".join(lines)


def _row(flag: Flag, *, torchrun: bool) -> str:
    names = ", ".join(f"`{name}`" for name in flag.spellings)
    default = "off" if flag.kind is Kind.SWITCH else "–" if flag.default in (None, "", ()) else f"`{flag.default}`"
    says = " ".join(filter(None, (flag.says, flag.differs))).replace("|", "\\|")
    if not torchrun:
        return f"| {names} | {default} | {says} |"
    variable = f"`{flag.variable}`" if flag.variable else "–"
    return f"| {names} | {variable} | {default} | {flag.treatment.value} | {says} |"


if __name__ == "__main__":
    print(page(), end="")
