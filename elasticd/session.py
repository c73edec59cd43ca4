"""A worker's handle on its job: which rank of which round it is, what survives a restart, and what all ranks do next.

The same calls work under elasticd, under plain torchrun and in a plain `python train.py`; what is not there (an agent,
a beat, other ranks) is replaced by something that does nothing. A session never ends the script; where there are other
ranks it starts one thread, which tells them where this one is. How checkpoints are written and read, and how ranks
agree and meet, is in the modules it puts together here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elasticd import process_group as groups
from elasticd.checkpointing import restore as restoring
from elasticd.checkpointing import state
from elasticd.checkpointing.restore import Resumed
from elasticd.checkpointing.saver import SaveInterval, Saver
from elasticd.coordination import pause as holding
from elasticd.coordination.barrier import Barriers, timeout_seconds
from elasticd.coordination.decisions import Action, DecisionPoints
from elasticd.coordination.rank_status import RankStatus, StatusPublisher
from elasticd.coordination.sigterm import SigtermHandler
from elasticd.coordination.store_channel import open_channel
from elasticd.errors import UsageError
from elasticd.heartbeat import record as beats
from elasticd.heartbeat import worker_events as all_notes
from elasticd.heartbeat.collectives import Collectives

if TYPE_CHECKING:
    import torch

__all__ = ["Resumed", "Session", "init"]

_PHASES = {"starting": beats.Phase.STARTING, "checkpoint": beats.Phase.CHECKPOINT, "eval": beats.Phase.EVAL}


def init(*, timeout: timedelta | None = None, decision_timeout: timedelta = timedelta(minutes=10)) -> Session:
    """Take this process's place in its job; every rank calls it once, before DDP is built.

    Sets the rank's device and makes the default process group with the device's default backend (nccl for CUDA, gloo
    for the CPU), unless the script has made one. Plain `python train.py` becomes a group of one.

    Args:
        timeout: the process group's timeout, if it is made here; torch's default if None.
        decision_timeout: how long a rank waits for another one's word before it raises DecisionTimeout.

    Raises UsageError for an environment that cannot work, and what torch raises when the group cannot be made.
    """
    here = groups.read_environment()
    group = groups.join(here, timeout)
    return Session(here, group, decision_timeout.total_seconds())


class Session:
    """Made by `elasticd.init()`. Every method, unless it says otherwise, is called by all ranks at the same steps."""

    def __init__(self, here: groups.WorkerEnvironment, group: groups.DefaultGroup, decision_timeout_s: float) -> None:
        self._here, self._group = here, group
        self._beat = beats.from_environment()
        self._beat.use_session()
        self._issued = Collectives().issued
        self._notes = all_notes.from_environment(here.round, group.rank)
        self._channel = open_channel(group.rank, group.world_size, here.round, group.device, decision_timeout_s)
        self._decisions = DecisionPoints(self._channel, self._wish)
        self._holds = holding.PauseController(self._beat, self._notes, holding.timeout_from_environment())
        self._saver = Saver(here, group, self._channel, self._notes, self._beat)
        self._attached: dict[str, Any] = {}
        self._committing: list[Any] = []
        self._termination = SigtermHandler()
        self._steps = 0
        self._stepped = self._restored = self._should_stop = self._closed = False
        self._roll = StatusPublisher(
            self._channel.new_connection, self._channel.prefix, group.rank, group.world_size, self._standing
        )
        self._barriers = Barriers(self._channel, self._roll, self._beat)
        self._barrier_s: float | None = None
        if group.world_size > 1:
            self._roll.start(self._channel.store)

    @property
    def round(self) -> int:
        """The round's number, from 1; 0 where no elasticd agent started this process."""
        return self._here.round

    @property
    def restarts(self) -> int:
        """Restarts of this job so far, as torchrun counts them (TORCHELASTIC_RESTART_COUNT)."""
        return self._here.restarts

    @property
    def rank(self) -> int:
        """This process's rank in the default process group."""
        return self._group.rank

    @property
    def local_rank(self) -> int:
        """Its rank on this machine, which is also its device's index."""
        return self._here.local_rank

    @property
    def world_size(self) -> int:
        """Ranks in this round."""
        return self._group.world_size

    @property
    def device(self) -> torch.device:
        """What this rank trains on: the accelerator of its local rank, else the CPU."""
        return self._group.device

    @property
    def steps(self) -> int:
        """Optimizer steps committed so far, over all rounds: `restore()` sets it, `step()` counts."""
        return self._steps

    @property
    def should_stop(self) -> bool:
        """True once all ranks have decided to stop, from the same step on; what a checkpoint is for has been saved."""
        return self._should_stop

    def attach(self, **objects: Any) -> None:
        """Name what a checkpoint holds: model=, optimizer=, scheduler=, sampler=, anything with state_dict().

        Modules may be wrapped (DDP, torch.compile): the checkpoint holds what is inside. An object with a `commit()`
        method gets that call at every `step()`. Talks to nobody. Raises UsageError for what cannot be saved and loaded,
        a name given twice, and after a `restore()` that loaded something.
        """
        for name, obj in objects.items():
            state.check_attachable(name, obj)
            if name in self._attached:
                raise UsageError(f"attach({name}=...): that name is taken; each object needs its own")
        if objects and self._restored:
            raise UsageError(f"attach({next(iter(objects))}=...) after restore(): attach everything before it")
        self._attached.update(objects)
        self._committing = [obj for obj in self._attached.values() if callable(getattr(obj, "commit", None))]

    def restore(self, directory: str | os.PathLike[str] | None = None) -> Resumed | None:
        """Go back to the newest checkpoint that can be read whole; None where there is none.

        Loads everything attached and this rank's random states, and sets `steps`. The checkpoint may be of another
        world size; what of it could not be used is said in the answer's notes. `directory` overrides
        ELASTICD_CHECKPOINT_DIR.

        Raises UsageError without a directory, with nothing attached or after the first step; DirectoryInUse when
        another run holds it; CheckpointError, on every rank, when a rank could not load the checkpoint.
        """
        if not self._attached:
            raise UsageError("restore(): nothing is attached; call session.attach(model=..., optimizer=...) first")
        if self._stepped:
            raise UsageError("restore() after step(): restore before the first step")
        self._saver.open(directory, "restore")
        resumed = restoring.restore(self._attached, self._saver, self._group, self._channel, self._notes)
        if resumed is not None:
            self._restored = True
            self._steps = resumed.step
            self._decisions.reset(resumed.step)
        return resumed

    def checkpoint(
        self,
        every: int | str | timedelta,
        directory: str | os.PathLike[str] | None = None,
        keep: int = 3,
        barrier: float | timedelta | None = None,
    ) -> None:
        """Save at the end of every so many steps (50), or every so often ("30s", a timedelta), by rank 0's clock.

        `directory` overrides ELASTICD_CHECKPOINT_DIR; the newest `keep` checkpoints stay. A disk that is full or
        read-only is said and tried again when the next one is due. With `barrier` (seconds, or a timedelta) all ranks
        meet at a barrier of that timeout before each save, so that a rank that does not come is named.

        Raises UsageError without a directory or for arguments that cannot work, DirectoryInUse when another run holds
        the directory.
        """
        parsed = SaveInterval.parse(every)
        if keep < 1:
            raise UsageError(f"checkpoint(keep={keep!r}): keep at least 1 checkpoint")
        barrier_s = None if barrier is None else timeout_seconds(barrier, "checkpoint(barrier=...)")
        self._saver.open(directory, "checkpoint")
        self._saver.every, self._saver.keep, self._barrier_s = parsed, keep, barrier_s

    def save(self) -> None:
        """A checkpoint now, whatever `checkpoint()` says. A disk that is full is said and survived.

        Raises UsageError without a directory or with nothing attached, CheckpointRefused for a state that
        `torch.load(weights_only=True)` would not open, naming the key.
        """
        self._saver.open(None, "save")
        self._save("asked for by the script")

    def step(self) -> None:
        """The end of an optimizer step: count it, commit the sampler, beat, decide with the other ranks, save if due.

        Where the agent expects another round soon it may ask for a hold: then a checkpoint is saved and this call
        waits, on all ranks at the same step, for the agent to end the process or to let it go on.

        Raises DecisionTimeout when rank 0's verdict does not come, CheckpointRefused at the first save, BarrierTimeout
        where `checkpoint(barrier=...)` asks for one.
        """
        if not self._stepped:
            self._stepped = True
            self._termination.install()
            if self._attached and self._saver.directory is not None:
                every = self._saver.every
                known = {"every_seconds": every.seconds} if every is not None and every.seconds is not None else {}
                self._notes.write("attached", "a checkpoint is attached", self._steps, **known)
        for obj in self._committing:
            obj.commit()
        self._steps += 1
        self._beat.step(self._steps, issued=self._issued())
        verdict = None if self._should_stop else self._decisions.at(self._steps)
        action: Action = verdict.action if verdict else "go"
        saved = False
        if self._saver.due_by_steps(self._steps):
            saved = self._save(str(self._saver.every))
        elif verdict and (action in ("save", "hold") or (action == "stop" and self._saver.every)):
            saved = self._save(verdict.reason)
        if action == "hold":
            action = self._hold(saved)
        if action == "stop":
            # Rank 0 may serve the store itself, and may leave once it has stopped: not before all have heard of it.
            self._channel.collect("stopped", b"", "their stop")
            self._should_stop = True

    def barrier(self, name: str, timeout: float | timedelta | None = None) -> None:
        """Wait until every rank is here: out of band, through the round's store, on any backend; one rank passes.

        Each rank's n-th barrier is the same barrier, and must have the same name. `timeout` is in seconds or a
        timedelta; without one it is `init`'s decision_timeout. The first rank whose time is over ends the barrier for
        all, also for those that come later.

        Raises BarrierTimeout, which says where the missing ranks are; UsageError on every rank where names differ, and
        for arguments that cannot work; torch.distributed's own error when the store is gone.
        """
        self._barriers.wait(name, timeout)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say for a while that this rank is at something else than steps: "eval", "checkpoint" or "starting".

        Each rank for itself. A phase has its own, longer deadline before the rank is taken for hung. Raises UsageError
        for another name.
        """
        if name not in _PHASES:
            raise UsageError(f"phase({name!r}): known are {', '.join(map(repr, _PHASES))}")
        before = self._beat.current_phase
        self._beat.set_phase(_PHASES[name])
        try:
            yield
        finally:
            self._beat.set_phase(before)

    def close(self) -> None:
        """Give back the checkpoint directory and SIGTERM, and destroy the process group if `init()` made it.

        The end of the process does so too. Where rank 0 serves the store itself (no agent does), it waits here up to
        5 s for the others, so that they can read its last words.
        """
        self._saver.close()
        self._termination.close()
        self._barriers.close()
        self._roll.close()
        if not self._closed and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._channel.leave()
        self._closed = True
        groups.leave(self._group)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A rank that failed says no goodbyes: its peers are waiting for something else.
        self._closed = self._closed or kind is not None
        self.close()

    def _standing(self) -> RankStatus:
        """What the other ranks may read of this one; called by the roll's thread."""
        name, phase = self._barriers.waiting_at, self._beat.current_phase
        if name is not None:
            return RankStatus(self._steps, "barrier", name[:64])
        return RankStatus(self._steps, "hold" if phase == beats.Phase.BARRIER else phase.name.lower())

    def _save(self, why: str) -> bool:
        if self._barrier_s is not None:
            self.barrier(f"checkpoint at step {self._steps}", self._barrier_s)
        return self._saver.save(self._steps, self._attached, why)

    def _wish(self) -> tuple[Action, str]:
        """Rank 0: what it wants all ranks to do at this decision point."""
        if why := self._wish_to_stop():
            return "stop", why
        if self._holds.should_pause(self._steps, able=self._saver.directory is not None and bool(self._attached)):
            return "hold", "the agent asked for a hold"
        if self._saver.due_by_time():
            return "save", str(self._saver.every)
        return "go", ""

    def _wish_to_stop(self) -> str:
        if self._beat.request & beats.REQUEST_KIND == beats.STOP:
            return "the agent asked for a stop"
        # Where there is an agent it is the agent's to judge: batch systems signal every process of a job, also where
        # only one node has to go, and a script that stops by itself has succeeded.
        return "SIGTERM" if self._termination.received and isinstance(self._beat, beats.NullHeartbeat) else ""

    def _hold(self, saved: bool) -> Action:
        """Wait with all ranks until rank 0 says what comes after the hold."""
        before = self._beat.current_phase
        self._beat.set_phase(beats.Phase.BARRIER, "hold")
        try:
            over = self._decisions.decide_again(
                self._steps,
                lambda: self._holds.wait(self._steps, saved, self._wish_to_stop),
                self._holds.timeout_s,
            )
        finally:
            self._beat.set_phase(before)
        return over.action
