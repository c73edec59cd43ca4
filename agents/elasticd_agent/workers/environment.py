"""The environment a worker sees: torchrun's, variable for variable, and elasticd's own beside it.

Pure. The names and meanings are those of torch.distributed.elastic's local agent (torch 2.13), also where nodes have
different numbers of slots or different roles. MASTER_PORT is added when the group starts: by the
owner, which knows where the round's store listens, or with MASTER_ADDR when that store is another node's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.model.records import Round

FR_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
FR_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The new and the old name of one setting. Older torch knows the old ones only; newer ones prefer the new ones, but
whether there is a dump pipe is decided by the old one alone (ProcessGroupNCCL.hpp, 2.13 too): so both are set alike."""
FR_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
NCCL_DEFAULTS = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600",
}
"""What docs/nccl.md explains, one by one."""
FR_ENTRIES = "2000"
"""The newest torch's own default; older ones record nothing unless asked to."""


@dataclass(frozen=True, slots=True)
class WorkerPaths:
    """Where one worker's files are."""

    heartbeat: str
    events: str
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
    role_first, role_world = role_rank_and_size(round, node, role)
    env = {
        "RANK": rank,
        "LOCAL_RANK": 0 if virtual_local_rank else local_rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": len(ranks),
        "GROUP_RANK": round.group_rank(node),
        "GROUP_WORLD_SIZE": len(round.members),
        "ROLE_NAME": role,
        "ROLE_RANK": role_first + local_rank,
        "ROLE_WORLD_SIZE": role_world,
        "MASTER_ADDR": master_addr,
        "TORCHELASTIC_RESTART_COUNT": round.restarts,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": paths.error_file,
        "ELASTICD_ROUND": round.number,
        "ELASTICD_JOB": job,
        "ELASTICD_RUN": run,
        "ELASTICD_BEAT": paths.heartbeat,
        "ELASTICD_NOTES": paths.events,
    }
    if checkpoint_dir is not None:
        env["ELASTICD_CHECKPOINT_DIR"] = checkpoint_dir
    return {name: str(value) for name, value in env.items()}


def role_rank_and_size(round: Round, node: str, role: str) -> tuple[int, int]:
    """ROLE_RANK of the first worker on `node`, and ROLE_WORLD_SIZE: ranks as if the nodes of this role were alone.

    Members whose planner knew no roles have this one: such a planner's job had one.
    """
    alike = [m for m in round.members if m.node == node or m.role in ("", role)]
    here = next(at for at, m in enumerate(alike) if m.node == node)
    return sum(len(m.slots) for m in alike[:here]), sum(len(m.slots) for m in alike)


def nccl_environment(given: Mapping[str, str], directory: Path) -> dict[str, str]:
    """What workers on a machine with GPUs get besides, so that a hung NCCL collective leaves evidence in `directory`.

    `given` is what the user has set, which is left as it is: under either of its names, where a setting has two.
    """
    wanted = {FR_PIPE: str(directory / "nccl-pipe-"), **NCCL_DEFAULTS}
    for names, value in ((FR_BUFFER, FR_ENTRIES), (FR_FILE, str(directory / "nccl-flight-"))):
        chosen = next((given[name] for name in names if name in given), value)
        wanted |= dict.fromkeys(names, chosen)
    return {name: value for name, value in wanted.items() if name not in given}


def flight_recorder(env: Mapping[str, str], rank: int) -> tuple[Path, Path] | None:
    """The pipe to write to (anything) for a dump by `rank`, and the file it then writes; None if it has none."""
    pipe, file = env.get(FR_PIPE, ""), next((env[name] for name in FR_FILE if name in env), "")
    entries = next((env[name] for name in FR_BUFFER if name in env), "0")
    if not pipe or not file or not entries.isdigit() or int(entries) == 0:
        return None
    return Path(f"{pipe}{rank}.pipe"), Path(f"{file}{rank}")


def visible_devices(slots: tuple[int, ...], devices: tuple[str, ...], only: int | None = None) -> str:
    """CUDA_VISIBLE_DEVICES for the slots in use: a slot is an index into `devices`, LOCAL_RANK one into the result."""
    return ",".join(devices[slot] for slot in (slots if only is None else (slots[only],)))
