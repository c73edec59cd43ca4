"""The files and the environment of one group's workers, new for every round in the agent's runtime directory.

A worker finds everything by its environment: rank and size as under torchrun, and paths of this round's files
(heartbeat, worker events, error file, stacks, flight recorder). A file belongs to one rank of one round. A process that
outlives its round, since it sleeps in the kernel, can thus never write into the heartbeat of its successor.

Files of older rounds are removed, except the last one's, which may still be read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from elasticd.heartbeat import record
from elasticd_agent.hangs.evidence import EvidenceTarget
from elasticd_agent.hangs.observer import GroupObserver
from elasticd_agent.job.monitor import GroupSetup
from elasticd_agent.model.job import JobSpec, Policy
from elasticd_agent.model.records import Member, Round
from elasticd_agent.system.files import remove_tree
from elasticd_agent.system.network.addresses import gloo_environment
from elasticd_agent.system.python_packages import installed_version
from elasticd_agent.workers.environment import (
    WorkerPaths,
    nccl_dump_paths,
    nccl_environment,
    visible_devices,
    worker_environment,
)
from elasticd_agent.workers.launcher.requests import WorkerSpec
from elasticd_agent.workers.launcher.writer_process import SOCKET_NAME
from elasticd_agent.workers.logs import JobLogs


def removed_sentence(runtime: Path) -> str:
    """The sentence about a job whose runtime directory is not there any more."""
    return (
        f"{runtime} was removed while the job ran, as systemd-logind does when the job's user logs out (elasticd docs "
        "assumptions#processes-and-machines)"
    )


class WorkerSetup:
    """Prepares the workers of each round on this node."""

    def __init__(
        self,
        spec: JobSpec,
        policy: Policy,
        node: str,
        runtime: Path,
        logs: JobLogs,
        *,
        gpus: bool,
        cpus: Mapping[int, tuple[int, ...]],
    ) -> None:
        """`cpus`: those that the worker on a slot is bound to; a slot without any is not bound."""
        self._spec = spec
        self._policy = policy
        self._node = node
        self._runtime = runtime
        self._logs = logs
        self._gpus = gpus
        self._cpus = cpus
        self._torch = installed_version("torch", spec.python, spec.base_environment(os.environ)) if gpus else None

    def prepare(self, round: Round, address: str) -> GroupSetup:
        """Make the files of `round` and return its workers on this node, with their observer and the targets of
        evidence.

        `address` is this machine's for workers on other nodes. Raises OSError where the runtime or the log directory
        cannot be written; the start of the group fails then, with that sentence.
        """
        directory = self._runtime / f"round-{round.number}"
        try:
            directory.mkdir(mode=0o700)
        except FileNotFoundError:
            raise OSError(removed_sentence(self._runtime)) from None
        # By the existing directories, since this node is not in every round.
        older = sorted(int(path.name[6:]) for path in self._runtime.glob("round-*") if path != directory)
        for number in older[:-1]:
            remove_tree(self._runtime / f"round-{number}")
        member = round.member(self._node)
        assert member is not None
        prepared = [
            self._prepare_worker(round, local_rank, rank, directory, address)
            for local_rank, rank in enumerate(round.ranks(self._node))
        ]
        workers, targets = tuple(worker for worker, _ in prepared), tuple(target for _, target in prepared)
        ranks = round.ranks(self._node)
        watch = GroupObserver(
            round.number,
            list(zip(ranks, member.slots, strict=True)),
            [directory / f"heartbeat-{rank}" for rank in ranks],
            [directory / f"worker-events-{rank}.jsonl" for rank in ranks],
        )
        return GroupSetup(workers, watch, targets, self._logs.evidence_dir(round.number))

    def prepare_ahead(self, round: Round, slots: Sequence[int], address: str) -> dict[int, WorkerSpec]:
        """Workers on these slots that run the script up to its entry, ahead of a round that has them beside those of
        `round`, or, where that is full, in the place of its last ones. They have no store, and save nothing.
        """
        member = round.member(self._node)
        used = () if member is None else tuple(slot for slot in member.slots if slot not in slots)
        every = tuple(sorted((*slots, *used[: max(0, self._spec.max_workers - len(slots))])))
        here = replace(member, slots=every) if member is not None else Member(self._node, "", every)
        others = tuple(m for m in round.members if m.node != self._node)
        next_round = replace(round, members=(*others[: self._spec.rendezvous.max_nodes - 1], here))
        directory = self._runtime / f"ahead-{round.number}"
        directory.mkdir(mode=0o700, exist_ok=True)
        older = sorted(int(path.name[6:]) for path in self._runtime.glob("ahead-*") if path != directory)
        for number in older[:-1]:
            remove_tree(self._runtime / f"ahead-{number}")
        workers = {}
        for at, slot in enumerate(slots):
            number = round.world_size + slot  # of its files; it is no rank of `round`
            (directory / f"heartbeat-{number}").unlink(missing_ok=True)  # of an earlier process of this slot
            worker, _ = self._prepare_worker(next_round, every.index(slot), number, directory, address)
            rank = next_round.world_size - len(slots) + at
            provisional = {"RANK": str(rank), "ELASTICD_NEWCOMER": "1"}
            env = {name: value for name, value in worker.env.items() if name not in ("MASTER_ADDR", "ELASTICD_WRITER")}
            workers[slot] = replace(worker, env=env | provisional)
        return workers

    def _prepare_worker(
        self, round: Round, local_rank: int, rank: int, directory: Path, address: str
    ) -> tuple[WorkerSpec, EvidenceTarget]:
        """Make the files and the environment of one worker, and say where evidence about it can be found.

        What the user has set himself wins over a default of elasticd, except where elasticd could not work: rank, size,
        the store's address, and the files of the round.
        """
        spec, max_restarts = self._spec, self._policy.max_restarts
        if max_restarts is None:
            max_restarts = self._policy.max_restarts_per_hour
        member = round.member(self._node)
        assert member is not None
        inherited = spec.base_environment(os.environ)
        files = self._logs.open_worker_files(round.number, local_rank, rank)
        paths = WorkerPaths(
            heartbeat_file=str(directory / f"heartbeat-{rank}"),
            events_file=str(directory / f"worker-events-{rank}.jsonl"),
            error_file=files.error_file,
            writer_socket=str(self._runtime / SOCKET_NAME),
        )
        record.create(paths.heartbeat_file)
        env = worker_environment(round, self._node, local_rank, paths, spec, max_restarts, address)
        if spec.rendezvous.backend != "memory":
            env |= gloo_environment(inherited, address)
        if self._gpus:
            env |= nccl_environment(inherited, directory, self._torch)
        if spec.devices:
            only = local_rank if spec.virtual_local_rank else None
            env["CUDA_VISIBLE_DEVICES"] = visible_devices(member.slots, spec.devices, only)
        pipe, dump = nccl_dump_paths({**inherited, **env}, rank) or (None, None)
        target = EvidenceTarget(
            rank,
            0,
            tuple(Path(log) for log in (files.stdout, files.stderr) if log not in (None, os.devnull)),
            heartbeat=Path(paths.heartbeat_file),
            stacks=directory / f"stacks-{rank}",
            flight=directory / f"flight-{rank}.json",
            pipe=pipe,
            dump=dump,
        )
        env |= {"ELASTICD_STACKS": str(target.stacks), "ELASTICD_FLIGHT": str(target.flight)}
        cpus = self._cpus.get(member.slots[local_rank], ())
        return WorkerSpec(env, files.stdout, files.stderr, paths.heartbeat_file, cpus), target
