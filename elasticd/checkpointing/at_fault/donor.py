"""A save at a fault: before a broken group is killed, a surviving rank copies the state of its last commit into memory.

Under DistributedDataParallel every rank has the whole state of the last commit, the end of `session.step()`. So one
survivor is enough to lose no step, if what it copies is the state of that step and of no other. A rank that is alone
saves its own state so, where its process lives: at a stop, and when its script fails. The order:

1. At each commit (`committed_state`) a rank records what may change before the next optimizer step: random states,
   buffers, learning rates, small objects. Parameters and the optimizer's tensors are not copied: they change only
   between the optimizer's pre-step hook and the next commit. In the backward pass it also records what it expects to be
   at the next commit, before it sends the gradient without which no other rank can end the step.
2. For the time of that change the training thread holds a lock. A thread that saves holds it, too: a state is never
   copied while it is changed, and cannot be changed while it is copied.
3. A rank dies. The launcher asks the node's writer before it kills the group, the writer asks every rank of its node,
   and a thread answers in each: the training thread stands in a collective, which waits without the GIL. A rank whose
   script fails saves by itself before it exits.
4. The thread waits, in turn, for a step that another rank has committed and this one has not, for the lock, and for the
   GPU to reach the last commit (`step_ring`). Each wait is bounded: the launcher waits for all answers.
5. It compares the state with the fingerprint of the commit, copies it into a buffer that the writer lends, and compares
   again. Only then does the writer hear that the share is whole. The first rank with the most advanced step is taken.
6. The next round resumes from it (`restore`). A rank that died takes its random state from its own record, or from that
   of a rank which has drawn alike.

A rank that stays in its process (`session.run`) copies nothing in 5 if its objects, on a CPU, are those of the next
round: it holds the state, since nothing changes it any more. It begins no other step before it is unwound, compares the
state again once the script has left it, and keeps this thread until the next round has the state: who is killed
meanwhile is asked first, and copies what it holds. So it does when it waits for long.

What this order prevents:

- Half of a step: the lock of 2, and on a GPU an event before each optimizer step and one at each commit.
- A change that nobody announced, such as `p.data.mul_()` between steps: 5 finds it by counters and pieces of tensors,
  and the rank gives up rather than save a state that belongs to no step.
- A save of an older step than the newest that a rank has ended: a rank sends its gradients before it commits, so the
  others can end that step, too, and 4 waits for them to do so.
- A state that is lost with the only process that holds it: the launcher asks again, for a copy, before it kills a rank
  that does not leave its round, unless another one has left it and holds the state.
- A state that only this rank has: `donor_rules` refuses scripts of which ranks may differ, by a sentence in the log.
- A rank that saves for ever: it is killed after the launcher's wait, and the last save as usual is resumed from.

In doubt a rank is no donor; it gives the reason once, as a worker event.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from elasticd import channel
from elasticd.checkpointing.at_fault import step_files, step_record
from elasticd.checkpointing.at_fault.committed_state import CHANGED_REASON, CommittedState
from elasticd.checkpointing.at_fault.donor_rules import averaged_parameters, reason_against
from elasticd.checkpointing.at_fault.held_commit import HeldCommit, large_storages
from elasticd.checkpointing.at_fault.step_ring import Commit
from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.memory.buffers import (
    ANOTHER_SAVES_REASON,
    PROTOCOL_VERSION,
    STILL_COPIED_REASON,
    donated_number,
    donated_step,
)
from elasticd.checkpointing.memory.writer_client import SnapshotRefused, WriterClient
from elasticd.checkpointing.state import device_copy, training_state
from elasticd.checkpointing.state.layout import Layout
from elasticd.checkpointing.state.safe_types import check_loadable
from elasticd.checkpointing.state.training_state import RandomState
from elasticd.checkpointing.storage.atomic_write import write_at
from elasticd.checkpointing.storage.manifest import Manifest
from elasticd.errors import CheckpointError, Reason
from elasticd.rejoin.launch_channel import NoLaunchChannel

MAX_COMMIT_COPY_S = 200e-6
"""The longest that the copies at a commit may take, or COPY_SHARE_OF_STEP of a step if that is longer; else the rank is
no donor."""
COPY_SHARE_OF_STEP = 0.002
TRIAL_COMMITS, MAX_TRIAL_COMMITS = 32, 128
"""Commits of which the fastest copy and the fastest step are compared; of more if that takes too long, since on a busy
machine each of the first ones may have been disturbed."""
CHANGE_WAIT_S, MAX_CHANGE_WAIT_S = 0.25, 2.0
"""The time that a rank is waited for which is between the optimizer's step and the commit, or about to begin that:
CHANGE_WAIT_S and twice the time that this took lately, but less than the launcher waits."""
SHORT_LIVED_WRITER_S, MAX_SHORT_LIVED_WRITERS = 1.0, 3
"""A writer that ends so soon, so many times in a row, will do so again."""
GPU_PROBE_S = 0.1
"""A copy of one byte from a GPU takes 0.1 ms, or does not end."""
GPU_CATCH_UP_S = 0.25
"""The wait for a GPU that is at the end of the last step: an optimizer's step of a large model takes 0.01 to 0.1 s
there."""
STEP_BEGIN_WAIT_S = 0.1
"""The wait for a rank that is about to begin a step; its script may do something long before that, such as an
evaluation."""
KILL_WAIT_S = 5.0
"""The wait for the launcher to kill or unwind this rank, which it does at once."""
OTHER_COPY_WAIT_S = 5.0
"""The wait for another rank that copies the same step: the launcher waits for all."""
COPY_HELD_AFTER_S = 1.0
"""A state that is held for longer is copied, too: all processes that hold it may be lost while they wait. The only one
of its node begins at once. A copy that is not complete when the round is does not go on."""
_COPY_SLICE_BYTES = 16 << 20
"""The part of a tensor after which such a copy may end."""
_MID_CHANGE_REASON = "it was between the optimizer's step and session.step()"
HasDrawn = bool
"""True if the script has drawn random numbers since the last commit."""


class _CopyNotNeeded(Exception):
    """The next round has the state."""


class CopyTrial:
    """Measures the first commits: the fastest copy and the fastest step show whether copies cost too much."""

    def __init__(self) -> None:
        self._commits = TRIAL_COMMITS
        self._copy_s, self._last = 1e9, 0.0
        self.step_s = 1e9
        """The fastest step."""

    def measures_next(self, commits: int) -> bool:
        """True if the next commit, after so many, is measured."""
        return commits < self._commits

    def add_commit(self, commits: int, start: float, copy_s: float) -> Reason:
        """Take a commit into account. Returns why the rank gives up, "" if it does not."""
        self._copy_s = min(self._copy_s, copy_s)
        if self._last:
            self.step_s = min(self.step_s, start - self._last)
        self._last = start
        if self.measures_next(commits) or self._copy_s <= max(MAX_COMMIT_COPY_S, COPY_SHARE_OF_STEP * self.step_s):
            return ""
        self._commits *= 4
        if self._commits <= MAX_TRIAL_COMMITS:
            return ""
        return f"copying buffers and random states takes {self._copy_s * 1e6:.0f} µs a step"


class Donor:
    """This rank as a donor. `begin_commit` and `commit` are called by `session.step()`, `on_script_failure` when the
    script has failed.
    """

    def __init__(
        self,
        context: SaveContext,
        attached: Mapping[str, Any],
        optimized: bool,
        is_in_step: Callable[[], bool] = lambda: False,
        launch: NoLaunchChannel | None = None,
        keeps_objects: bool = True,
    ) -> None:
        """`optimized`: an optimizer has begun a step before. `is_in_step` returns whether this rank has begun to do
        something with the others since the last commit. `launch` may have this process leave the round;
        `keeps_objects`: the attached objects are those of the next round, too.
        """
        self._keeps_objects = keeps_objects
        self._launch = launch or NoLaunchChannel()
        self._context, self._attached = context, attached
        self.is_in_step = is_in_step
        self._pid = os.getpid()
        self._lock = threading.Lock()
        """Held from the optimizer's pre-step hook to the commit, and by a thread that saves."""
        self._changing = False
        self._change_s, self._changing_since = 0.0, 0.0
        """The time that it took lately from the optimizer's step to the commit."""
        self._optimized = optimized
        self._has_begun = True
        """The step after the last commit: until then the script may still change what belongs to the commit."""
        self._is_changed = False
        """The state of the last commit has been, since then."""
        self._is_expected = True
        """`_record_expected` has been called since the last optimizer's step began."""
        self._next_step = 0
        """The step that the next `session.step()` ends; 0 before the first one."""
        self._step = 0
        """The last commit: a step without an optimizer's step is none, unless a GradScaler has skipped it."""
        self._committed: CommittedState
        self._trial = CopyTrial()
        self._expect_s = 0.0
        self._socket: socket.socket | None = None
        self._round = context.round
        """The round in which it answers."""
        self._saved = 0
        """The step of which it has found or put a copy in memory, since the last request."""
        self.held: HeldCommit | None = None
        """The state of the last commit, from the launcher's word that this process is to stay."""
        self._left_with = ""
        """The digest of that state, once the script has left it unchanged."""
        self._is_copied = False
        """A copy of it is in memory, or is not needed."""
        self._copy_after_s = COPY_HELD_AFTER_S
        self._closed = self._failed = self._is_silent = False
        self._unsaved: tuple[int, str] | None = None
        """Step and reason of the last report."""
        self._hooks: list[Any] = []
        self._thread = threading.Thread(target=self._serve_requests, name="elasticd-donor", daemon=True)
        self._why = ""
        try:
            parameters = averaged_parameters(attached, context.group.world_size)
            self._why = reason_against(context, attached, parameters)
            if not self._why:
                self._committed = CommittedState(context, attached, parameters, self._record_expected)
                self._start()
        except Exception as error:  # noqa: BLE001 - state_dict() of any object: training continues
            self._why = f"{type(error).__name__}: {error}"
        if self._why:
            self._give_up(self._why)

    def _start(self) -> None:
        if self._committed.copies is not None:
            self._committed.copies.can_copy(device_copy.FIRST_COPY_TIMEOUT_S)
        self._socket = self._connect()
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_optimizer_step) for optimizer in self._committed.optimizers
        ]
        self._thread.start()
        atexit.register(self._at_exit)

    def _connect(self) -> socket.socket:
        """To the writer, as a donor; where there is none, the launcher starts it. Raises OSError."""
        assert self._context.writer is not None
        connection = channel.connect(self._context.writer.socket_path)
        try:
            channel.send(connection, {"do": "donor", "round": self._round, "version": PROTOCOL_VERSION})
        except OSError:
            connection.close()
            raise
        return connection

    def rewatch_at_next_commit(self) -> None:
        """The next commit may look for tensors that are new: a save has been made, which takes longer than that."""
        if not self._why:
            self._committed.rewatch_at_next_commit()

    def _before_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        self._has_begun = True
        if not self._is_expected and not self._why:
            self._committed.hook_first_gradient(optimizer)
        self._is_expected = False
        if self._changing:
            return
        self._optimized = True
        if why := self._committed.compare_with_commit():
            self._give_up(why)
        self._begin_change()
        self._committed.before_optimizer_step(self._step > 0)

    def _begin_change(self) -> None:
        acquired: list[bool] = []
        try:
            # In one call of C code: what a signal handler raises comes before it or after it, never between.
            acquired.extend(map(self._lock.acquire, (True,)))
            if self._launch.changed.is_set():  # the thread has kept the training thread waiting for that
                self._launch.raise_if_changed()
            self._changing = True
        except BaseException:
            if acquired and not self._changing:
                self._lock.release()
            raise
        self._changing_since = time.monotonic()

    def _record_expected(self, _: torch.Tensor) -> None:
        """Record the expected state in the backward pass, before this rank sends a gradient that the others need for
        the step.
        """
        self._has_begun = self._is_expected = True
        if not self._next_step or self._why or os.getpid() != self._pid:
            return
        start = time.perf_counter() if self._trial.measures_next(self._committed.commits) else 0.0
        try:
            self._committed.record_expected(self._next_step)
        except Exception as error:  # noqa: BLE001 - as in `commit`
            self._give_up(f"the state cannot be copied at a step: {type(error).__name__}: {error}")
        if start:
            self._expect_s = time.perf_counter() - start

    def begin_commit(self) -> None:
        """At the start of `session.step()`."""
        if not self._changing:
            self._begin_change()

    def commit(self, step: int) -> None:
        """Once the step is counted: the state is that of `step` until the next optimizer step.

        A step in which no optimizer has stepped may have left something that is not in the state, such as gradients:
        the commit before it stays. After a step that a GradScaler has skipped there is no such thing.
        """
        try:
            if not self._why:
                if self._optimized or self._committed.has_updated_scaler():
                    self._commit_and_measure(step)
                else:
                    self._committed.skip_commit()
        except Exception as error:  # noqa: BLE001 - state_dict() of any object: training continues
            self._give_up(f"the state cannot be copied at a step: {type(error).__name__}: {error}")
        finally:
            self._change_s = max(time.monotonic() - self._changing_since, 0.8 * self._change_s)
            self._next_step = step + 1
            self._optimized = self._has_begun = self._is_changed = self._changing = False
            self._lock.release()

    def commit_restored(self, step: int, random_state: RandomState) -> None:
        """The state of `step` has been restored, with this random state: it can be saved before the first step."""
        device = self._context.group.device
        now = training_state.random_state(device)
        training_state.set_random_state(random_state, device)
        self.begin_commit()
        self._optimized = True
        self.commit(step)
        training_state.set_random_state(now, device)
        if not self._why:
            self._committed.skip_commit()  # the script may still change it, such as by freezing layers

    def commit_late_changes(self, is_changed: bool, is_epoch_tail: bool) -> HasDrawn:
        """Take into the last commit what the script has changed or drawn since then.

        `is_epoch_tail`: it is repeated by a run that resumes from that commit, as long as all tensors are those of it.
        After a step that was none, between accumulated gradients, nothing is taken: the sampler is ahead of the commit.
        """
        self._has_begun = True
        if self._why or self._changing or not 0 < self._step == self._next_step - 1:
            return False
        has_drawn = False
        try:
            has_drawn = not is_epoch_tail and self._committed.has_drawn()
            if has_drawn or (is_changed and not (is_epoch_tail and not self._committed.are_tensors_changed())):
                with self._lock:
                    self._committed.replace_commit(self._step)
                    self._is_changed = True
            self._committed.mark_next_step_begun()
        except Exception as error:  # noqa: BLE001 - as in `commit`
            self._give_up(f"the state cannot be copied at a step: {type(error).__name__}: {error}")
        return has_drawn

    def _commit_and_measure(self, step: int) -> None:
        start = time.perf_counter() if self._trial.measures_next(self._committed.commits) else 0.0
        self._step = 0
        if why := self._committed.commit(step, scaler_skipped=not self._optimized):
            self._give_up(why)
            return
        self._step = step
        if not start:
            return
        why = self._trial.add_commit(self._committed.commits, start, time.perf_counter() - start + self._expect_s)
        if not self._trial.measures_next(self._committed.commits):
            self._committed.set_step_s(self._trial.step_s)
        if why:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        self._why = why
        self._step = 0
        if self._context.writer is not None:
            reason = f"rank {self._context.group.rank} cannot save its state at a fault: {why}"
            self._context.events.write("message", reason, None, saves_at_faults=False)

    @property
    def can_save_state(self) -> bool:
        """At a fault, as far as is known now."""
        return not self._why

    @property
    def can_hold_state(self) -> bool:
        """The state of the last commit, in this process, as far as is known now."""
        return not self._why and self._step > 0 and self._can_stay_in_objects()

    def _can_stay_in_objects(self) -> bool:
        """The state can stay in the objects. A GPU is behind its processor, and what it has needs a copy."""
        return self._keeps_objects and self._committed.copies is None

    def begin_pause(self) -> None:
        """At the end of a step: the ranks wait there, so the script changes nothing before the launcher's request."""
        self._has_begun = True

    def _report_unsaved(self, step: int, why: str) -> None:
        if self._is_silent or self._unsaved == (step, why):
            return
        self._unsaved = step, why
        reason = f"rank {self._context.group.rank} has not saved step {step} at the fault: {why}"
        self._context.events.write("message", reason, step)

    def _report_mid_change(self) -> None:
        """The objects are between two steps; another rank, or this one a moment before, may have saved the first."""
        client = self._make_client()
        with contextlib.suppress(OSError, SnapshotRefused), contextlib.closing(client):
            if self._is_silent or self._is_saved(client, self._step):
                return
        self._report_unsaved(self._step, _MID_CHANGE_REASON)

    # --- at a fault ---------------------------------------------------------------------------------------------------

    def _serve_requests(self) -> None:
        """The thread: to each request one answer, when the state is saved or cannot be.

        When the writer has ended, connecting again starts another one, which finds the states in the same memory.
        """
        short, why = 0, ""
        while not why and not self._closed:
            since = time.monotonic()
            why = self._answer_requests()
            short = short + 1 if time.monotonic() - since < SHORT_LIVED_WRITER_S else 0
            if short == MAX_SHORT_LIVED_WRITERS:
                why = f"the writer has ended {short} times"
            elif not why and not self._closed:
                why = self._reconnect()
        if not self._why and not self._closed:
            self._give_up(why)

    def _reconnect(self) -> Reason:
        """Returns why this is not possible, "" if it is."""
        assert self._socket is not None
        self._socket.close()
        try:
            self._socket = self._connect()
        except OSError as error:
            return f"the writer has ended, and there is no other one ({error})"
        return ""

    def _answer_requests(self) -> Reason:
        """Until the writer or the session ends; returns why the writer refuses this rank, "" if it does not."""
        assert self._socket is not None
        with contextlib.suppress(OSError):
            while (request := self._next_request(self._socket)) is not None:
                if refused := request.get("refused"):
                    return str(refused)
                self._saved = 0
                if self.held is not None or self._can_copy_from_gpu():
                    channel.send(self._socket, {"do": "saving"})
                    try:
                        until = time.monotonic() + min(CHANGE_WAIT_S + 2 * self._change_s, MAX_CHANGE_WAIT_S)
                        if self.held is None:
                            if self._committed.copies is None:  # a GPU is behind what its processor has committed
                                self._wait_for_own_commit(until)
                            self._wait_for_step_begin()
                        wait_s = max(until - time.monotonic(), 0.05)
                        self._save(wait_s, _is_ended_by(request.get("signum", 0)), request.get("stays", 0))
                    except Exception as error:  # noqa: BLE001 - the launcher waits for the answer
                        if not self._why:
                            self._give_up(f"{type(error).__name__}: {error}")
                self._send_answer()
        return ""

    def _next_request(self, connection: socket.socket) -> channel.Message | None:
        """None at the end. Meanwhile a state that is held for long is copied."""
        poller = select.poll()  # select() takes no descriptor above 1,023
        poller.register(connection, select.POLLIN)
        while self.held is not None and not self._is_copied:
            if poller.poll(self._copy_after_s * 1000):
                break
            with self._lock:
                self._copy_held()
        return channel.receive(connection)

    def _copy_held(self) -> None:
        with contextlib.suppress(_CopyNotNeeded):
            if self.held is not None and not self._is_copied:
                self._copy_to_memory(self.held, even_if_late=False)
            self._is_copied = True

    def _send_answer(self) -> None:
        if self._socket is not None:
            held = self.held.commit.step if self.held is not None else 0
            channel.send(self._socket, {"do": "donated", "held": held, "saved": self._saved})

    def _can_copy_from_gpu(self) -> bool:
        if self._why or self._committed.copies is None:
            return True
        with contextlib.suppress(RuntimeError):  # no thread can be started
            if self._committed.copies.can_copy(GPU_PROBE_S):
                return True
        self._report_unsaved(self._step, "its script had queued more than the GPU takes, and no copy from it ends")
        return False

    def _wait_for_own_commit(self, until: float) -> None:
        """Wait for a step that a rank of this node has committed, and this rank has not: it has what it needs for it.

        If that rank lives, it saves the step.
        """
        context = self._context
        ahead = max(
            step_record.last_committed_step(step_files.record_path("commit", rank))
            for rank in range(context.group.world_size)
        )
        with contextlib.closing(self._make_client()) as client, contextlib.suppress(OSError, SnapshotRefused):
            while 0 < self._step < ahead and not (self._changing or self._failed) and time.monotonic() < until:
                if self._is_saved(client, ahead):
                    return
                time.sleep(0.001)

    def _wait_for_step_begin(self) -> None:
        """A rank that waits for a dead one has begun the next step."""
        until = time.monotonic() + STEP_BEGIN_WAIT_S
        while not (self._has_begun or self._changing or self._failed or self._why) and time.monotonic() < until:
            time.sleep(0.001)

    def _make_client(self) -> WriterClient:
        if self._context.writer is None:
            raise CheckpointError("this node keeps no copy of the state in memory")
        writer = self._context.writer
        return WriterClient(writer.socket_path, 0, 1, writer.is_first_node, writer.make_task_at_end)

    def on_script_failure(self) -> None:
        """The script has failed, or is about to end by an exception: the launcher will end the others."""
        self._failed = True
        if self._why or self._is_forked():
            return
        from torch import distributed

        if self._committed.copies is not None and not distributed.is_initialized():
            self._report_unsaved(self._step, "its process group is gone, and what collectives left may be wrong")
            return
        if self._changing:
            self._report_mid_change()
        else:
            self._save(OTHER_COPY_WAIT_S)  # the thread may be copying, and would end with the process

    def _at_exit(self) -> None:
        has_raised = hasattr(sys, "last_value")
        # A script that catches the exception and calls sys.exit() leaves no other trace of it. It may also have ended
        # as usual, after an evaluation: then nothing is wrong if this saves nothing.
        if has_raised or self.is_in_step():
            self._is_silent = not has_raised
            self.on_script_failure()
        self.close()

    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def close(self) -> None:
        """The rank is no donor any more. A forked child has no thread, and the connection is not its own."""
        if self._is_forked():
            return
        self._closed = True
        self._unhook()
        self.held = None
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._thread.is_alive():
                self._thread.join(OTHER_COPY_WAIT_S)  # it may be saving, and would end with the process
            self._socket.close()
            self._socket = None
            if not self._thread.is_alive():
                self._committed.close_record()
        self._why = self._why or "the session is closed"

    def _unhook(self) -> None:
        atexit.unregister(self._at_exit)
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            self._committed.remove_hooks()
        self._hooks = []

    # --- while this process goes to the next round --------------------------------------------------------------------

    def leave_round(self) -> HeldCommit | None:
        """The script has left its round: the state that this process holds from now on, if it does and nothing has
        changed it.
        """
        self._unhook()
        if self._why or self._changing or not self._can_stay_in_objects():
            return None
        with self._lock:
            try:
                if self.held is not None:
                    self._check_unchanged(self.held.commit)
                elif self._step and (commit := self._committed.commit_in_memory()) is not None:
                    self.held = self._make_held(commit)
                self._left_with = "" if self.held is None else self.held.digest
            except Exception as error:  # noqa: BLE001 - state_dict() of any object
                self._report_unsaved(self._step, str(error))
                self.held = None
        return self.held

    def drop_if_changed(self) -> None:
        """Drop the held state if something other than the script's own thread has changed it."""
        if self.held is not None and self._committed.has_changed(self.held.commit):
            self._report_unsaved(self.held.commit.step, CHANGED_REASON)
            self.drop_held()

    def join_round(self, round: int) -> None:
        """Answer in this round from now on, as long as the state is held."""
        self._round = round
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the writer has ended
                channel.send(self._socket, {"do": "donor", "round": round, "version": PROTOCOL_VERSION})

    def drop_held(self) -> None:
        """The tensors are about to have another state."""
        with self._lock:
            self.held = None
            self._why = self._why or "the next round has another state"

    def skip_held_copy(self) -> None:
        """The round is complete: it has the state soon, and a copy need not be finished."""
        self._is_copied = True

    def _save(self, wait_s: float, ends_next: bool = False, staying_ranks: int = 0) -> None:
        """`ends_next`: the launcher kills or unwinds this rank next. Until then it begins no step, which would be
        trained again. `staying_ranks`: it is unwound, as so many ranks of this node, and need not copy what it can
        hold.
        """
        if self._why:
            return
        if not self._lock.acquire(timeout=wait_s) and not self._lock_after_own_copy():
            self._report_mid_change()
            return
        try:
            until = time.monotonic() + GPU_CATCH_UP_S
            while self.held is None and self._committed.is_gpu_behind() and time.monotonic() < until:
                time.sleep(0.001)
            if self.held is not None:
                if not staying_ranks:
                    self._copy_to_memory(self.held)
            elif self._step and (commit := self._committed.commit_in_memory()) is not None:
                self._copy_after_s = COPY_HELD_AFTER_S if staying_ranks > 1 else 0.0
                self._save_commit(commit, staying_ranks > 0 and self._can_stay_in_objects())
            elif self._step:
                self._report_unsaved(self._step, "its GPU was in an optimizer's step, or several steps behind")
            elif self._next_step and not self._committed.commits:
                self._report_unsaved(self._next_step - 1, "no attached optimizer has made a step")
        except Exception as error:  # noqa: BLE001 - state_dict() of any object
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            if ends_next and (self.held is not None or self._saved):
                with contextlib.suppress(OSError):
                    self._send_answer()
                self._launch.changed.wait(KILL_WAIT_S)
            self._lock.release()

    def _lock_after_own_copy(self) -> bool:
        """Wait for the script's own thread, which saves where the script has failed: the lock is free again when that
        is done.
        """
        return self._failed and not self._changing and self._lock.acquire(timeout=OTHER_COPY_WAIT_S)

    def _save_commit(self, commit: Commit, hold_instead: bool) -> None:
        """`hold_instead`: in place of a copy."""
        try:
            if hold_instead:
                self.held = self._make_held(commit)
                return
            with contextlib.closing(self._make_client()) as client:
                if self._is_saved(client, commit.step):
                    self._saved = commit.step
                    return
            self._copy_to_memory(self._make_held(commit))
        except (OSError, SnapshotRefused, CheckpointError) as error:
            self._report_unsaved(commit.step, str(error))

    def _make_held(self, commit: Commit) -> HeldCommit:
        """The state of this commit. Raises CheckpointError if the objects have another one."""
        context = self._context
        self._check_unchanged(commit)
        content = self._committed.content(commit)
        check_loadable(content)
        layout = Layout(content, large_storages(self._attached), self._committed.copies)
        draft = context.draft(commit.step, layout.bytes, self._committed.cursor(commit))
        return HeldCommit(commit, draft, donated_number(commit.step, context.group.rank), content, layout)

    def _copy_to_memory(self, state: HeldCommit, even_if_late: bool = True) -> None:
        """Copy a state into memory, unless it is there. `even_if_late`: also if the next round begins meanwhile."""
        step = state.draft.step
        try:
            with contextlib.closing(self._make_client()) as client:
                if not self._is_saved(client, step):
                    self._copy_to_buffer(client, state, even_if_late)
                    if not self._is_saved(client, step):
                        raise CheckpointError("the writer has ended meanwhile")
                self._saved = step
        except (OSError, SnapshotRefused, CheckpointError) as error:
            self._report_unsaved(step, str(error))

    def _copy_to_buffer(self, client: WriterClient, state: HeldCommit, even_if_late: bool) -> None:
        def check() -> None:
            if self._is_copied and not even_if_late:
                raise _CopyNotNeeded

        buffer = self._borrow_buffer(client, state.draft, state.save_number, check)
        if buffer is None:
            return
        fd = buffer

        def write(offset: int, data: memoryview) -> None:
            for start in range(0, len(data), _COPY_SLICE_BYTES):
                check()
                write_at(fd, offset + start, data[start : start + _COPY_SLICE_BYTES])

        try:
            state.layout.copy_shared(write, 0, 1)
            state.layout.copy_unshared(fd)
        finally:
            os.close(fd)
        if not self._left_with:
            self._check_unchanged(state.commit)
        elif state.digest != self._left_with:  # by a thread of the script, or by a load_state_dict() that has failed
            raise CheckpointError(CHANGED_REASON)
        client.report_copied(state.draft, state.save_number, 0)

    def _is_saved(self, client: WriterClient, step: int) -> bool:
        """Another rank was faster, or it was saved at that step, and not changed since."""
        snapshot = client.find_newest()
        if snapshot is None:
            return False
        there, here = (snapshot.draft.round, snapshot.draft.step), (self._context.round, step)
        return there > here or (there == here and not (self._is_changed and donated_step(snapshot.save_number) is None))

    def _borrow_buffer(
        self, client: WriterClient, draft: Manifest, number: int, check: Callable[[], None]
    ) -> int | None:
        """A buffer, also after a rank has died that was copying the same step or a save; None when it is saved. `check`
        may raise while it waits.
        """
        deadline = time.monotonic() + OTHER_COPY_WAIT_S
        while True:
            check()
            try:
                return client.borrow_buffer(draft, number, 0, 1, "", once=True)[0]
            except SnapshotRefused as refused:
                if str(refused) not in (ANOTHER_SAVES_REASON, STILL_COPIED_REASON) or time.monotonic() > deadline:
                    raise
            if self._is_saved(client, draft.step):
                return None
            time.sleep(0.002)

    def _check_unchanged(self, commit: Commit) -> None:
        """Raises CheckpointError if the state is not that of this commit any more."""
        if self._why:
            raise CheckpointError(self._why)
        self._committed.check_unchanged(commit)


def _is_ended_by(signum: int) -> bool:
    """True if this signal, which the launcher sends next, ends this process at once."""
    return signum > 0 and signal.getsignal(signum) is signal.SIG_DFL
