"""docs/torchrun.md, from the tables of flags."""

from __future__ import annotations

from elasticd_agent.config.elasticd_flags import ELASTICD_FLAGS
from elasticd_agent.config.flag import Flag, ValueType
from elasticd_agent.config.torchrun_flags import TORCHRUN_FLAGS

HEAD = """\
# elasticd run and torchrun, option by option

<!-- Written by `make docs` from docs/generate/options.py and agents/elasticd_agent/config/*_flags.py. -->

Any script that runs under `torchrun` runs under `elasticd run`. Each of torchrun's options is honored, accepted without
effect, or refused with a sentence and exit code 2. Spellings with `_` for `-` and the abbreviations of torchrun are
accepted. The `PET_` variable of an option counts where the option is not given, as in torchrun; a switch is `1` or `0`.

`PYTHON_EXEC` names the interpreter, as in torchrun; `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` stands in for
`--shutdown-timeout`. Two variables of torch's agent are honored as well:

- `TORCHELASTIC_ENABLE_FILE_TIMER=1`: workers, and processes that they start, set timers with torch's `FileTimerClient`
  at the path in `TORCHELASTIC_TIMER_FILE`, a named pipe that is made for the job unless the variable is given. A
  process that does not release a timer in time gets the timer's signal, SIGKILL by default. Then torchrun ends itself
  as well. Here the group is restarted as after any other death, and the log names the rank and the timer.
- `TORCHELASTIC_HEALTH_CHECK_PORT`: `/` and `/healthz` on this port, on all addresses, answer 200 while the agent works
  and 503 when it is stuck. A port that cannot be used is a line in the log. (The released torchrun reads the
  variable, and opens no port.)

## Launch lines of other tools

Each of these lines, except the two that are refused, ran beside torchrun on CPUs, on two nodes that are one machine.
They had the same ranks, the same
`GROUP_RANK`, `LOCAL_RANK` and `WORLD_SIZE`, and the same exit code (`tests/torchrun_parity/test_launch_lines.py`;
the tools themselves in `tests/frameworks/test_launchers.py`). Options and variables stay as they are; only the launcher
is another one:

- `elasticd run` in place of `torchrun`, `python -m elasticd_agent run` in place of `python -m torch.distributed.run`.
- A tool that starts `torchrun` by its name takes a script of that name that comes first on `PATH`:
  `printf '#!/bin/sh\nexec elasticd run "$@"\n' > bin/torchrun; chmod +x bin/torchrun; export PATH=$PWD/bin:$PATH`.

| from | its line or environment | with elasticd |
|---|---|---|
"""
TORCHRUNS = """\

## torchrun's options

| option | variable | default | | what it does here |
|---|---|---|---|---|
"""
LAUNCH_LINES = (
    (
        "READMEs, static",
        "`torchrun --nnodes 2 --node-rank 0 --master-addr A --master-port P`",
        "the line; the nodes meet over c10d at A:P",
    ),
    (
        "torchrun's documentation, c10d",
        "`torchrun --nnodes=2 --rdzv-id=J --rdzv-backend=c10d --rdzv-endpoint=A:P`",
        "the line; without an id, the endpoint names the job",
    ),
    (
        "torchrun with `etcd-v2`",
        "`torchrun --rdzv-backend=etcd-v2`",
        "refused; the sentence names `--rdzv-backend etcd`",
    ),
    (
        "`accelerate launch` 1.15",
        "calls torchrun inside its own process",
        '`eval "$(python -m elasticd.integrations.accelerate OPTIONS)"; elasticd run train.py`: OPTIONS are '
        "those of `accelerate launch`, also for several machines",
    ),
    (
        "torchx 0.7, `dist.ddp`",
        "`bash -c \"torchrun --rdzv_backend c10d … --role ''\"`",
        "`torchrun` on `PATH`",
    ),
    (
        "Kubeflow v1 (1.9), Master and Workers",
        "`PET_NODE_RANK`, `PET_MASTER_ADDR` and others, and `MASTER_ADDR`, `RANK`, `WORLD_SIZE`",
        "the command of the container",
    ),
    (
        "Kubeflow v1 (1.9), `elasticPolicy`",
        "`PET_RDZV_BACKEND`, `PET_RDZV_ENDPOINT`, `PET_NNODES=2:3`; no id",
        "the command of the container",
    ),
    (
        "Kubeflow Trainer v2 (2.3)",
        "`PET_NNODES`, `PET_NPROC_PER_NODE`, `PET_NODE_RANK`, `PET_MASTER_ADDR`, `PET_MASTER_PORT`",
        "the command of the container",
    ),
    (
        "SkyPilot",
        "`torchrun --nnodes=$SKYPILOT_NUM_NODES --node_rank=${SKYPILOT_NODE_RANK} …`",
        "the line",
    ),
    (
        "Slurm",
        "`srun torchrun --nnodes 2 --rdzv_id $RANDOM --rdzv_backend c10d …`",
        "the line, with `--kill-on-bad-exit=0 --wait=0`: a cluster with `KillOnBadExit=1` or `WaitTime=5` "
        "ends all nodes once one has ended. `tests/examples/test_slurm.py` runs `examples/slurm.sbatch` "
        "against both settings",
    ),
    (
        "Ray, a task that calls torchrun",
        '`subprocess.call(["torchrun", "--node_rank=0", …])`, with Ray Train\'s `RANK`, `WORLD_SIZE` and `MASTER_ADDR`',
        "`torchrun` on `PATH`",
    ),
    (
        "`deepspeed --num_gpus`",
        "`deepspeed --num_gpus 8 train.py`",
        "refused; the sentence names `--nproc-per-node`",
    ),
    (
        "ultralytics 8.4",
        "`python -m torch.distributed.run --nproc_per_node 2 --master_port P FILE`, started by "
        "`model.train(device=[0, 1])`",
        "the line, with the training in a script; `model.train()` starts torchrun by its interpreter, where "
        "nothing can take its place",
    ),
    (
        "Lightning 2.6",
        "`TorchElasticEnvironment` in any of these lines",
        "the script finds what it finds under torchrun",
    ),
)
"""From where, the line or environment, and what it is with elasticd."""
OWN = """
## elasticd's own options

These cannot be abbreviated, so that torchrun's abbreviations keep their meaning. Only `--event-log` and `--run`,
written in full, are elasticd's and no longer short for `--event-log-handler` and `--run-path`. A TIME is in seconds, or
has a unit: `500ms`, `5s`, `2m`, `1.5h`, `1d`.

| option | default | what it does |
|---|---|---|
"""


def page() -> str:
    theirs = "\n".join(_row(flag, torchrun=True) for flag in TORCHRUN_FLAGS)
    lines = "\n".join(f"| {' | '.join(row)} |" for row in LAUNCH_LINES)
    return (
        HEAD
        + lines
        + "\n"
        + TORCHRUNS
        + theirs
        + "\n"
        + OWN
        + "\n".join(_row(flag, torchrun=False) for flag in ELASTICD_FLAGS)
        + "\n"
    )


def _row(flag: Flag, *, torchrun: bool) -> str:
    names = ", ".join(f"`{name}`" for name in flag.documented_spellings)
    switch = flag.value_type is ValueType.SWITCH
    default = "off" if switch else "–" if flag.default in (None, "", ()) else f"`{flag.default}`"
    text = " ".join(filter(None, (flag.help, flag.default_reason))).replace("|", "\\|")
    if not torchrun:
        return f"| {names} | {default} | {text} |"
    variable = f"`{flag.variable}`" if flag.variable else "–"
    return f"| {names} | {variable} | {default} | {flag.treatment.value} | {text} |"
