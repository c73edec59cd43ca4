"""A session's checkpoints, as everything that saves or restores shares them: the ranks, the directory, the settings.

It is one value because its parts belong together: a round, its ranks, the directory and what was chosen for saves.
Whatever saves or restores gets it whole, and no module keeps a second copy of one of its fields that could differ. In
another round of the same process a new one is made from it (`in_round`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from elasticd.bounded_json import JsonObject
from elasticd.checkpointing.memory import writer_client
from elasticd.checkpointing.memory.buffers import WriteTask
from elasticd.checkpointing.memory.writer_client import WriterClient
from elasticd.checkpointing.state.training_state import StateDict
from elasticd.checkpointing.storage.manifest import NO_CHECKSUM, Manifest
from elasticd.coordination.store_channel import StoreChannel
from elasticd.errors import Reason
from elasticd.heartbeat.record import HeartbeatWriter
from elasticd.heartbeat.worker_events import WorkerEventWriter
from elasticd.process_group import DefaultGroup, WorkerEnvironment
from elasticd.sampler import ElasticBatchSampler

logger = logging.getLogger("elasticd")
T = TypeVar("T")

DEFAULT_KEEP = 3
"""Checkpoints that stay, unless the script says otherwise."""


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """A number of steps between two saves, or seconds by rank 0's clock. The other one is None."""

    steps: int | None
    seconds: float | None

    def __str__(self) -> str:
        return f"every {self.steps} steps" if self.steps else f"every {self.seconds:g} s"


@dataclass
class SaveContext:
    """One session's ranks, directory and settings. All ranks have the same values, except `events` and `writer`."""

    environment: WorkerEnvironment
    group: DefaultGroup
    channel: StoreChannel
    events: WorkerEventWriter
    heartbeat: HeartbeatWriter
    directory: Path | None = None
    round: int = 0
    """The number under which this session saves: the agent's, else one more than the highest in the directory."""
    parent: tuple[int, int] | None = None  #: the (round, step) that trained what this round resumed from
    per_rank: dict[str, Any] = field(default_factory=dict)  #: objects of which every rank's state is saved, by name
    attached_on_rank0: list[str] | None = None  #: the names on rank 0, None: not known
    every: SaveInterval | None = None
    keep: int = DEFAULT_KEEP
    keep_every: int = 0  #: the first checkpoint from each multiple of it on stays for ever; 0: none does
    partner_copies: bool = True  #: each node keeps a copy of another node's part of a sharded state
    is_sharded: bool = False
    owed_reason: Reason = ""  #: why a save is due as soon as no earlier one is being written, "" if none is
    save_count: int = 0  #: the number of saves that have begun, the same on every rank
    writer: WriterClient | None = field(default_factory=writer_client.from_environment)
    """None: there is no writer on this node, and rank 0 writes checkpoints itself."""

    def in_round(
        self, environment: WorkerEnvironment, group: DefaultGroup, channel: StoreChannel, events: WorkerEventWriter
    ) -> SaveContext:
        """The same settings in another round of this process."""
        whose: dict[str, Any] = {"environment": environment, "group": group, "channel": channel, "events": events}
        ours: dict[str, Any] = {"directory": None, "round": 0, "parent": None, "is_sharded": False, "owed_reason": ""}
        return replace(self, **whose, **ours, save_count=0, writer=writer_client.from_environment())

    @property
    def chosen_directory(self) -> Path:
        """The directory, once one is chosen."""
        assert self.directory is not None
        return self.directory

    @property
    def next_try_sentence(self) -> str:
        return f"it is tried again {self.every}" if self.every else "it is not tried again"

    def draft(self, step: int, size: int, cursor: JsonObject | None) -> Manifest:
        """The description of a checkpoint that is not written yet; `cursor` is the position of the attached sampler."""
        whose = (self.group.world_size, size, NO_CHECKSUM, self.environment.job, self.environment.run)
        # Another start of the same round, with a directory that the agent does not know, continues that round.
        parent = self.parent if self.parent is not None and self.parent[0] < self.round else None
        return Manifest(self.round, step, parent, *whose, cursor, time.time())

    def agree(self, key: str, what: str, mine: T, decide: Callable[[list[T]], Any], answer_key: str = "") -> Any:
        """Rank 0's decision about every rank's word, on every rank, or its error; a timeout names the word `what`.

        Words are JSON, decisions JSON objects. `answer_key`: the decision's key in the store, if it is not `key`.
        """
        every = self.channel.gather_on_rank0(key, json.dumps(mine).encode(), what)
        return self.channel.on_rank0(answer_key or key, what, lambda: decide([json.loads(word) for word in every]))

    def reserved_part(self, step: int) -> StateDict:
        """The part of every state that describes the save itself."""
        return {"step": step, "round": self.round, "world_size": self.group.world_size}

    def write_task(self, why: str, blocked_s: float) -> WriteTask:
        """The writer's task with a state of this session."""
        return WriteTask(
            directory=str(self.chosen_directory),
            keep=self.keep,
            why=why,
            again=self.next_try_sentence,
            events=str(self.events.path or ""),
            rank=self.group.rank,
            blocked_s=blocked_s,
            keep_every=self.keep_every,
        )

    def write_task_at_end(self) -> WriteTask:
        """The same for the newest state in memory when the job has ended."""
        task = self.write_task("at the end of the job", 0.0)
        node, nodes = self.environment.node, self.environment.nodes
        return replace(task, again="the job has ended", node=node, nodes=nodes)

    def checkpoint_path(self, step: int) -> Path:
        """The place of this round's checkpoint of `step`."""
        return self.chosen_directory / f"r{self.round}-s{step}"

    def warn(self, kind: str, reason: str, path: Path | None = None, step: int | None = None) -> None:
        """Report an event of the directory, or of a path in it, on this rank's stderr and in the job's log."""
        logger.warning(reason)
        self.events.write(kind, reason, step, path=str(path or self.directory))

    def warn_failed(self, step: int, why: str, kind: str = "checkpoint_failed") -> None:
        """Report a checkpoint that could not be saved, by an event of this kind."""
        self.warn(
            kind,
            f"checkpoint of step {step} failed ({why}); {self.next_try_sentence}",
            self.checkpoint_path(step),
            step,
        )

    def report(self, reason: str, step: int | None) -> None:
        """Report a sentence that names no path."""
        logger.warning(reason)
        self.events.write("message", reason, step)


def cursor_of(attached: Mapping[str, Any], states: Mapping[str, Any] | None = None) -> JsonObject | None:
    """The position of the first attached sampler: now, or the one in `states`."""
    samplers = ((name, obj) for name, obj in attached.items() if isinstance(obj, ElasticBatchSampler))
    name, sampler = next(samplers, ("", None))
    if sampler is None:
        return None
    return dict(states[name] if states else sampler.state_dict())
