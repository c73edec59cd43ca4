"""The options of `elasticd run` that torchrun does not have, in a table.

It exists so that the parser, --help and docs/torchrun.md read the same words. Nothing here parses.
"""

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
        "A token that tells this run of the job from others: only the same run may share a checkpoint directory. "
        "Default: a random one; for several nodes, which must agree on it, SLURM_RESTART_COUNT, else 0.",
        metavar="TOKEN",
        env=False,
    ),
    Flag(
        ("--node-id",),
        ValueType.TEXT,
        "This node's name among the job's nodes, unlike any other's. Default: the host name.",
        metavar="NAME",
        env=False,
    ),
    Flag(
        ("--replace-timeout",),
        ValueType.DURATION,
        "How long a job with fewer than MIN nodes left waits for others before it is given up; 10m if not given.",
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--hold-timeout",),
        ValueType.DURATION,
        "How long the workers wait, right after a checkpoint, for the round that takes newcomers in, before they go on "
        "as they are; 30s if not given.",
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--grow",),
        ValueType.TEXT,
        "When newcomers are taken in. auto: at once where a checkpoint is attached, so that no step is lost, else at "
        "the next restart; always: at once, even if that loses steps; never: only at a restart.",
        default=_USUAL.grow,
        choices=("auto", "always", "never"),
        metavar="WHEN",
        env=False,
    ),
    Flag(
        ("--hang-floor",),
        ValueType.DURATION,
        "Nobody is taken for hung for making no progress before this time is over, however short the steps; stopped "
        "processes have --stopped-after. Not given: 5s with an attached checkpoint, else 60s, as a wrong restart costs "
        "more there.",
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--hang-factor",),
        ValueType.FLOAT,
        "The group is suspected when no rank makes progress for so many times its longest step of late.",
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
        "A rank that others wait for but that uses its CPU or disk is slow, not hung, until this time has passed "
        "without progress. Not given: the process group's own timeout, 30m where that is unknown.",
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--slow-factor",),
        ValueType.FLOAT,
        "A rank whose own work takes more than so many times what its peers' takes is reported as slow by "
        "a log line, an event and a metric; nothing is done about it.",
        default=_USUAL.slow_factor,
        metavar="F",
        env=False,
    ),
    Flag(
        ("--evidence-timeout",),
        ValueType.DURATION,
        "How long stacks and logs of a hung group may take to gather before it is ended. They are waited for no longer "
        "than they take.",
        default=setting_text(_USUAL.evidence_s),
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--on-hang",),
        ValueType.TEXT,
        "What is done about a hung group: restart it, or only report it (a log line, an event, the evidence).",
        default=_USUAL.on_hang,
        choices=("restart", "report"),
        metavar="WHAT",
        env=False,
    ),
    Flag(
        ("--startup-ceiling",),
        ValueType.DURATION,
        "A script that elasticd.init() or an earlier round has shown to train may be quiet for so long before it makes "
        "its optimizer: imports, loading, init_process_group.",
        default=setting_text(_USUAL.startup_ceiling_s),
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--first-step-ceiling",),
        ValueType.DURATION,
        "Such a script may be quiet for so long before its first step: a compile, a first epoch's data.",
        default=setting_text(_USUAL.first_step_ceiling_s),
        metavar="TIME",
        env=False,
    ),
    Flag(
        ("--progress-ceiling",),
        ValueType.DURATION,
        "A group may be quiet for so long while there is nothing to learn from: after its first steps, and in its "
        "first evaluation and its first checkpoint.",
        default=setting_text(_USUAL.progress_ceiling_s),
        metavar="TIME",
        env=False,
    ),
)
