"""The options of `elasticd run` that torchrun does not have: for the parser, --help and docs/torchrun.md."""

from __future__ import annotations

from elasticd_agent.config.flag import Flag, ValueType
from elasticd_agent.model.job import Policy
from elasticd_agent.system.durations import setting_text

_USUAL = Policy()

ELASTICD_FLAGS: tuple[Flag, ...] = (
    Flag(
        ("--checkpoint-dir",),
        ValueType.TEXT,
        "Where session.checkpoint() writes; the workers find it in ELASTICD_CHECKPOINT_DIR.",
        metavar="DIR",
        env=False,
    ),
    Flag(
        ("--preload",),
        ValueType.LIST,
        "Modules imported once, before the workers are forked; may be repeated.",
        default=(),
        metavar="MOD,…",
        env=False,
        repeatable=True,
    ),
    Flag(
        ("--event-log",),
        ValueType.TEXT,
        "Appends one JSON object per event to FILE (docs/events.md).",
        metavar="FILE",
        env=False,
    ),
    Flag(
        ("--metrics-port",),
        ValueType.INT,
        "Serves Prometheus metrics on this port; 0 for a free one.",
        metavar="PORT",
        env=False,
    ),
    Flag(
        ("--metrics-addr",),
        ValueType.TEXT,
        "The address metrics are served on.",
        default="127.0.0.1",
        metavar="ADDR",
        env=False,
    ),
    Flag(
        ("--max-restarts-per-hour",),
        ValueType.INT,
        "Restarts within one hour before the job is given up; without effect when --max-restarts is given.",
        default=_USUAL.max_restarts_per_hour,
        metavar="N",
        env=False,
    ),
    Flag(("--no-live",), ValueType.SWITCH, "Plain log lines, also on a terminal.", default=False, env=False),
    Flag(
        ("--run",),
        ValueType.TEXT,
        "A token of this run of the job: only one run at a time may use a checkpoint directory. "
        "Default: a random one; for several nodes, which must agree on it, SLURM_RESTART_COUNT, else 0.",
        metavar="TOKEN",
        env=False,
    ),
    Flag(
        ("--node-id",),
        ValueType.TEXT,
        "This node's unique name within the job. Default: the host name; a job's second agent on a host is HOST-2.",
        metavar="NAME",
        env=False,
    ),
    Flag(
        ("--replace-timeout",),
        ValueType.DURATION,
        "How long a job with fewer than MIN nodes left waits for more before it fails; 10m if not given.",
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--hold-timeout",),
        ValueType.DURATION,
        "How long the workers pause, right after a checkpoint, for the round with joining nodes, before they continue "
        "without them; 30s if not given.",
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--grow",),
        ValueType.TEXT,
        "When joining nodes are added. auto: at once where a checkpoint is attached, so that no step is lost, else at "
        "the next restart; always: at once, even if that loses steps; never: only at a restart.",
        default=_USUAL.grow,
        choices=("auto", "always", "never"),
        metavar="WHEN",
        env=False,
    ),
    Flag(
        ("--hang-floor",),
        ValueType.DURATION,
        "No group counts as hung before this time without progress, however short the steps; stopped processes have "
        "--stopped-after. Not given: 5s with an attached checkpoint, else 60s, as a wrong restart costs more there.",
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--hang-factor",),
        ValueType.FLOAT,
        "A hang is suspected when no rank makes progress for this many times the longest recent step.",
        default=_USUAL.hang_factor,
        metavar="F",
        env=False,
    ),
    Flag(
        ("--stopped-after",),
        ValueType.DURATION,
        "A worker that has been stopped (state T, as by SIGSTOP; not by a debugger) for this time is hung.",
        default=setting_text(_USUAL.stopped_after_s),
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--slow-ceiling",),
        ValueType.DURATION,
        "A straggler that uses its CPU or disk counts as slow, not hung, until this time has passed "
        "without progress. Not given: the process group's own timeout, 30m where that is unknown.",
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--slow-factor",),
        ValueType.FLOAT,
        "A rank whose own work takes more than this many times its peers' is reported as a straggler by a log line, an "
        "event and a metric, and nothing else.",
        default=_USUAL.slow_factor,
        metavar="F",
        env=False,
    ),
    Flag(
        ("--evidence-timeout",),
        ValueType.DURATION,
        "Longest time to gather stacks and logs of a hung group before it is ended.",
        default=setting_text(_USUAL.evidence_s),
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--on-hang",),
        ValueType.TEXT,
        "The reaction to a hang: restart the group, or only report it (a log line, an event, the evidence).",
        default=_USUAL.on_hang,
        choices=("restart", "report"),
        metavar="WHAT",
        env=False,
    ),
    Flag(
        ("--startup-ceiling",),
        ValueType.DURATION,
        "Longest time without progress before the optimizer exists (imports, loading, init_process_group), for a "
        "script known to train by elasticd.init() or an earlier round.",
        default=setting_text(_USUAL.startup_ceiling_s),
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--first-step-ceiling",),
        ValueType.DURATION,
        "Longest time without progress of such a script before its first step: a compile, the data of a first epoch.",
        default=setting_text(_USUAL.first_step_ceiling_s),
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--progress-ceiling",),
        ValueType.DURATION,
        "Longest time without progress while there is no history to learn from: after the first steps, and in the "
        "first evaluation and the first checkpoint.",
        default=setting_text(_USUAL.progress_ceiling_s),
        metavar="TIME",
        env=False,
    ),
)
