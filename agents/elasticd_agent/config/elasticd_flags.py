"""The options of `elasticd run` that torchrun does not have: for the parser, --help and docs/torchrun.md."""

from __future__ import annotations

from functools import partial

from elasticd_agent.config.flag import Flag, ValueType
from elasticd_agent.model.job import Policy
from elasticd_agent.system.durations import format_duration

_DEFAULT_POLICY = Policy()
_elasticd_flag = partial(Flag, is_from_torchrun=False)

ELASTICD_FLAGS: tuple[Flag, ...] = (
    _elasticd_flag(
        "--checkpoint-dir DIR",
        "Where session.checkpoint() writes: a directory, or s3://BUCKET/PREFIX, gs://…, az://…; the workers find it in "
        "ELASTICD_CHECKPOINT_DIR, which counts where the option is not given.",
    ),
    _elasticd_flag(
        "--preload MOD,…",
        "Modules imported once, before the workers are forked; may be repeated.",
        value_type=ValueType.LIST,
        default=(),
        is_repeatable=True,
    ),
    _elasticd_flag(
        "--integrate WHAT",
        "auto: Hugging Face Trainer and Lightning get elasticd's callback without a line in the script (elasticd docs "
        "frameworks); needs --checkpoint-dir and a fixed number of workers.",
        default="off",
        choices=("off", "auto"),
    ),
    _elasticd_flag("--event-log FILE", "Appends one JSON object per event to FILE (elasticd docs events)."),
    _elasticd_flag(
        "--metrics-port PORT", "Serves Prometheus metrics on this port; 0 for a free one.", value_type=ValueType.INT
    ),
    _elasticd_flag("--metrics-addr ADDR", "The address metrics are served on.", default="127.0.0.1"),
    _elasticd_flag(
        "--max-restarts-per-hour N",
        "Restarts within one hour before the job is given up; without effect when --max-restarts is given.",
        value_type=ValueType.INT,
        default=_DEFAULT_POLICY.max_restarts_per_hour,
    ),
    _elasticd_flag(
        "--preemption-notices SERVICE,…",
        "Services that are asked whether this machine is about to be taken away: aws, gcp, azure, kubernetes, or "
        "SERVICE=URL. A notice is a SIGTERM with a reason: the job saves, and continues on other nodes or stops.",
        value_type=ValueType.LIST,
        default=(),
    ),
    _elasticd_flag("--no-live", "Accepted and ignored: log lines are plain on a terminal, too."),
    _elasticd_flag("--quiet", "Only warnings and errors of elasticd; the workers' output is not changed."),
    _elasticd_flag(
        "--run TOKEN",
        "A token of this run of the job: only one run at a time may use a checkpoint directory. "
        "Default: a random one. For several nodes a number, the same on all, higher for a later run; default: "
        "SLURM_RESTART_COUNT, else 0.",
    ),
    _elasticd_flag(
        "--node-id NAME",
        "This node's unique name within the job. Default: the host name; a job's second agent on a host is HOST-2.",
    ),
    _elasticd_flag(
        "--replace-timeout TIME",
        "How long a job with fewer than MIN nodes left waits for more before it fails; 10m if not given.",
    ),
    _elasticd_flag(
        "--hold-timeout TIME",
        "How long the workers pause, right after a checkpoint, for the round with joining nodes, before they continue "
        "without them; 30s if not given.",
    ),
    _elasticd_flag(
        "--grow WHEN",
        "When joining nodes, and slots that are usable again, are added. auto: at once where a checkpoint is attached, "
        "so that no step is lost, else at the next restart; always: at once, even if that loses steps; never: only at "
        "a restart.",
        default=_DEFAULT_POLICY.grow,
        choices=("auto", "always", "never"),
    ),
    _elasticd_flag(
        "--spares K",
        "Nodes beyond MAX of --nnodes that stand by: their workers run the script up to session.run(), and take the "
        "place of lost ones at once. For a job on one node: slots beyond MAX of --nproc-per-node.",
        value_type=ValueType.INT,
        default=0,
    ),
    _elasticd_flag(
        "--hang-floor TIME",
        "No group counts as hung before this time without progress, however short the steps, and any may be ended "
        "after it; stopped processes have --stopped-after. Not given: 5s to 60s, by the evidence, and where a kill may "
        "cost more than the wait a hang is only reported (elasticd docs hangs).",
    ),
    _elasticd_flag(
        "--hang-factor F",
        "A hang is suspected when no rank makes progress for this many times the longest recent step.",
        value_type=ValueType.FLOAT,
        default=_DEFAULT_POLICY.hang_factor,
    ),
    _elasticd_flag(
        "--stopped-after TIME",
        "A worker that has been stopped (state T, as by SIGSTOP; not by a debugger) for this time is hung.",
        default=format_duration(_DEFAULT_POLICY.stopped_after_s),
    ),
    _elasticd_flag(
        "--slow-ceiling TIME",
        "A straggler that uses its CPU or disk counts as slow, not hung, until this time has passed "
        "without progress. Not given: the process group's own timeout where a rank waits in a collective, else 30m, or "
        "that timeout if it is longer.",
    ),
    _elasticd_flag(
        "--slow-factor F",
        "A rank whose own work takes more than this many times its peers' is reported as a straggler by a log line, an "
        "event and a metric, and nothing else.",
        value_type=ValueType.FLOAT,
        default=_DEFAULT_POLICY.slow_factor,
    ),
    _elasticd_flag(
        "--evidence-timeout TIME",
        "Longest time to gather stacks and logs of a hung group before it is ended.",
        default=format_duration(_DEFAULT_POLICY.evidence_timeout_s),
    ),
    _elasticd_flag(
        "--on-hang WHAT",
        "The reaction to a hang: restart the group, or only report it (a log line, an event, the evidence).",
        default=_DEFAULT_POLICY.on_hang,
        choices=("restart", "report"),
    ),
    _elasticd_flag(
        "--startup-ceiling TIME",
        "Longest time without progress before the process group exists (imports, init_process_group), for a script "
        "known to train: by elasticd.init(), by init_process_group, by an earlier round.",
        default=format_duration(_DEFAULT_POLICY.startup_ceiling_s),
    ),
    _elasticd_flag(
        "--first-step-ceiling TIME",
        "Longest time without progress of such a script from then to its first step: loading, a compile, the data of a "
        "first epoch.",
        default=format_duration(_DEFAULT_POLICY.first_step_ceiling_s),
    ),
    _elasticd_flag(
        "--progress-ceiling TIME",
        "Longest time without progress while there is no history to learn from: after the first steps, and in the "
        "first evaluation and the first checkpoint.",
        default=format_duration(_DEFAULT_POLICY.progress_ceiling_s),
    ),
)
