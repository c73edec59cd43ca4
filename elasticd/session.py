"""A worker's session with its job: its rank and round, what survives a restart, and what all ranks do next.

The same calls work under elasticd, under plain torchrun and in a plain `python train.py`; an object that does nothing
stands for what is missing (an agent, a heartbeat, other ranks). A session never ends the script; with other ranks it
starts a thread, which publishes this rank's status, and one that saves its state at a fault. checkpointing/ writes and
reads checkpoints, coordination/ makes ranks agree and meet; this module puts them together.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import signal
import sys
import threading
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, TypeVar

from elasticd import in_place, process_group
from elasticd.attached_samplers import AttachedSamplers
from elasticd.checkpointing import restore
from elasticd.checkpointing.at_fault.donor import Donor
from elasticd.checkpointing.at_fault.late_changes import BetweenSteps, RestoredModules
from elasticd.checkpointing.context import DEFAULT_KEEP, SaveContext
from elasticd.checkpointing.omissions import Omissions
from elasticd.checkpointing.restore import Resumed
from elasticd.checkpointing.saver import Saver, parse_interval
from elasticd.checkpointing.state import sharded, training_state
from elasticd.checkpointing.storage.object_url import resolve
from elasticd.coordination import pause
from elasticd.coordination.barrier import Barriers, timeout_seconds
from elasticd.coordination.decisions import Action, DecisionPoints
from elasticd.coordination.rank_status import RankStatus, StatusPublisher
from elasticd.coordination.store_channel import StoreChannel, default_timeout_s, open_channel
from elasticd.errors import CheckpointError, CheckpointRefused, Reason, UsageError
from elasticd.heartbeat import record as heartbeat
from elasticd.heartbeat import worker_events
from elasticd.heartbeat.collectives import CollectiveCounter, only_default_group_exists
from elasticd.heartbeat.main_thread import MainThread
from elasticd.heartbeat.record import Phase
from elasticd.heartbeat.scalars import ScalarSampler
from elasticd.in_place import EntryState
from elasticd.rejoin import launch_channel, newcomer, transport
from elasticd.rejoin.data_parallel import DataParallelModules
from elasticd.sampler import ElasticBatchSampler, check_attached_loader, follow_group, samplers_of
from elasticd.sigterm import SigtermHandler

if TYPE_CHECKING:
    import torch

__all__ = ["Resumed", "Session", "init"]

logger = logging.getLogger("elasticd")
T = TypeVar("T")

MAX_DEFERRED_STEPS, MAX_ACCUMULATED_STEPS = 256, 1024
"""Steps for which a save, a pause or a stop waits for an optimizer's step: before one has been seen, as gradients may
also be old ones, or those of an update that is no optimizer of torch's; and once one has been."""
_PAUSE_WITHOUT_SAVE_REASON = "the agent requested a pause, and all processes stay"
"""The reason of a pause without a checkpoint."""
_CLOSED_INSIDE = "what session.run() calls has closed the session: close it after session.run()"
"""The reason why a process does not stay."""
_SCALER_MARK = "_per_optimizer_states"
"""An attribute of a GradScaler."""
_NEW, _STAYS = b"new", b"stays"
"""The word of each rank about its process, at the beginning of a round."""
_trained_directories: set[Path] = set()
"""Those of all sessions of this process."""
_closed_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Sessions of this process that are closed and not yet freed. Each is part of a reference cycle."""
_PHASES = {each.name.lower(): each for each in (Phase.STARTING, Phase.CHECKPOINT, Phase.EVAL)}


def init(*, timeout: timedelta | None = None, decision_timeout: float | timedelta | None = None) -> Session:
    """Join the job; every rank calls it once, before DDP is built.

    Sets the rank's device and makes the default process group with the device's default backend (nccl for CUDA, gloo
    for the CPU), unless the script has made one. Plain `python train.py` becomes a group of one.

    Args:
        timeout: the process group's timeout, if it is made here; torch's default if None.
        decision_timeout: how long a rank waits for another one's message before it raises DecisionTimeout, in seconds
            or a timedelta; by default as long as for a collective, and 10 minutes at least.

    Raises UsageError for an environment or an argument that cannot work, and inside what `Session.run` calls; and what
    torch raises when the group cannot be made.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is Session.run.__code__:
            raise UsageError(
                "init() inside what session.run() calls: use that session; integrations take it as session="
            )
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            raise UsageError(
                "init() in a process that multiprocessing has started, as for the workers of a DataLoader, and that "
                "imports the script: it would take part as another rank. Put what trains below "
                "`if __name__ == '__main__':`"
            )
        frame = frame.f_back
    decision_s = None if decision_timeout is None else timeout_seconds(decision_timeout, "init(decision_timeout=...)")
    if _closed_sessions:
        gc.collect()  # frees what was attached to those that the script has dropped, and their connections
    environment = process_group.read_environment()
    is_newcomer = newcomer.is_newcomer()
    group = newcomer.join(environment) if is_newcomer else process_group.join(environment, timeout)
    return Session(environment, group, decision_s, timeout)


class Session:
    """Made by `elasticd.init()`. Every method, unless it says otherwise, is called by all ranks at the same steps."""

    def __init__(
        self,
        environment: process_group.WorkerEnvironment,
        group: process_group.DefaultGroup,
        decision_s: float | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._timeout, self._decision_s = timeout, decision_s
        self._launch = launch_channel.from_environment()
        self._heartbeat = heartbeat.from_environment()
        self._issued = CollectiveCounter().issued
        self._main_thread = MainThread()
        self._is_ahead = newcomer.is_newcomer()
        """This process has no round before its entry."""
        self._transport = transport.of_device(group.device)
        self._launch.interrupt = lambda: self._transport.interrupt()
        self._modules = DataParallelModules(self._issued)
        if self._launch.is_connected:
            self._modules.watch()
            self._launch.on_change = self._on_change
        self._entry: EntryState | None = None
        """State of this process at the call of `run`; None before."""
        self._is_attached_by_train = False
        """`run` was called with nothing attached: what `train` attaches belongs to its round."""
        self._opens_before_run = False
        """The script has called `checkpoint()`, or `run` restores: not only `train` opens the directory."""
        self._has_left = False
        """This process is in another round than the first one in which it might have been."""
        self._at_entry: list[Callable[[], None]] = []
        self._attached: dict[str, Any] = {}
        self._optional: set[str] = set()
        """Names of which a checkpoint may hold nothing."""
        self._committing: list[Any] = []
        self._optimizers: list[tuple[Any, Any]] = []
        """Attached ones, which report each step that they begin, and the handles of these hooks."""
        self._scalers: dict[Any, Any] = {}
        """Attached GradScalers, and what each of their updates replaces."""
        self._directory: Path | None = None
        """The one that the script gives, if any: the same in the next round, whatever its working directory is then."""
        self._said: set[str] = set()
        self._thread = threading.get_ident()
        """The thread that steps."""
        self._sigterm = SigtermHandler()
        self._should_stop = False
        self._closed = self._is_running = False
        self._has_ended_iterator = False
        """The ranks have changed while an attached sampler was asked for a batch, and none was asked since."""
        self._holder: Donor | None = None
        """The donor of the round before, which holds the state on the way to this one."""
        self._barrier_s: float | None = None
        self._begin_round(environment, group)

    def _begin_round(self, environment: process_group.WorkerEnvironment, group: process_group.DefaultGroup) -> None:
        """All that has to do with a round. All ranks make the same calls after it, also those of which the process is
        new."""
        self._environment = environment
        self._group = group
        self._heartbeat.use_session()
        self._events = worker_events.from_environment(environment.round, group.rank)
        decision_s = default_timeout_s() if self._decision_s is None else self._decision_s
        if self._is_ahead:
            self._channel = StoreChannel(group.rank, 1, None, "", decision_s)
        else:
            self._channel = open_channel(
                group.rank, group.world_size, environment.round, group.device, decision_s, self._heartbeat
            )
        self._channel.status = self._status_before_call
        self._scalars = ScalarSampler(self._events) if group.rank == 0 else None
        self._issued_at_step = self._issued_before = 0
        self._issued_by_session = 0
        """Collectives of a `restore()` before `run`."""
        self._decisions = DecisionPoints(self._channel, self._propose)
        self._pauses = pause.PauseController(self._heartbeat, self._events, pause.timeout_from_environment())
        if self._entry is None:
            self._context = SaveContext(environment, group, self._channel, self._events, self._heartbeat)
        else:
            self._context = self._context.in_round(environment, group, self._channel, self._events)
        self._saver = Saver(self._context)
        self._omissions = Omissions(self._context, self._attached)
        if self._attached:
            self._omissions.watch_attached()
        self._donor: Donor | None = None
        self.has_optimized = False
        """An optimizer has begun a step since the last `step()`."""
        self._was_optimized = True
        """The same of the step before that call."""
        self._is_put_off = self._is_requested = False
        """A save is due; by `save()`. All ranks decide at the end of each step until it is made."""
        self._due = ""
        """The reason, on rank 0."""
        self._partial, self._max_partial = 0, MAX_DEFERRED_STEPS
        """The steps for which rank 0 waited for an optimizer's step, and waits at most."""
        self._between_steps: BetweenSteps | None = None
        self._ended_epochs: list[Any] = []
        """The epochs that each RankLoader had ended at the end of the last step."""
        self._since_restore: RestoredModules | None = None
        """Until the first batch."""
        self._samplers = AttachedSamplers(ChainMap(self._attached, self._context.per_rank), group.device)
        self._steps = 0
        self._calls = 0
        """The number of calls of `save()`."""
        self._stepped = False
        self._restored = self._has_called_restore = False
        self._restored_at: dict[str, Any] | None = None
        """The random state then."""
        self._publisher = StatusPublisher(
            self._channel.new_connection, self._channel.prefix, group.rank, group.world_size, self._status
        )
        self._barriers = Barriers(self._channel, self._publisher, self._heartbeat)
        if self._channel.store is not None:
            self._publisher.start(self._channel.store)
            self._channel.put(f"entry/{group.rank}", _NEW if self._entry is None else _STAYS)

    @property
    def round(self) -> int:
        """The round's number, from 1; 0 where no elasticd agent started this process."""
        return self._environment.round

    @property
    def restarts(self) -> int:
        """Restarts of this job so far, as torchrun counts them (TORCHELASTIC_RESTART_COUNT)."""
        return self._environment.restarts

    @property
    def rank(self) -> int:
        """This process's rank in the default process group."""
        return self._group.rank

    @property
    def local_rank(self) -> int:
        """The process's rank on this machine, which is also its device's index."""
        return self._environment.local_rank

    @property
    def world_size(self) -> int:
        """Ranks in this round."""
        return self._group.world_size

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on: the accelerator of its local rank, else the CPU."""
        return self._group.device

    @property
    def steps(self) -> int:
        """Optimizer steps committed so far, over all rounds: `restore()` sets it, `step()` counts."""
        return self._steps

    @property
    def should_stop(self) -> bool:
        """True once all ranks have decided to stop, from the same step on; what is attached has been saved."""
        return self._should_stop

    def attach(self, *, optional: bool = False, per_rank: Mapping[str, Any] | None = None, **objects: Any) -> Session:
        """Name what a checkpoint holds: model=, optimizer=, scheduler=, sampler=, a torch.Generator, anything with
        state_dict(). Returns the session, for `restore()`.

        Rank 0's state is saved, and loaded by all; of sharded modules and optimizers (FSDP2, DTensor,
        ZeroRedundancyOptimizer) each rank's part; of `per_rank`, a dict by name, every rank's. On another world size
        such an object gets all of them: it needs a method `load_state_dicts(states, rank, world_size)` for that.

        With `optional=True` a checkpoint that holds nothing under these names can be restored; they stay as they are.

        Modules may be wrapped (DDP, torch.compile): the checkpoint holds what is inside. An object with a `commit()`
        method gets that call at every `step()`, one with `on_stop()` when all ranks stop. Sends nothing to other ranks.
        Raises UsageError for an object that cannot be saved and loaded, for a name given twice, and after `restore()`.
        Where that has loaded nothing, a call after the first step is a warning. SamplerError for a loader with a state
        beside that of its ElasticBatchSampler.
        """
        if per_rank is not None and not hasattr(per_rank, "items"):
            raise UsageError(f"attach(per_rank={per_rank!r}): give a dict by name, as in per_rank={{'loader': loader}}")
        objects, own = (
            {name: training_state.as_attachable(name, obj) for name, obj in by_name.items()}
            for by_name in (objects, per_rank or {})
        )
        every = [*objects.items(), *own.items()]
        names = {*self._attached, *self._context.per_rank}
        for name, obj in every:
            sharded.check_mesh(name, obj, self._group.world_size)
            check_attached_loader(name, obj)
            if name in names:
                raise UsageError(f"attach({name}=...): that name is taken; each object needs its own")
            names.add(name)
        if every and self._has_called_restore:
            what = f"attach({every[0][0]}=...) after restore(): attach everything before it, also what is used later"
            if self._restored or not self._stepped:
                raise UsageError(what)
            self._say_once(f"{what}; a run that resumes from here refuses this call")
        for obj in objects.values():
            # A wrapper around an optimizer may be one without having called its __init__.
            if callable(getattr(obj, "register_step_pre_hook", None)) and hasattr(obj, "_optimizer_step_pre_hooks"):
                self._optimizers.append((obj, obj.register_step_pre_hook(self._on_optimizer_step)))
            if (mark := vars(obj).get(_SCALER_MARK) if hasattr(obj, "__dict__") else None) is not None:
                self._scalers[obj] = mark
        for sampler in (each for _, obj in every for each in samplers_of(obj)):
            sampler.on_next = functools.partial(self._on_next, sampler)
        self._attached.update(objects)
        self._context.per_rank.update(own)
        self._optional |= {name for name, _ in every} if optional else set()
        self._omissions.watch_attached()
        if every and self._donor is not None:
            self._donor.close()
        self._committing = [obj for obj in self._attached_objects() if callable(getattr(obj, "commit", None))]
        return self

    def restore(self, directory: str | os.PathLike[str] | None = None, step: int | None = None) -> Resumed | None:
        """Load the newest checkpoint that can be read whole; None where there is none.

        With `step`, the directory goes back to the checkpoint of that step, once: newer ones are renamed to NAME.aside,
        and every later call continues from what was saved since then.

        Loads everything attached and this rank's random states, and sets `steps`. The checkpoint may be of another
        world size; `notes` of the result say which part of it could not be used. `directory` overrides
        ELASTICD_CHECKPOINT_DIR.

        Raises UsageError without a directory, with nothing attached or after the first step; DirectoryInUse when
        another run holds it; CheckpointError, on every rank, when a rank could not load the checkpoint, or when there
        is none of `step`.
        """
        if not self._attached:
            raise UsageError("restore(): nothing is attached; call session.attach(model=..., optimizer=...) first")
        if self._stepped:
            raise UsageError("restore() after step(): restore before the first step")
        if self._is_running and self._has_called_restore and not self._is_attached_by_train:
            raise UsageError(
                "restore() inside what session.run() calls, which has restored what was attached before: leave this "
                "call out, or call it before run()"
            )
        self._directory = resolve(directory) if directory else self._directory
        if not self._is_running:
            self._modules.on_restore()
        if self._is_ahead:  # `run` restores in the round
            self._has_called_restore = True
            return None
        self._channel.call = "restore()"
        issued = self._issued()
        self._saver.open_directory(directory, "restore")
        with self._channel.numbered_call("restore"):
            self._has_called_restore = True
            resumed = restore.restore(self._attached, self._optional, step, self._saver, self._holder)
        self._issued_by_session += self._issued() - issued
        if resumed is None and self._has_left:
            raise CheckpointError("the state of the round before is gone, and this process cannot begin anew")
        if resumed is not None:
            if self._context.directory in _trained_directories and not self._has_left:
                self._say_once(
                    f"restore() has loaded step {resumed.step}, which an earlier session of this process has trained: "
                    "another training, as of the next model, needs a directory of its own, restore(directory=...)"
                )
            self._restored = True
            self._restored_at = training_state.random_state(self._group.device)
            self._steps = resumed.step
            self._decisions.reset(resumed.step)
            self._samplers.on_restore()
            self._since_restore = RestoredModules(self._attached)
        for name, epoch in self._samplers.find_used() if resumed is None else ():
            self._say_once(
                f"{name} is where an earlier training of this process has left it, at epoch {epoch}, and "
                f"range({name}.epoch, ...) begins there: make a sampler for each training"
            )
        return resumed

    def checkpoint(
        self,
        every: int | str | timedelta,
        directory: str | os.PathLike[str] | None = None,
        keep: int = DEFAULT_KEEP,
        barrier: float | timedelta | None = None,
        keep_every: int = 0,
        partner_copies: bool = True,
    ) -> None:
        """Save every `every` steps (50), or at an interval of time ("30s", a timedelta), by rank 0's clock.

        `directory` overrides ELASTICD_CHECKPOINT_DIR; the newest `keep` checkpoints stay, and the first one from each
        multiple of `keep_every` steps on, for ever (0: none). A full or read-only disk is
        reported, and the save is tried again when the next one is due. With `partner_copies`, each of several nodes
        keeps a copy of another one's part of a sharded state in memory. With `barrier` (seconds, or a timedelta) all
        ranks meet at a barrier of that timeout before each save, so that an error names a rank that does not come.

        Raises UsageError without a directory or for arguments that cannot work, DirectoryInUse when another run holds
        the directory.
        """
        parsed = parse_interval(every)
        if keep < 1:
            raise UsageError(f"checkpoint(keep={keep!r}): keep at least 1 checkpoint")
        if keep_every < 0:
            raise UsageError(f"checkpoint(keep_every={keep_every!r}): give a number of steps, or 0")
        barrier_s = None if barrier is None else timeout_seconds(barrier, "checkpoint(barrier=...)")
        self._directory = resolve(directory) if directory else self._directory
        self._channel.call = "checkpoint()"
        if not self._is_ahead:
            self._saver.open_directory(directory, "checkpoint")
        self._context.every = parsed
        self._context.keep = keep
        self._context.keep_every = keep_every
        self._context.partner_copies = partner_copies
        self._barrier_s = barrier_s

    @property
    def saved_step(self) -> int | None:
        """The step of the last checkpoint that was waited for (`save()`, a stop, a pause) and is on the disk.

        After `should_stop` it equals `steps`, unless that checkpoint failed. Checkpoints at an interval are written
        while training continues and do not count here.
        """
        return self._saver.saved_step

    def save(self) -> bool:
        """Save a checkpoint now, whatever `checkpoint()` says; True, on every rank, once it is on the disk.

        A full disk is reported, does not stop training, and returns False. So does a call inside a step, after the
        optimizer's step or between accumulated gradients: the checkpoint is saved by the `step()` that ends it. After
        a stop nothing is saved that has been changed since.

        Raises UsageError without a directory or with nothing attached, CheckpointRefused for a state that
        `torch.load(weights_only=True)` would not open, naming the key.
        """
        self._check_call("save()")
        self._channel.call = "save()"
        self._saver.open_directory(None, "save")
        if self._should_stop and self._saver.saved_step == self._steps:
            return True
        self._calls += 1
        what = f"how the state of step {self._steps} is saved"
        how = self._channel.on_rank0(f"save/{self._calls}", what, self._how_to_save)["how"]
        if how == "after a stop":
            self._say_stopped("save()")
            return False
        if how == "inside a step":
            self._say_once(
                f"session.save() inside step {self._steps + 1}: the optimizer's step, or gradients that it uses, are "
                "no part of a step yet. The checkpoint is saved at the end of that step. Call it after session.step()"
            )
            self._is_put_off = self._is_requested = True
            self._due = "requested by the script"
            return False
        is_next_epoch = how == "in the next epoch"
        with ExitStack() as within:
            for sampler in self._samplers.all() if is_next_epoch else ():
                within.enter_context(sampler.in_next_epoch())
            drawn = (
                self._between_steps.random_state_to_save
                if self._between_steps is not None and not is_next_epoch
                else None
            )
            saved = self._save("requested by the script", wait=True, random_state=drawn)
        if self._between_steps is not None:
            self._between_steps.on_save(is_next_epoch)
        return saved

    def save_again(self, after: str) -> None:
        """Save the state at the end of the next step, if it has been saved at the present one: a framework's loop has
        changed it `after` that. All ranks call it.
        """
        if self._between_steps is not None and self._between_steps.is_saved:
            self._is_put_off, self._due = True, f"step {self._steps} was saved before {after}"

    def _how_to_save(self) -> dict[str, Any]:
        """The choice of rank 0 for all ranks of what `save()` does."""
        if self._should_stop and self.has_optimized:
            return {"how": "after a stop"}
        if self.has_optimized or not (self._was_optimized or not self._has_gradients()):
            return {"how": "inside a step"}
        is_changed = self._between_steps is not None and self._between_steps.is_changed()
        if is_changed and self._should_stop:
            return {"how": "after a stop"}
        is_next_epoch = is_changed and self._samplers.is_loop_at_end()
        return {"how": "in the next epoch" if is_next_epoch else "now"}

    def step(self) -> None:
        """End an optimizer step: count it, commit the sampler, write the heartbeat, decide with all ranks, save if due.

        When the agent expects another round soon it may request a pause: then a checkpoint is saved and this call
        waits, on all ranks at the same step, until the agent ends the process or the pause is over.

        Where gradients are accumulated, a save, a pause and a stop wait for a step in which an optimizer has stepped.
        After a stop this call does nothing, and says so.

        Raises DecisionTimeout when rank 0's decision does not arrive, CheckpointRefused at the first save,
        BarrierTimeout where `checkpoint(barrier=...)` asks for a barrier.
        """
        self._check_call("step()")
        if self._should_stop:
            self._say_stopped("step()")
            return
        if self._closed:
            self._say_once(
                "session.step() after close(): no rank saves its state at a fault any more, and another run may use "
                "the checkpoint directory. Close the session after the last step"
            )
        if not self._stepped:
            self._on_first_step()
        self._omissions.check_at_step()
        if self._donor is not None:
            self._donor.begin_commit()
        for obj in self._committing:
            obj.commit()
        self._steps += 1
        if self._donor is not None:
            self._donor.commit(self._steps)
        self._issued_before, self._issued_at_step = self._issued_at_step, (issued := self._issued())
        self._heartbeat.step(self._steps, issued=issued)
        self._channel.call = "step()"
        self._was_optimized, self.has_optimized = self._has_updated_scaler() or self.has_optimized, False
        if self._saver.due_by_steps(self._steps):
            self._is_put_off, self._due = True, str(self._context.every)
        decision = self._decisions.decide_at(self._steps, self._is_put_off)
        action: Action = decision.action if decision else "continue"
        saved = holds = action == "pause" and decision is not None and decision.reason == _PAUSE_WITHOUT_SAVE_REASON
        if holds and self._donor is not None:
            self._donor.begin_pause()
        elif decision and (action in ("save", "pause") or (action == "stop" and self._is_saved_at_stop())):
            if decision.reason == str(self._context.every):
                self._channel.call = f"checkpoint({self._context.every})"
            saved = self._save(decision.reason, wait=action != "save" or self._is_requested)
            self._is_put_off = self._is_requested = False
            self._due = ""
        if self._between_steps is not None:
            self._between_steps.commit(
                self._steps, is_saved=action != "continue" and not holds, ends_epoch=self._samplers.is_loop_at_end()
            )
            self._ended_epochs = self._read_ended_epochs()
        if action == "pause":
            action = self._pause(saved)
        if action == "stop":
            # Rank 0 may serve the store itself, and may leave once it has stopped: not before all have read the
            # decision.
            self._channel.gather_on_rank0("stopped", b"", "their stop")
            self._should_stop = True
            if saved and self._donor is not None:
                self._donor.close()  # what the script trains from here on is no step
            for obj in [*self._attached_objects(), *self._samplers.all()]:
                if callable(on_stop := getattr(obj, "on_stop", None)):
                    on_stop()

    def _has_updated_scaler(self) -> bool:
        """Since the last step: if no optimizer has made one, a GradScaler has skipped it, and it is over."""
        before, self._scalers = self._scalers, {scaler: getattr(scaler, _SCALER_MARK) for scaler in self._scalers}
        return any(mark is not before[scaler] for scaler, mark in self._scalers.items())

    def _is_saved_at_stop(self) -> bool:
        """The script uses checkpoints."""
        return self._context.every is not None or self._calls > 0

    def _attached_objects(self) -> list[Any]:
        return [*self._attached.values(), *self._context.per_rank.values()]

    def _on_first_step(self) -> None:
        """At the first step: what is attached is known now."""
        self._stepped = True
        self._sigterm.install()
        if self._is_attached_by_train and self._is_running and self._launch.is_connected:
            self._enter_train_with_attached()
        if self._attached and self._context.directory is not None:
            _trained_directories.add(self._context.directory)
            if not self._has_called_restore:
                self._channel.call = "step()"
                restore.check_unrestored(self._context, self._attached)
            every = self._context.every
            known: dict[str, Any] = (
                {"every_seconds": every.seconds} if every is not None and every.seconds is not None else {}
            )
            self._donor = self._donor or self._begin_donor()
            self._between_steps = BetweenSteps(self._attached, self._donor, self._group.device, first_step=self._steps)
            self._thread = threading.get_ident()
            # Where a rank is alone, a hang is its own, and may hold up what would save.
            known["saves_at_faults"] = self._donor.can_save_state and self.world_size > 1
            self._events.write("attached", "a checkpoint is attached", self._steps, **known)

    def _begin_donor(self) -> Donor:
        holds = not self._is_attached_by_train
        return Donor(self._context, self._attached, self.has_optimized, self._is_in_step, self._launch, holds)

    def _hold_restored(self) -> None:
        """The restored state is one that this rank can save at a fault before its first step."""
        if self._donor is None and self._restored_at is not None:
            self._donor = self._begin_donor()
            self._donor.commit_restored(self._steps, self._restored_at)

    def run(self, train: Callable[[], T]) -> T:
        """Restore, call `train`, and return what it returns; call it again when the ranks of the job change.

        A rank that is lost then costs the others neither their process nor what the script did before this call:
        `train` is left by an exception, the process joins the next round, the state of the newest commit is restored
        into the same objects, and `train` is called again, with another `rank`, `world_size` and `round`. So `train`
        begins where the attached objects are, as after a restart, and makes all that depends on the ranks itself.

        Where nothing is attached, `train` attaches and restores by itself, each time that it is called: objects that
        it has attached are forgotten when it is left.

        Under torchrun, in plain python, and where a process cannot stay, `train` is called once.

        Raises UsageError for a call inside `train`, and before DistributedDataParallel; what `train` raises.
        """
        if not callable(train):
            raise UsageError(f"run({train!r}): give the function itself, session.run(train), not session.run(train())")
        if inspect.isgeneratorfunction(train) or inspect.iscoroutinefunction(train):
            raise UsageError(
                f"run({train!r}): what a generator or coroutine function returns has not trained yet; give a function "
                "that trains before it returns"
            )
        if self._is_running:
            raise UsageError("run() inside what session.run() calls: call it once, with the whole training")
        if self._closed:
            raise UsageError("run() after close()")
        self._is_running = True
        try:
            why = self._reason_against_staying()
            self._is_attached_by_train = not self._attached and not why
            self._opens_before_run = bool(self._attached or self._context.every)
            self._entry = EntryState(self._attached, self._group.device)
            self._modules.on_run_begin()
            if self._is_ahead:
                self._enter_first_round(why)
            elif self._attached and not self._has_called_restore and self._has_directory():
                self.restore()
            if why:
                self._say_restarts(why)
            if why or not self._launch.is_connected:
                return train()
            self._hold_restored()
            self._enter_train()
            return in_place.run(functools.partial(self._call, train), self._launch, self._change_round)
        finally:
            self._is_running = False

    def _call(self, train: Callable[[], T]) -> T:
        result = train()
        if self._has_ended_iterator and not self._launch.changed.is_set():
            raise UsageError(
                "what session.run() calls has returned without asking for a batch, since its iterator was made before "
                "run() and has ended as the ranks changed: make the iterator in what run() calls"
            )
        return result

    def _enter_train(self) -> None:
        """Tell the launcher that this process can leave `train`, once it is known what is attached."""
        if self._attached:
            self._launch.enter_train()

    def _enter_train_with_attached(self) -> None:
        """At the first step, where `train` attaches by itself."""
        assert self._entry is not None
        self._entry.keep(self._attached)
        if why := in_place.reason_against_state(self._attached, self._modules):
            self._say_restarts(why)
        elif not self._attached or self._context.directory is None:
            self._say_restarts(in_place.NOTHING_TO_RESTORE)
        else:
            self._enter_train()

    def _say_restarts(self, why: str) -> None:
        self._say_once(f"a change of ranks restarts every process: {why}")

    def at_entry(self, call: Callable[[], None]) -> None:
        """Have `call` called before each further call of `train`: for what keeps a rank of its own in this process."""
        if call not in self._at_entry:
            self._at_entry.append(call)

    def _enter_first_round(self, why: str) -> None:
        """Wait at the entry, as a newcomer. The others have entered, so a reason against it is this process' own."""
        if why or not self._launch.is_connected:
            raise UsageError(f"this process cannot join the job that runs: {why or 'its launcher is gone'}")
        self._close_round()
        self._modules.release_group()
        process_group.leave(self._group)
        self._enter_round()

    def _check_call(self, call: str) -> None:
        if self._is_ahead:
            raise UsageError(newcomer.refusal(f"session.{call}"))
        self._launch.raise_if_changed()

    def _has_directory(self) -> bool:
        return bool(self._context.directory or self._directory or os.environ.get("ELASTICD_CHECKPOINT_DIR"))

    def _reason_against_staying(self) -> Reason:
        """Return why this process cannot stay, "" if it can, or if no launcher would have it stay."""
        if not self._launch.is_connected:
            return ""
        if self._attached and not self._has_directory():
            return in_place.NOTHING_TO_RESTORE
        if self._stepped or self._calls or self._barriers.has_been_called:
            return "the script calls step(), save() or barrier() of the session before run()"
        collectives = self._modules.collectives if self._is_ahead else self._issued() - self._issued_by_session
        return (
            self._transport.reason_against()
            or in_place.reason_against_group(self._modules, self._group, collectives)
            or in_place.reason_against_state(self._attached, self._modules)
            or in_place.reason_against_objects(self._group.world_size)
        )

    def _change_round(self, why: str) -> None:
        self._leave_round(why)
        try:
            self._enter_round()
        except BaseException:
            if self._holder is not None:
                self._holder.on_script_failure()  # all ranks may raise, and nobody else has the state then
            raise
        self._enter_train()

    def _leave_round(self, why: str) -> None:
        """Give up all that belongs to the round, without waiting for the others: they do the same, or are gone."""
        why = why or (_CLOSED_INSIDE if self._closed else self._modules.reason_against())
        if self._donor is not None and not why and self._donor.leave_round() is not None:
            self._holder = self._donor
        if not why and self._holder is None and not (self._restored or restore.may_have_state(self._context)):
            why = "nothing has been saved yet"
        if not why:
            self._close_round()
            self._modules.release_group()
            try:
                self._transport.leave(self._group)
            except RuntimeError as error:  # of a device, which raises it for ever
                why = f"its process groups cannot be left: {error}"
        if why:  # a new process takes this one's place
            self._context.report(f"rank {self.rank} ends, as its process cannot stay: {why}", self._steps)
            if self._donor is not None:
                self._donor.on_script_failure()  # it may hold the only state
            os.kill(os.getpid(), signal.SIGKILL)

    def _enter_round(self) -> None:
        """Wait for the next round, join it, and restore its state, as a new process of it does."""
        assert self._entry is not None
        holder = self._holder
        held = holder.held if holder is not None else None
        self._launch.report_entry(self._steps, held.commit.step if held is not None else 0)
        release = self._launch.wait_for_release()
        if holder is not None:
            holder.drop_if_changed()
        self._launch.apply_release(release)
        self._is_ahead, self._has_left = False, True
        self._heartbeat.switch_file(os.environ["ELASTICD_HEARTBEAT"])
        environment = process_group.read_environment()
        if holder is not None:
            holder.join_round(environment.round)
        group = process_group.join(environment, self._timeout, self._group.device)
        self._transport.close_held()
        if self._is_attached_by_train:
            self._forget_attached()
        self._begin_round(environment, group)
        follow_group()
        self._entry.put_back()
        for call in self._at_entry:
            call()
        has_new_ranks = _NEW in self._channel.read_all("entry", "whether its process is new")
        if holder is not None:
            holder.skip_held_copy()
        if group.rank == 0 and self._opens_before_run:
            # A new process waits for it in a `checkpoint()` that comes before its DistributedDataParallel.
            self._saver.open_directory(self._directory, "restore")
        is_restored = functools.partial(in_place.is_restored, self._attached, self._optional)
        self._modules.rebuild(is_restored, has_new_ranks, keeps_values=holder is not None and group.rank != 0)
        if self._is_attached_by_train:
            self._entry.keep({})
            return
        self.restore(self._directory)
        self._hold_restored()
        if holder is not None:
            holder.close()
            self._holder = None

    def _unhook(self) -> None:
        """Look at no attached object any more; another session of this process may have it."""
        for sampler in self._samplers.all():
            if getattr(sampler.on_next, "func", None) == self._on_next:
                sampler.on_next = None
        for _, hook in self._optimizers:
            hook.remove()

    def _forget_attached(self) -> None:
        self._unhook()
        for attached in (self._attached, self._optional, self._optimizers, self._scalers, self._context.per_rank):
            attached.clear()
        self._committing = []

    def _on_change(self) -> None:
        """This process has to leave the round; called by another thread, before connections are broken."""
        self._publisher.publish_no_more()
        self._modules.check_before_forward(self._launch.raise_if_changed)

    def _close_round(self) -> None:
        if self._scalars is not None:
            self._scalars.close()
        if self._donor is not None and self._donor is not self._holder:
            self._donor.close()
        self._omissions.close(has_failed=True)
        self._saver.close(wait=False)
        self._barriers.close()
        self._publisher.abandon()
        self._channel.store = None  # closes the connection

    def log(self, **values: SupportsFloat) -> None:
        """Show numbers of the script on the dashboard: `session.log(loss=loss, lr=0.1)`, a float or tensor each.

        Those of rank 0 count; any rank may call. They are sampled once a second at first, ever more rarely, and at the
        end; only then the values are read from their device.

        Raises UsageError for more than 16 names in the first call, TypeError or ValueError for a value that is no
        number. Names of later calls beyond 16 in all are left out, with a sentence.
        """
        if self._scalars is not None:
            self._scalars.log(self._steps, values)

    def barrier(self, name: str, timeout: float | timedelta | None = None) -> None:
        """Wait until every rank is here: out of band, through the round's store, on any backend; a single rank passes.

        Each rank's n-th barrier is the same barrier, and must have the same name. `timeout` is in seconds or a
        timedelta; the default is `init`'s decision_timeout. The first rank whose timeout is over ends the barrier for
        all, also for ranks that come later.

        Raises BarrierTimeout, with the last status of the missing ranks; UsageError on every rank where names differ,
        and for arguments that cannot work; torch.distributed's own error when the store is gone.
        """
        self._check_call("barrier()")
        self._barriers.wait(name, timeout)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report that this rank does something other than steps in this block: "eval", "checkpoint" or "starting".

        Each rank for itself. A phase has its own, longer deadline for hang detection. Raises UsageError for another
        name.
        """
        if name not in _PHASES:
            raise UsageError(f"phase({name!r}): the phases are {', '.join(map(repr, _PHASES))}")
        before, environment = self._heartbeat.current_phase, self._environment
        self._heartbeat.set_phase(_PHASES[name])
        try:
            yield
        finally:
            if self._environment is environment:  # else the block is closed with what a change of ranks has left
                self._heartbeat.set_phase(before)

    def close(self) -> None:
        """Release the checkpoint directory and SIGTERM, and destroy the process group if `init()` made it.

        The end of the process does so too. Where rank 0 serves the store itself (not under an agent), it waits here up
        to 5 s for the others, so that they can read its last messages.
        """
        if self._scalars is not None and not self._closed:
            self._scalars.close()
        has_failed = ends_in_failure(sys.exc_info()[1])  # called by `finally`, or at the end of `with`
        if self._donor is not None:
            if has_failed:
                self._donor.on_script_failure()
            self._donor.close()
        self._omissions.close(has_failed)
        self._saver.close(wait=not has_failed)
        self._sigterm.close()
        self._unhook()
        self._modules.unwatch()
        self._barriers.close()
        self._publisher.close()
        if not self._closed and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._channel.leave()
        self._closed = True
        _closed_sessions.add(self)
        process_group.leave(self._group)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A rank that failed does not wait for its peers: they wait for something else.
        self._closed = self._closed or kind is not None
        self._publisher.close(failed=kind is not None)
        self.close()

    def _status(self) -> RankStatus:
        """The status of this rank that the others may read; called by the publisher's thread."""
        name, phase = self._barriers.waiting_at, self._heartbeat.current_phase
        shown = "pause" if phase == Phase.BARRIER else phase.name.lower()
        wait, issued = self._channel.current_wait, self._issued()
        return RankStatus(
            self._steps,
            shown if name is None else "barrier",
            "" if name is None else name[:64],
            issued=issued,
            issued_in_step=issued - self._issued_at_step if issued >= self._issued_at_step >= 0 else -1,
            collective=self._main_thread.awaited_collective() if only_default_group_exists() else "",
            wait=wait.number if wait else 0,
            call=wait.call if wait else "",
            key=wait.key if wait else "",
            ranks=wait.ranks if wait else (),
        )

    def _status_before_call(self) -> RankStatus:
        """This rank's status as it was when it called the session: `step()` counts before it waits."""
        status = self._status()
        if self._channel.call != "step()":
            return status
        in_step = status.issued - self._issued_before if status.issued >= self._issued_before >= 0 else -1
        return replace(status, step=self._steps - 1, issued_in_step=in_step)

    def _is_in_step(self) -> bool:
        return self._issued() > self._issued_at_step >= 0

    def _on_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        self._launch.raise_if_changed()
        self.has_optimized, self._max_partial = True, MAX_ACCUMULATED_STEPS
        self._saver.compared_state.stepped.add(id(optimizer))
        if self._between_steps is not None and not self._between_steps.has_begun:
            self._on_step_begin(is_certain=False)

    def _on_next(self, sampler: ElasticBatchSampler, is_iteration: bool) -> None:
        """An attached sampler is asked for a batch."""
        self._has_ended_iterator = self._launch.changed.is_set()
        self._launch.raise_if_changed()
        if threading.get_ident() != self._thread:
            return
        if self._since_restore is not None:
            if lost := self._since_restore.find_replaced():
                self._say_once(
                    f"{' and '.join(lost)} changed between restore() and the first batch: the state that was restored "
                    "is lost, and so it is at each restart. Move restore() below this change"
                )
            self._since_restore = None
        is_first = self._between_steps is not None and not self._between_steps.has_begun
        self._samplers.on_next(sampler, is_iteration=is_iteration, is_first=is_first, has_stepped=self._stepped)
        if is_first:
            self._on_step_begin(is_certain=True)

    def _on_step_begin(self, is_certain: bool) -> None:
        assert self._between_steps is not None
        if self._read_ended_epochs() != self._ended_epochs:
            self._between_steps.on_epoch_end()
        if what := self._between_steps.on_step_begin(is_certain):
            self._say_once(what, key=" ".join(self._between_steps.changed))
            self._due = self._due or self._between_steps.why_save_again()

    def _read_ended_epochs(self) -> list[Any]:
        """The epochs that each RankLoader has ended: it does not know which batch is an epoch's last one."""
        return [getattr(obj, "ended_epochs", None) for obj in self._context.per_rank.values()]

    def _has_gradients(self) -> bool:
        return any(
            parameter.grad is not None
            for optimizer, _ in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def _say_stopped(self, call: str) -> None:
        self._say_once(
            f"session.{call} after the stop at step {self._steps} has no effect: all ranks have stopped there, and a "
            "resumed run continues from there. Leave every loop and end the script when session.should_stop is True"
        )

    def _say_once(self, what: str, key: str = "") -> None:
        """Once for each key: on this rank's stderr, and by rank 0 in the job's log."""
        key = key or what
        if key in self._said:
            return
        self._said.add(key)
        logger.warning(what)
        if self._group.rank == 0:
            self._events.write("message", what, self._steps, once=key)

    def _save(self, why: str, wait: bool, random_state: dict[str, Any] | None = None) -> bool:
        if self._barrier_s is not None:
            self.barrier(f"checkpoint at step {self._steps}", self._barrier_s)
        if self._donor is not None:
            self._donor.rewatch_at_next_commit()
        try:
            return self._saver.save(self._steps, self._attached, why, wait, random_state)
        except CheckpointRefused:
            if self._donor is not None:
                self._donor.close()  # nor is it saved at the fault that this may be
            raise

    def _propose(self) -> tuple[Action | Literal["wait"], str]:
        """Rank 0: what all ranks should do at this decision point, and why. No save of any kind lies between
        accumulated gradients, which it would not hold.
        """
        action, why = self._wanted_action()
        if action == "save" and self._between_steps is not None and self._between_steps.may_be_refused:
            return "wait", why
        if self._was_optimized:
            self._partial = 0
        if (
            action == "continue"
            or self._was_optimized
            or self._partial >= self._max_partial
            or not self._has_gradients()
        ):
            return action, why
        self._partial += 1
        return "wait", why

    def _wanted_action(self) -> tuple[Action, str]:
        if why := self._stop_reason():
            return "stop", why
        if self._pauses.take_request(
            self._steps, can_pause=self._context.directory is not None and bool(self._attached)
        ):
            return "pause", _PAUSE_WITHOUT_SAVE_REASON if self._can_hold_in_pause() else "the agent requested a pause"
        if why := self._due or self._saver.due_by_time():
            return "save", why
        return "continue", ""

    def _can_hold_in_pause(self) -> bool:
        """The processes that stay can have the state in a pause, and no checkpoint is due."""
        if not (self._pauses.all_stay and self._entry is not None and self._launch.is_connected) or self._due:
            return False
        return self._donor is not None and self._donor.can_hold_state and not self._is_put_off

    def _stop_reason(self) -> Reason:
        self._launch.raise_if_changed()
        if self._heartbeat.request & heartbeat.REQUEST_KIND_MASK == heartbeat.STOP:
            return "the agent requested a stop"
        # Under an agent the agent decides: batch systems signal every process of a job, also where only one node has to
        # leave, and a script that stops by itself has succeeded.
        return "SIGTERM" if self._sigterm.received and isinstance(self._heartbeat, heartbeat.NullHeartbeat) else ""

    def _pause(self, saved: bool) -> Action:
        before = self._heartbeat.current_phase
        self._heartbeat.set_phase(Phase.BARRIER, heartbeat.PAUSE_BARRIER)
        try:
            over = self._decisions.decide_again(
                self._steps,
                lambda: self._pauses.wait(self._steps, saved, self._stop_reason),
                self._pauses.timeout_s,
                self._launch.sleep_until_changed,
            )
        finally:
            self._heartbeat.set_phase(before)
        return over.action


def ends_in_failure(error: BaseException | None) -> bool:
    """The script ends by this exception, which is being handled, and has not done all of its work."""
    return error.code not in (None, 0) if isinstance(error, SystemExit) else error is not None
