"""Save at failure: before a broken group is killed, a surviving rank copies the state of its last commit into memory.

Under DistributedDataParallel every rank has the whole state of the last commit, the end of `session.step()`. The
launcher asks the writer before it kills a group, the writer asks all ranks of its node, and a thread answers in each:
the training thread stands in a collective, which waits without the GIL. A rank that fails by an exception saves by
itself before it exits. The first rank with the most advanced step is taken.

Parameters and the optimizer's state change only between the optimizer's pre-step hook and the next commit. The training
thread holds a lock for that time, and a thread that saves holds it, too: so a state is never copied while it is
changed, and cannot be changed while it is copied. What changes at other times is kept as of the commit: `commit_record`
has random states and buffers; learning rates and the state of small objects (scheduler, scaler, sampler) are kept here.

Of a sharded state each rank has a part. Where others have the same (HSDP), all survivors save theirs: `shard_donor`.

In doubt a rank is no donor; it gives the reason once, as a worker event.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elasticd.checkpointing import commit_files, commit_record, device_copy, sharded, state
from elasticd.checkpointing.buffers import ANOTHER_SAVES, PROTOCOL, STILL_COPIED, donated_by_all, donated_number
from elasticd.checkpointing.commit_ring import Commit, CommitRing, ring_of
from elasticd.checkpointing.donor_rules import (
    MUTABLE,
    averaged,
    has_mutable_setting,
    is_alike,
    is_module,
    is_optimizer,
    may_differ,
    reason_against,
    trained,
)
from elasticd.checkpointing.fingerprint import Fingerprint
from elasticd.checkpointing.layout import Layout
from elasticd.checkpointing.manifest import NO_CHECKSUM, Manifest
from elasticd.checkpointing.safe_types import check_loadable
from elasticd.checkpointing.saver import Saver, cursor_of
from elasticd.checkpointing.writer_client import SnapshotRefused, WriterClient
from elasticd.errors import CheckpointError

if TYPE_CHECKING:
    import torch

LONGEST_COPY_S = 200e-6
"""What the copies at a commit may take, or SHARE of a step if that is longer; else the rank is no donor."""
SHARE = 0.002
TRIALS, MOST_TRIALS = 32, 128
"""Commits of which the fastest copy and the fastest step are compared; of more if that takes too long, since on a busy
machine each of the first ones may have been disturbed."""
WAIT_S = 0.25
"""How long a rank that is between the optimizer's step and the commit is waited for: less than the launcher waits."""
SHORT_S, MOST_SHORT = 1.0, 3
"""A writer that ends so soon, so many times in a row, will do so again."""
PROBE_S = 0.1
"""A copy of one byte from a GPU takes 0.1 ms, or does not end."""
BEHIND_S = 0.05
"""For a GPU that is at the end of the last step."""
LONGEST_WAIT_S = 5.0
"""For another rank that copies the same step: the launcher waits for all."""
EXPECTED = "rng_expected"
"""Key in a state: True if random states are, at a commit, what they were in the backward pass."""
_Kept = tuple[list[bytes], list[list[dict[str, Any]]]]
"""Small objects, pickled, and the groups of optimizers."""
_UNCLEAN = "it was between the optimizer's step and session.step()"
DONOR = "donor"
"""Key in a sharded state: the rank that saved state.pt at a fault."""
_CHANGED = "what is attached was changed after session.step()"
_CHANGES = "what is attached is changed between session.step() and the optimizer's step"
MOST_CHANGES = 3
"""Steps in a row before which it may change where counters show it, such as by load_state_dict()."""


class Donor:
    """This rank as a donor. `begin` and `commit` are called by `session.step()`, `fail` when the script has failed."""

    def __init__(
        self, saver: Saver, attached: Mapping[str, Any], optimized: bool, is_in_step: Callable[[], bool] = lambda: False
    ) -> None:
        """`optimized`: an optimizer has begun a step before. `is_in_step` returns whether this rank has begun to do
        something with the others since the last commit.
        """
        self._saver, self._attached = saver, dict(attached)
        self._is_in_step = is_in_step
        self._pid = os.getpid()
        self._lock = threading.Lock()
        """Held from the optimizer's pre-step hook to the commit, and by a thread that saves."""
        self._changing = False
        self._optimized = optimized
        """An optimizer has begun a step since the last commit."""
        self._next_step = 0
        """That the next `session.step()` ends; 0 before the first one."""
        self._step = 0
        """The last commit: steps without an optimizer's step, such as those that a GradScaler leaves out, are none."""
        self._whole: Any = None
        """The whole fingerprint as of the last commit, where the optimizer's next step compares it."""
        self._changes = 0
        """Comparisons in a row that found a change."""
        self._must_look = False
        """The next commit looks whether there are other tensors to watch."""
        self._commits, self._trials = 0, TRIALS
        self._copy_s, self._step_s, self._at = 1e9, 1e9, 0.0
        self._expect_s = 0.0
        self._record: commit_record.CommitRecord
        self._copies: device_copy.GpuCopies | None = None
        """From the rank's GPU, for the thread that saves."""
        self._ring: CommitRing
        self._watched: Any = None
        """What the ring is of."""
        self._recorded: Any = None
        """What the record is of."""
        self._socket: socket.socket | None = None
        self._closed = self._failed = self._is_silent = False
        self._hooks: list[Any] = []
        self._backward_hooks: list[Any] = []
        self._thread = threading.Thread(target=self._serve, name="elasticd-donor", daemon=True)
        self._why = ""
        try:
            if saver.group.device.type == "cpu" and (shards := saver.shards(attached)) is not None:
                shards.prepare_for_faults()
            self._averaged = averaged(attached)
            self._why = self._reason_against()
            if not self._why:
                self._open()
        except Exception as error:  # noqa: BLE001 - state_dict() of any object: training continues
            self._why = f"{type(error).__name__}: {error}"
        if self._why:
            self._give_up(self._why)

    def _open(self) -> None:
        self._prepare()
        if (device := commit_files.gpu(self._saver.group.device)) is not None:
            # Here and not in the thread: it would break a CUDA graph that the script captures meanwhile.
            self._copies = device_copy.GpuCopies(device)
            self._copies.is_free(device_copy.FIRST_S)
        self._socket = self._connect()
        self._hooks = [each.register_step_pre_hook(self._before_change) for each in self._optimizers]
        self._thread.start()
        atexit.register(self._at_exit)

    def _connect(self) -> socket.socket:
        """To the writer, as a donor; where there is none, the launcher starts it. Raises OSError."""
        assert self._saver.writer is not None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(self._saver.writer.path)
            connection.send(json.dumps({"do": "donor", "round": self._saver.round, "version": PROTOCOL}).encode())
        except OSError:
            connection.close()
            raise
        return connection

    def _reason_against(self) -> str:
        return reason_against(self._saver, self._attached, self._averaged)

    def _prepare(self) -> None:
        objects = list(self._attached.values())
        self._optimizers = [obj for obj in objects if is_optimizer(obj)]
        self._others = [obj for obj in objects if not is_module(obj) and not is_optimizer(obj)]
        self._states = list(map(_state_of, self._others))
        self._unlike = [index for index, obj in enumerate(self._others) if not is_alike(obj)]
        """Those that may differ between ranks: saves are refused then."""
        self._shards = self._saver.shard_donor
        modules = [obj for obj in objects if is_module(obj)] if self._shards is None else [self._shards]
        self._fingerprint = Fingerprint(modules, self._optimizers)
        self._watch()

    def _watch(self) -> None:
        """What the script may replace: buffers, parameters that are trained, groups of optimizers."""
        self._groups = _groups(self._optimizers)
        self._sizes = list(map(len, self._groups))
        places = dict(commit_files.buffers(self._attached))
        self._buffers = {path: holder[key] for path, (holder, key) in places.items()}
        self._on_host = [path for path, buffer in self._buffers.items() if commit_files.on_host(buffer)]
        self._on_device = [path for path, buffer in self._buffers.items() if not commit_files.on_host(buffer)]
        recorded = _recorded(self._optimizers)
        on_device = [each for each in recorded if not commit_files.on_host(each)]
        self._pieces = [commit_record.piece(each, commit_record.PIECE_BYTES) for each in on_device]
        # As bytes: tensors of one type are copied by one kernel.
        held = [commit_record.piece(self._buffers[path]) for path in self._on_device] + self._pieces
        watched = [(each.data_ptr(), len(each)) for each in held]
        if watched != self._watched:  # else a GPU may still be at a commit of the ring
            self._ring, self._watched = ring_of(self._saver.group.device, held), watched
        on_host = list(filter(commit_files.on_host, recorded))
        self._record_from({path: places[path] for path in self._on_host}, on_host)
        # Of FSDP2 no hook runs before gradients are sent: the random state of a rank that dies after that is lost.
        parallel = [found for obj in self._attached.values() if (found := state.parallel(obj)) is not None]
        parameters: list[Any] = [parameter for each in parallel for parameter in itertools.islice(trained(each), 1)]
        for hook in self._backward_hooks:
            hook.remove()
        self._backward_hooks = [each.register_post_accumulate_grad_hook(self._expect) for each in parameters]

    def _record_from(self, places: Mapping[Any, commit_record.Place], parameters: list[torch.Tensor]) -> None:
        """By the record that there is, if it is of these: another one takes 0.3 ms."""
        pieces = [(each.data_ptr(), each.numel()) for each in parameters]
        recorded = (list(places), [id(holder) for holder, _ in places.values()], pieces)
        if recorded == self._recorded:
            with contextlib.suppress(commit_record.OtherBuffers):
                self._record.locate()
                return
        path = commit_files.path_of("commit", self._saver.group.rank)
        device = commit_files.gpu(self._saver.group.device)
        followed = [place for (_, key), place in places.items() if isinstance(key, str)]
        fixed = list(places.values())[len(followed) :]
        self._record = commit_record.CommitRecord(path, followed, parameters, device, fixed)
        self._recorded = recorded

    def look(self) -> None:
        """At the next commit: a save has been made, which takes longer than that."""
        self._must_look = True

    def _before_change(self, *_: Any) -> None:
        if self._changing:
            return
        self._optimized = True
        if self._whole is not None:
            self._compare(self._fingerprint.whole())
        self._lock.acquire()
        self._changing = True
        # A GPU may not have passed the commit when the next one is made, with which counters are compared from then on.
        if self._copies is not None and self._step and self._fingerprint.is_irregular():
            self._ring.last.is_spoilt = True
        self._ring.begin()

    def _compare(self, now: Any) -> None:
        """With the last commit. Where counters or addresses show a change, a fault before this step has found it, too;
        a script may make such a change now and then, and one without at no time.
        """
        before, self._whole = self._whole, None
        self._changes = self._changes + 1 if now != before else 0
        self._must_look = self._must_look or self._changes > 0
        if self._changes == MOST_CHANGES or (now != before and now[:2] == before[:2]):
            self._give_up(_CHANGES)

    def _expect(self, _: torch.Tensor) -> None:
        """In the backward pass, before this rank sends a gradient that the others need for the step."""
        if not self._next_step or self._why or os.getpid() != self._pid:
            return
        start = time.perf_counter() if self._commits < self._trials else 0.0
        try:
            self._record.expect(self._next_step)
        except commit_record.OtherBuffers:
            return  # from the commit on there are other ones to watch
        except Exception as error:  # noqa: BLE001 - as in `commit`
            self._give_up(f"the state cannot be copied at a step: {type(error).__name__}: {error}")
        if start:
            self._expect_s = time.perf_counter() - start

    def begin(self) -> None:
        """At the start of `session.step()`."""
        if not self._changing:
            self._lock.acquire()
            self._changing = True

    def commit(self, step: int) -> None:
        """Once the step is counted: the state is that of `step` until the next optimizer step.

        A step in which no optimizer has stepped may have left something that is not in the state, such as gradients:
        the commit before it stays.
        """
        try:
            if not self._optimized:
                self._whole = None  # the step may have changed other things that are attached, such as averaged weights
            elif not self._why:
                self._copy(step)
        except Exception as error:  # noqa: BLE001 - state_dict() of any object: training continues
            self._give_up(f"the state cannot be copied at a step: {type(error).__name__}: {error}")
        finally:
            self._optimized = self._changing = False
            self._next_step = step + 1
            self._lock.release()

    def _copy(self, step: int) -> None:
        start = time.perf_counter() if self._commits < self._trials else 0.0
        self._step = 0
        self._commits += 1
        kept = self._copy_objects()
        digest = self._digest(kept) if self._unlike else b""
        looks = self._must_look or self._commits & (self._commits - 1) == 0
        sizes = [len(group["params"]) for groups in kept[1] for group in groups]
        if (looks or sizes != self._sizes) and not self._watch_again():
            return
        try:
            self._record.commit(step, digest)
        except commit_record.OtherBuffers:
            if not self._watch_again():
                return
            self._record.commit(step, digest)
        self._ring.commit(step, kept)
        self._fingerprint.commit()
        self._step = step
        if looks:
            self._must_look = False
            self._fingerprint.refresh()
            self._whole = self._fingerprint.whole()
        self._ring.last.revision = self._fingerprint.revision
        if start:
            self._measure(start)

    def _watch_again(self) -> bool:
        """Parameter groups, buffers or parameters that are trained may be other ones than at the commit before."""
        if why := self._reason_against():
            self._give_up(why)
            return False
        before = self._groups
        self._watch()
        if self._groups != before:
            self._fingerprint.restart()
        return True

    def _copy_objects(self) -> _Kept:
        small = [pickle.dumps(state_of(), pickle.HIGHEST_PROTOCOL) for state_of in self._states]
        return small, [[group.copy() for group in each.param_groups] for each in self._optimizers]

    def _digest(self, kept: _Kept) -> bytes:
        return hashlib.blake2b(b"".join([kept[0][index] for index in self._unlike]), digest_size=16).digest()

    def _measure(self, start: float) -> None:
        self._copy_s = min(self._copy_s, time.perf_counter() - start + self._expect_s)
        if self._at:
            self._step_s = min(self._step_s, start - self._at)
        self._at = start
        if self._commits < self._trials:
            return
        self._fingerprint.set_step_s(self._step_s)
        if self._copy_s <= max(LONGEST_COPY_S, SHARE * self._step_s):
            return
        self._trials *= 4
        if self._trials > MOST_TRIALS:
            self._give_up(f"copying buffers and random states takes {self._copy_s * 1e6:.0f} µs a step")

    def _give_up(self, why: str) -> None:
        self._why = why
        self._step = 0
        if self._saver.writer is not None and self._saver.group.world_size > 1:
            reason = f"rank {self._saver.group.rank} cannot save its state at a fault: {why}"
            self._saver.events.write("message", reason, None)

    def _report_unsaved(self, step: int, why: str) -> None:
        if self._is_silent:
            return
        reason = f"rank {self._saver.group.rank} has not saved step {step} at the fault: {why}"
        self._saver.events.write("message", reason, step)

    # --- at a fault ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """The thread: to each request one answer, when the state is saved or cannot be.

        When the writer has ended, connecting again starts another one, which finds the states in the same memory.
        """
        short, why = 0, ""
        while not why and not self._closed:
            since = time.monotonic()
            why = self._answer_requests()
            short = short + 1 if time.monotonic() - since < SHORT_S else 0
            if short == MOST_SHORT:
                why = f"the writer has ended {short} times"
            elif not why and not self._closed:
                why = self._reconnect()
        if not self._why and not self._closed:
            self._give_up(why)

    def _reconnect(self) -> str:
        """Returns why this is not possible, "" if it is."""
        assert self._socket is not None
        self._socket.close()
        try:
            self._socket = self._connect()
        except OSError as error:
            return f"the writer has ended, and there is no other one ({error})"
        return ""

    def _answer_requests(self) -> str:
        """Until the writer or the session ends; returns why the writer refuses this rank, "" if it does not."""
        assert self._socket is not None
        with contextlib.suppress(OSError):
            while packet := self._socket.recv(4096):
                request = json.loads(packet)
                if refused := request.get("refused"):
                    return str(refused)
                if self._can_copy():
                    self._socket.send(json.dumps({"do": "saving"}).encode())
                    try:
                        until = time.monotonic() + WAIT_S
                        if self._copies is None:  # a GPU is behind what its processor has committed
                            self._catch_up(until)
                        self._save(max(until - time.monotonic(), 0.05))
                    except Exception as error:  # noqa: BLE001 - the launcher waits for the answer
                        if not self._why:
                            self._give_up(f"{type(error).__name__}: {error}")
                self._socket.send(json.dumps({"do": "donated"}).encode())
        return ""

    def _can_copy(self) -> bool:
        if self._why or self._copies is None:
            return True
        with contextlib.suppress(RuntimeError):  # no thread can be started
            if self._copies.is_free(PROBE_S):
                return True
        self._report_unsaved(self._step, "its script had queued more than the GPU takes, and no copy from it ends")
        return False

    def _catch_up(self, until: float) -> None:
        """Wait for a step that a rank of this node has committed, and this rank has not: it has what it needs for it.

        If that rank lives, it saves the step.
        """
        saver = self._saver
        ahead = max(
            commit_record.last_step(commit_files.path_of("commit", rank)) for rank in range(saver.group.world_size)
        )
        with contextlib.closing(self._client()) as client, contextlib.suppress(OSError, SnapshotRefused):
            while 0 < self._step < ahead and not (self._changing or self._failed) and time.monotonic() < until:
                if self._is_saved(client, ahead):
                    return
                time.sleep(0.001)

    def _client(self) -> WriterClient:
        if self._saver.writer is None:
            raise CheckpointError("this node keeps no copy of the state in memory")
        writer = self._saver.writer
        return WriterClient(writer.path, 0, 1, writer.first_node, writer.at_end)

    def fail(self) -> None:
        """The script has failed, or is about to end by an exception: the launcher will end the others."""
        self._failed = True
        if self._why or self._is_forked():
            return
        from torch import distributed

        if self._copies is not None and not distributed.is_initialized():
            self._report_unsaved(self._step, "its process group is gone, and what collectives left may be wrong")
            return
        if self._changing:
            self._report_unsaved(self._step, _UNCLEAN)
        else:
            self._save(LONGEST_WAIT_S)  # the thread may be copying, and would end with the process

    def _at_exit(self) -> None:
        has_raised = hasattr(sys, "last_value")
        # A script that catches the exception and calls sys.exit() leaves no other trace of it. It may also have ended
        # as usual, after an evaluation: then nothing is wrong if this saves nothing.
        if has_raised or self._is_in_step():
            self._is_silent = not has_raised
            self.fail()
        self.close()

    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def close(self) -> None:
        """The rank is no donor any more. A forked child has no thread, and the connection is not its own."""
        if self._is_forked():
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        for hook in (*self._hooks, *self._backward_hooks):
            hook.remove()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._thread.is_alive():
                self._thread.join(LONGEST_WAIT_S)  # it may be saving, and would end with the process
            self._socket.close()
            self._socket = None
        self._why = self._why or "the session is closed"

    def _save(self, wait_s: float) -> None:
        if self._why:
            return
        if not self._lock.acquire(timeout=wait_s) and not self._waits_for_own_copy():
            self._report_unsaved(self._step, _UNCLEAN)
            return
        try:
            until = time.monotonic() + BEHIND_S
            while self._ring.is_behind() and time.monotonic() < until:
                time.sleep(0.001)
            if self._step and (commit := self._ring.current()) is not None:
                self._save_clean(commit)
            elif self._step:
                self._report_unsaved(self._step, "its GPU was in an optimizer's step, or several steps behind")
            elif self._next_step and not self._commits:
                self._report_unsaved(self._next_step - 1, "no attached optimizer has made a step")
        except Exception as error:  # noqa: BLE001 - state_dict() of any object
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._lock.release()

    def _waits_for_own_copy(self) -> bool:
        """Where the script has failed, its own thread is saving: the lock is free again when that is done."""
        return self._failed and not self._changing and self._lock.acquire(timeout=LONGEST_WAIT_S)

    def _save_clean(self, commit: Commit) -> None:
        client = self._client()
        try:
            if self._shards is not None:
                self._save_shards(client, commit)
            elif not self._is_saved(client, commit.step):
                self._save_whole(client, commit)
                if not self._is_saved(client, commit.step):
                    raise CheckpointError("the writer has ended meanwhile")
        except (OSError, SnapshotRefused, CheckpointError) as error:
            self._report_unsaved(commit.step, str(error))
        finally:
            client.close()

    def _save_whole(self, client: WriterClient, commit: Commit) -> None:
        saver = self._saver
        self._check_unchanged(commit)
        content = self._content(commit)
        check_loadable(content)
        layout = Layout(content, at_once=self._copies)
        draft = self._draft(commit, layout.bytes)
        number = donated_number(commit.step, saver.group.rank)
        fd = self._borrow(client, draft, number, layout.shared_digest)
        if fd is None:
            return
        try:
            layout.copy_own(fd)
        finally:
            os.close(fd)
        self._check_unchanged(commit)
        client.copied(draft, number, 0)

    def _save_shards(self, client: WriterClient, commit: Commit) -> None:
        """This rank's files, and those of dead ranks that held the same."""
        self._shards = self._saver.shard_donor  # a save may have made another plan
        assert self._shards is not None
        self._check_unchanged(commit)
        random_states, is_as_expected, buffers = self._records(commit.step)
        own = {sharded.NAMES: self._shards.names, DONOR: self._saver.group.rank}
        small = {**dict(self._kept(commit)), **self._own_part(commit.step, random_states, is_as_expected)}
        small[state.RESERVED] |= own
        check_loadable(small)
        if any(map(has_mutable_setting, commit.kept[1])):
            raise CheckpointError(MUTABLE)
        files = self._shards.files(commit.kept[1], buffers, Layout(small))
        number = donated_by_all(commit.step)

        def check() -> None:
            self._check_unchanged(commit)

        client.copy_files(self._draft(commit, 0), number, files, check, LONGEST_WAIT_S)

    def _draft(self, commit: Commit, size: int) -> Manifest:
        saver = self._saver
        whose = (saver.group.world_size, size, NO_CHECKSUM, saver.environment.job, saver.environment.run)
        cursor = cursor_of(self._attached, dict(self._kept(commit)))
        return Manifest(saver.round, commit.step, saver.parent, *whose, cursor, time.time())

    def _is_saved(self, client: WriterClient, step: int) -> bool:
        """Another rank was faster, or it was saved at that step."""
        held = client.find()
        return held is not None and (held.draft.round, held.draft.step) >= (self._saver.round, step)

    def _borrow(self, client: WriterClient, draft: Manifest, number: int, digest: str) -> int | None:
        """A buffer, also after a rank has died that was copying the same step or a save; None when it is saved."""
        deadline = time.monotonic() + LONGEST_WAIT_S
        while True:
            try:
                return client.begin(draft, number, 0, 1, digest)[0]
            except SnapshotRefused as refused:
                if str(refused) not in (ANOTHER_SAVES, STILL_COPIED) or time.monotonic() > deadline:
                    raise
            if self._is_saved(client, draft.step):
                return None
            time.sleep(0.002)

    def _check_unchanged(self, commit: Commit) -> None:
        """Raises CheckpointError if the state is not that of the last commit any more."""
        if self._why:
            raise CheckpointError(self._why)
        path = commit_files.path_of("commit", self._saver.group.rank)
        committed = commit_record.read(path, commit.step, self._host_buffers())
        if (
            not commit.is_whole()
            or _groups(self._optimizers) != self._groups
            or self._fingerprint.changed()
            or committed is None
            or committed.pieces != self._record.pieces()
            or commit.revision != self._fingerprint.revision
            or self._copied(self._pieces) != self._copied(commit.buffers[len(self._on_device) :])
        ):
            raise CheckpointError(_CHANGED)
        now = {path: holder[key] for path, (holder, key) in commit_files.buffers(self._attached)}
        kinds = [{path: commit_record.kind(each) for path, each in found.items()} for found in (now, self._buffers)]
        on_gpu = commit_files.gpu(self._saver.group.device) is not None
        copied = [(now[path].data_ptr(), now[path].nbytes) for path in self._on_device if path in now]
        if (
            kinds[0] != kinds[1]
            or (on_gpu and any(now[path] is not each for path, each in self._buffers.items()))
            or copied != self._watched[: len(self._on_device)]
        ):
            raise CheckpointError("a module has other buffers than at the step")
        if why := self._reason_against():
            raise CheckpointError(why)

    def _host_buffers(self) -> list[torch.Tensor]:
        return [self._buffers[path] for path in self._on_host]

    def _copied(self, tensors: Sequence[torch.Tensor]) -> list[bytes]:
        """From the GPU, as they are there now."""
        starts = [int(each.storage_offset()) for each in tensors]
        parts = [(0, each.untyped_storage(), at, at + len(each)) for each, at in zip(tensors, starts, strict=True)]
        return [] if self._copies is None else [bytes(data) for _, data in self._copies.pieces(parts)]

    def _kept(self, commit: Commit) -> Iterator[tuple[str, Any]]:
        """The small objects as of the commit."""
        names = [name for name, obj in self._attached.items() if any(obj is other for other in self._others)]
        for name, data in zip(names, commit.kept[0], strict=True):
            yield name, pickle.loads(data)

    def _content(self, commit: Commit) -> dict[str, Any]:
        """As `Saver` saves it, with everything as of the commit."""
        import torch

        step = commit.step
        random_states, is_as_expected, buffers = self._records(step)
        for path, copied in zip(self._on_device, commit.buffers, strict=False):
            buffer = self._buffers[path]
            buffers[path] = copied.view(buffer.dtype).view(buffer.shape) if len(copied) else buffer
        kept = dict(self._kept(commit))
        for name, key in buffers.keys() & {(name, key) for name in kept for key in commit_files.OF_SCALER}:
            (data,) = self._copied([commit_record.piece(buffers[name, key])])
            kept[name][key] = torch.frombuffer(bytearray(data), dtype=buffers.pop((name, key)).dtype).item()
        now = state.gather({name: obj for name, obj in self._attached.items() if name not in kept})
        content = {name: kept[name] if name in kept else now[name] for name in self._attached}
        for (name, key), value in buffers.items():
            if isinstance(key, str):
                content[name][key] = value
            else:
                number, what = key
                content[name]["state"][number] = {**content[name]["state"][number], what: value}
        optimizers = [name for name, obj in self._attached.items() if is_optimizer(obj)]
        for name, groups in zip(optimizers, commit.kept[1], strict=True):
            if has_mutable_setting(groups):
                raise CheckpointError(MUTABLE)
            for saved, committed in zip(content[name]["param_groups"], groups, strict=True):
                saved.update({key: value for key, value in committed.items() if key != "params"})
        return {**content, **self._own_part(step, random_states, is_as_expected)}

    def _own_part(self, step: int, random_states: list[Any], is_as_expected: bool) -> dict[str, dict[str, Any]]:
        own = {"step": step, "round": self._saver.round, "world_size": self._saver.group.world_size}
        return {state.RESERVED: {**own, "rng": random_states, EXPECTED: is_as_expected}}

    def _records(self, step: int) -> tuple[list[Any], bool, dict[tuple[str, Any], torch.Tensor]]:
        """All random states that this node has as of `step` (None for the others), whether this rank's is as it has
        expected, and rank 0's buffers, else ours.
        """
        group, own = self._saver.group, self._host_buffers()
        paths = [commit_files.path_of("commit", rank) for rank in range(group.world_size)]
        found = [commit_record.read(path, step, own) for path in paths]
        expected = [commit_record.read(path, step, own, expected=True) for path in paths]
        mine, mine_expected = found[group.rank], expected[group.rank]
        if mine is None:
            raise CheckpointError(f"step {step} has no record")
        if self._unlike and group.rank != 0 and (found[0] is None or found[0].digest != mine.digest):
            names = [name for name, obj in self._attached.items() if any(obj is self._others[i] for i in self._unlike)]
            raise CheckpointError(may_differ(" or ".join(names)))
        alike = range(group.world_size) if self._shards is None else self._shards.replicas
        if any(each is not None and each.pieces != mine.pieces for each in map(found.__getitem__, alike)):
            raise CheckpointError("the parameters are not the same on every rank")
        is_as_expected = mine_expected is not None and mine_expected.draws_as(mine)
        known = [each or other for each, other in zip(found, expected, strict=True)] if is_as_expected else found
        random_states = [each and each.random_state for each in known]
        buffers = (found[0] or mine).buffers
        if found[0] is None and expected[0] and mine_expected and self._record.moved_at != step:
            buffers = commit_record.as_expected(expected[0].buffers, mine_expected.buffers, buffers)
        return random_states, is_as_expected, dict(zip(self._on_host, buffers, strict=True))


def _state_of(obj: Any) -> Callable[[], Any]:
    """What gives the state of an object at a commit: of a GradScaler without what its GPU has, as that would wait for
    the GPU.
    """
    from torch.amp import GradScaler

    if not isinstance(obj, GradScaler):
        found: Callable[[], Any] = obj.state_dict
        return found

    def of_scaler() -> dict[str, Any]:
        if not any(commit_files.is_on_gpu(vars(obj).get(where)) for where in commit_files.OF_SCALER.values()):
            return obj.state_dict()
        numbers = {"growth_factor": obj.get_growth_factor(), "backoff_factor": obj.get_backoff_factor()}
        return {**numbers, "growth_interval": obj.get_growth_interval()}

    return of_scaler


def _recorded(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The parameters of which a commit record has a piece."""
    parameters = [p for each in optimizers for group in each.param_groups for p in group["params"] if p.requires_grad]
    trained = [commit_record.local(each) for each in parameters]
    every = -(-len(trained) // commit_record.MOST_PIECES)
    return trained[:: max(every, 1)]


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[int]]:
    """The parameters of each group, by id."""
    return [list(map(id, group["params"])) for each in optimizers for group in each.param_groups]
