"""The environment of a worker: torchrun's, variable for variable, and elasticd's own.

Pure. Names and meanings are those of torch.distributed.elastic's local agent (torch 2.13), also where nodes have
different numbers of slots or different roles. MASTER_PORT is added when the group starts: by the owner, or with
MASTER_ADDR when the round's store is on another node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.model.job import JobSpec
from elasticd_agent.model.records import Round

FR_BUFFER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
FR_FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The new and the old name of one setting."""
FR_RENAMED_IN_TORCH = (2, 8)
"""The first torch with the new names: it warns of the old ones, and older ones know nothing else."""
FR_PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
FR_ON_TIMEOUT_VARIABLE = "TORCH_NCCL_DUMP_ON_TIMEOUT"
FR_HOOKS_IN_TORCH = (2, 15)
"""The first torch whose hooks, which record other backends than NCCL and gloo, warn of that name. There it is on."""
NCCL_DEFAULTS = {
    FR_ON_TIMEOUT_VARIABLE: "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600",
    "TORCH_NCCL_COORD_CHECK_MILSEC": "250",
}
"""docs/nccl.md explains each of them."""
FR_BUFFER_ENTRIES = "2000"
"""The newest torch's default; older ones record nothing by default."""


@dataclass(frozen=True, slots=True)
class WorkerPaths:
    heartbeat_file: str
    events_file: str
    error_file: str
    writer_socket: str  #: the socket of the process that writes checkpoints


def worker_environment(
    round: Round,
    node: str,
    local_rank: int,
    paths: WorkerPaths,
    spec: JobSpec,
    max_restarts: int,
    address: str,
) -> dict[str, str]:
    """The difference from the job's base environment, for the worker with `local_rank` on `node`.

    `address` is that of this node for the workers: with several nodes, the literal one that other nodes use.
    """
    ranks = round.ranks(node)
    rank, world = ranks[local_rank], round.world_size
    role_first, role_world = role_rank_and_size(round, node, spec.role)
    env = {
        "RANK": rank,
        "LOCAL_RANK": 0 if spec.virtual_local_rank else local_rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": len(ranks),
        "GROUP_RANK": round.group_rank(node),
        "GROUP_WORLD_SIZE": len(round.members),
        "ROLE_NAME": spec.role,
        "ROLE_RANK": role_first + local_rank,
        "ROLE_WORLD_SIZE": role_world,
        "MASTER_ADDR": address,
        "TORCHELASTIC_RESTART_COUNT": round.restarts,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_RUN_ID": spec.job_id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": paths.error_file,
        "ELASTICD_ROUND": round.number,
        "ELASTICD_RESTARTS_WITHOUT_PROGRESS": round.budget.streak,
        "ELASTICD_JOB": spec.job_id,
        "ELASTICD_RUN": spec.run,
        "ELASTICD_HEARTBEAT": paths.heartbeat_file,
        "ELASTICD_WORKER_EVENTS": paths.events_file,
        "ELASTICD_WRITER": f"{local_rank}/{len(ranks)}:{paths.writer_socket}",
    }
    if spec.checkpoint_dir is not None:
        env["ELASTICD_CHECKPOINT_DIR"] = spec.checkpoint_dir
    return {name: str(value) for name, value in env.items()}


def role_rank_and_size(round: Round, node: str, role: str) -> tuple[int, int]:
    """ROLE_RANK of the first worker on `node`, and ROLE_WORLD_SIZE: ranks among the nodes of this role.

    Members from a planner without roles count as having this role.
    """
    alike = [m for m in round.members if m.node == node or m.role in ("", role)]
    here = next(at for at, m in enumerate(alike) if m.node == node)
    return sum(len(m.slots) for m in alike[:here]), sum(len(m.slots) for m in alike)


def nccl_environment(given: Mapping[str, str], directory: Path, torch: tuple[int, int] | None) -> dict[str, str]:
    """Settings with which a hung NCCL collective leaves evidence in `directory`.

    `given` is the user's environment, which takes precedence, under either name of a setting with two. `torch` is the
    workers' version; None: unknown, and both names are set.
    """
    known = slice(None) if torch is None else slice(1) if torch >= FR_RENAMED_IN_TORCH else slice(1, None)
    settings = {FR_PIPE_VARIABLE: str(directory / "nccl-pipe-"), **NCCL_DEFAULTS}
    if torch is not None and torch >= FR_HOOKS_IN_TORCH:
        del settings[FR_ON_TIMEOUT_VARIABLE]
    for names, value in (
        (FR_BUFFER_VARIABLES, FR_BUFFER_ENTRIES),
        (FR_FILE_VARIABLES, str(directory / "nccl-flight-")),
    ):
        value_set = next((given[name] for name in names if name in given), value)
        settings |= dict.fromkeys(names[known], value_set)
    return {name: value for name, value in settings.items() if name not in given}


DEFAULT_RAS_PORT = 28028
"""NCCL's default."""


def ras_port(env: Mapping[str, str]) -> int:
    """The port at which NCCL's RAS answers on the loopback; 0: it does not, or only elsewhere."""
    if env.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        return 0
    host, _, port = env.get("NCCL_RAS_ADDR", f"localhost:{DEFAULT_RAS_PORT}").rpartition(":")
    local = host.strip("[]") in ("localhost", "127.0.0.1", "::1")
    return int(port) if local and re.fullmatch(r"\d{1,5}", port) and int(port) < 1 << 16 else 0


def nccl_dump_paths(env: Mapping[str, str], rank: int) -> tuple[Path, Path] | None:
    """The pipe that triggers a dump by `rank` (write anything), and the file it writes; None without a recorder."""
    pipe, file = env.get(FR_PIPE_VARIABLE, ""), next((env[name] for name in FR_FILE_VARIABLES if name in env), "")
    entries = next((env[name] for name in FR_BUFFER_VARIABLES if name in env), "0")
    if not pipe or not file or not entries.isdigit() or int(entries) == 0:
        return None
    return Path(f"{pipe}{rank}.pipe"), Path(f"{file}{rank}")


def visible_devices(slots: tuple[int, ...], devices: tuple[str, ...], only_local_rank: int | None = None) -> str:
    """CUDA_VISIBLE_DEVICES: a slot is an index into `devices`, LOCAL_RANK one into the result."""
    return ",".join(devices[slot] for slot in (slots if only_local_rank is None else (slots[only_local_rank],)))
