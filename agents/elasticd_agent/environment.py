"""The environment a worker sees: torchrun's, variable for variable, and elasticd's own beside it.

Pure. The names and meanings are those of torch.distributed.elastic's local agent (torch 2.13), also where nodes have
different numbers of slots; all nodes of a job have the same role. MASTER_PORT is added when the group starts: by the
owner, which knows where the round's store listens, or with MASTER_ADDR when that store is another node's.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticd.wire import Round


@dataclass(frozen=True, slots=True)
class WorkerPaths:
    """Where one worker's files are."""

    beat: str
    notes: str
    error_file: str


def worker_environment(
    round: Round,
    node: str,
    local_rank: int,
    paths: WorkerPaths,
    *,
    job: str,
    run: str,
    role: str,
    max_restarts: int,
    master_addr: str,
    checkpoint_dir: str | None,
    virtual_local_rank: bool = False,
) -> dict[str, str]:
    """What differs from the job's base environment for the worker with `local_rank` on `node`.

    `master_addr` is where the workers on this node reach this round's store if it is here: with several nodes, the
    literal address by which other nodes reach it, too.
    """
    ranks = round.ranks(node)
    rank, world = ranks[local_rank], round.world_size
    env = {
        "RANK": rank,
        "LOCAL_RANK": 0 if virtual_local_rank else local_rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": len(ranks),
        "GROUP_RANK": round.group_rank(node),
        "GROUP_WORLD_SIZE": len(round.members),
        "ROLE_NAME": role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": master_addr,
        "TORCHELASTIC_RESTART_COUNT": round.restarts,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": paths.error_file,
        "ELASTICD_ROUND": round.number,
        "ELASTICD_JOB": job,
        "ELASTICD_RUN": run,
        "ELASTICD_BEAT": paths.beat,
        "ELASTICD_NOTES": paths.notes,
    }
    if checkpoint_dir is not None:
        env["ELASTICD_CHECKPOINT_DIR"] = checkpoint_dir
    return {name: str(value) for name, value in env.items()}


def visible_devices(slots: tuple[int, ...], devices: tuple[str, ...], only: int | None = None) -> str:
    """CUDA_VISIBLE_DEVICES for the slots in use: a slot is an index into `devices`, LOCAL_RANK one into the result."""
    return ",".join(devices[slot] for slot in (slots if only is None else (slots[only],)))
