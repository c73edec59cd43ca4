"""The writer: a process on each node that holds the newest states in memory and writes them as checkpoints.

    rank        begin {round, number, share, shares, size, copies, digest [, like, once]}
                                                                    ->  {shares, like}, with a buffer's descriptor,
                                                                        or {refused: why}; the buffer of state `like`;
                                                                        `once`: not if the step is saved
    rank        copied {round, number, share, files [, draft, task, at_end, partner]}
                                                                        the rank's share is in the buffer
    rank        wait {round, number}                                ->  {saved, path, why}, once that is known
    rank        settle {wait, parts_s}                    ->  {writing}: a sharded state is being copied or written
    rank        find [{buffer}]                                     ->  {snapshot}: the newest state that is whole in
                                                                        one buffer, or what this buffer holds, or null
    rank        open {round, number, file}                          ->  {start, size} of the state, or of a file of it,
                                                                        with its descriptor, or {refused: why}
    rank        serve {address}                                     ->  {server}: there other nodes read shards, or
                                                                        {refused: why}
    rank        donor {round}                                       it saves its state when {save} arrives, and
    rank        saving {}                                           says that it has begun, and
    rank        donated {held, saved}                               that it is done, with or without success; `held`:
                                                                    the step of the state that it holds in its process,
                                                                    `saved`: of the one that is in memory
    launcher    donate {round, signum, stay}                    ->  {busy}, again and again: so many donors of the round
                                                                    have begun; {held, saved}: all are done. `signum`
                                                                    follows. `stay`: only these pids are asked, which
                                                                    hold their state if they can, and else copy it
    launcher    flush {}                                        ->  {step, path} of the newest checkpoint, once nothing
                                                                    is left to write, and why a newer state is none;
                                                                    {} if there is no state
    rank        adopt {round, number, draft, task}                  ->  {}: the round that resumed from it owns it now

Messages of ranks name the version of this protocol; another one is answered by {refused}. A connection with a message
that cannot be used is closed.

Each local rank copies a share into the buffer of a save. When all shares are in it, the header is written, from then on
the state survives its processes, and a thread writes it to disk. Training continues, also in the next round.

Two buffers: a state is never copied into the one that is being written, and into the newest state only if the other one
is being written, so a whole one is always left. Then the state that it replaces is not written at all: if the disk is
slower than the saves, some are left out, and the newest waits. A state that was saved at a fault is written when a
round has resumed from it. If none follows, the launcher flushes: `last_write` describes that.

Started by the launcher's owner when a rank connects first: `python -I writer.py LISTENER HEADERS BUFFER BUFFER`. It
needs no torch. SIGTERM lets it finish what is to be written. docs/adr/0009 has the reasons.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # run as a file, isolated: the package of this copy comes before an installed one
    _SITE_PACKAGES_INDEX = next((at for at, path in enumerate(sys.path) if path.endswith("-packages")), len(sys.path))
    sys.path.insert(_SITE_PACKAGES_INDEX, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from elasticd import channel
from elasticd.channel import Message
from elasticd.checkpointing.memory import peer, state_files
from elasticd.checkpointing.memory.buffers import (
    ANOTHER_SAVES_REASON,
    OWN_BUFFER_COUNT,
    PROTOCOL_VERSION,
    STILL_COPIED_REASON,
    WRITER_KILLED_REASON,
    BufferFill,
    Buffers,
    SaveKey,
    Snapshot,
    WriteTask,
    donated_step,
)
from elasticd.checkpointing.memory.donor_requests import DonorRequests
from elasticd.checkpointing.memory.last_write import PARTS_WAIT_AT_FLUSH_S, PARTS_WAIT_WHEN_ENDED_S, LastWrite
from elasticd.checkpointing.memory.memory_limit import no_memory_reason, oom_kills
from elasticd.checkpointing.memory.shard_server import COPY_NICENESS, PartnerCopy, ShardServer
from elasticd.checkpointing.storage import checkpoint_files
from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.checkpointing.storage.lineage import Entry
from elasticd.checkpointing.storage.manifest import Manifest, parse, read
from elasticd.checkpointing.storage.retention import retain
from elasticd.errors import CheckpointError, Reason
from elasticd.heartbeat.worker_events import WorkerEventWriter

ANOTHER_VERSION_REASON = "the script's elasticd speaks another version of the writer's protocol"
DIVERGED_REASON = "the ranks of this node hold different states"
REST_AFTER_RESUME_S = 1.0
"""After a round has resumed, nothing is written for so long: memory has the state, and training begins."""
KEPT_RESULTS = 16
"""The number of results that are remembered for ranks that ask later."""


class Writer:
    """The main thread answers the ranks; another one writes. `_changed` guards what both use."""

    def __init__(self, listener: socket.socket, buffers: Buffers) -> None:
        self._listener = listener
        self._buffers = buffers
        self._fills: list[BufferFill] = []
        """The last one first; an older one only while a rank still copies into it."""
        self._whole_at: dict[SaveKey, float] = {}
        self._diverged = -1
        """The last round whose ranks held different states: share 0 is the whole state from then on."""
        self._results: dict[SaveKey, Message] = {}
        self._waiting: list[tuple[SaveKey | None, socket.socket]] = []
        """None: for the end of all sharded writes."""
        self._rests_until, self._parts_until = 0.0, float("inf")
        """Nothing is written before; how long the sharded write waits for the parts of other nodes."""
        self._is_last = False
        """No round follows: what no rank wanted to be written is written, too."""
        self._last = LastWrite(buffers, lambda: self._ending)
        self._flushes: list[socket.socket] = []
        self._donors = DonorRequests()
        self._oom_kills = oom_kills()
        self._gives_up_copies = False
        self._locks: dict[tuple[str, str, str], DirectoryLock] = {}
        self._changed = threading.Condition()
        self._server: ShardServer | None = None
        self._partner = PartnerCopy(buffers, self._changed)
        self._writing: int | None = None
        self._ending = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._handlers: dict[str, Callable[[socket.socket, Message], None]] = {
            "begin": self._do_begin,
            "copied": self._do_copied,
            "find": self._do_find,
            "open": self._do_open,
            "adopt": self._do_adopt,
            "serve": self._do_serve,
            "donor": lambda rank, message: self._donors.add_donor(rank, message["round"]),
            "donate": self._do_donate,
            "saving": lambda rank, _: self._donors.mark_begun(rank),
            "donated": lambda rank, message: self._donors.mark_done(
                rank, message.get("held", 0), message.get("saved", 0)
            ),
            "flush": self._do_flush,
            "wait": self._do_wait,
            "settle": self._do_settle,
        }
        self._thread = threading.Thread(target=self._write_all, name="checkpoint-writer")

    def run(self) -> int:
        """Until SIGTERM and the end of the last write. Returns the exit code: ENOMEM if its copies are given up."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_ending", True))
        self._thread.start()
        while not self._ending and not (self._gives_up_copies and self._is_idle()):
            for ready, _ in self._selector.select():
                if ready.fileobj is self._listener:
                    self._accept()
                elif self._server is not None and ready.fileobj is self._server.listener:
                    self._server.accept()
                elif ready.fileobj == self._wake_read:
                    os.read(self._wake_read, 4096)
                else:
                    assert isinstance(ready.fileobj, socket.socket)
                    self._receive(ready.fileobj)
            self._answer_waiting()
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join()
        self._answer_waiting()
        return errno.ENOMEM if self._gives_up_copies else 0

    def _is_idle(self) -> bool:
        """True if nothing is being copied, donated or written."""
        with self._changed:
            return self._is_all_written() and not (
                self._donors.are_awaited or any(fill.copying_ranks for fill in self._fills)
            )

    def _is_all_written(self) -> bool:
        """Nothing is left to write."""
        return not self._due_saves() and not (self._is_last and self._last.next_buffer() is not None)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            channel.allow_large_messages(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, rank: socket.socket) -> None:
        """Handle one message of a connection. What one rank sends can end its own connection, and nothing else."""
        message: Message | None = None
        try:
            try:
                message = channel.receive(rank, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if message is None:
                self._drop_connection(rank)
            elif message.get("version", PROTOCOL_VERSION) != PROTOCOL_VERSION:
                why = f"{ANOTHER_VERSION_REASON}: {message['version']}, and the launcher's is {PROTOCOL_VERSION}"
                channel.send(rank, {"refused": why})
            else:
                with self._changed:
                    self._handlers[message["do"]](rank, message)
        except OSError:
            self._drop_connection(rank)
        except Exception as error:  # noqa: BLE001 - what one rank sends must not end what others have in memory
            print(
                f"elasticd-writer: a message cannot be used ({error!r}): {message!r:.200}", file=sys.stderr, flush=True
            )
            self._drop_connection(rank)

    def _drop_connection(self, rank: socket.socket) -> None:
        """The rank has died or closed its session: what it was copying will never be whole."""
        if rank.fileno() < 0:
            return  # known already
        with self._changed:
            for fill in self._fills:
                if rank in fill.copying_ranks:
                    fill.copying_ranks.discard(rank)
                    self._fail_save(fill, "a rank ended while it copied its share of the state")
        self._waiting = [(key, other) for key, other in self._waiting if other is not rank]
        self._donors.drop_connection(rank)
        self._selector.unregister(rank)
        rank.close()

    # --- filling a buffer -----------------------------------------------------------------------------------------

    def _do_begin(self, rank: socket.socket, message: Message) -> None:
        """Give a rank the buffer of its save, or the reason against it. The first rank of a save chooses the buffer for
        all.
        """
        key = (message["round"], message["number"])
        fill = next((fill for fill in self._fills if fill.key == key), None) or self.begin_fill(key, message)
        if fill.refused:
            channel.send(rank, {"refused": fill.refused})
            return
        if fill.share_count == 1 and message["share"] > 0:
            channel.send(rank, {"refused": DIVERGED_REASON})
            return
        if fill.share_count > 1 and fill.digest != message["digest"]:
            self._diverged = message["round"]
            self._fail_save(fill, f"{DIVERGED_REASON}; rank 0 alone saves it from now on")
        fill.copying_ranks.add(rank)
        fd = self._buffers.fds[fill.buffer]
        answer = {"shares": fill.share_count, "like": bool(message.get("like"))}
        channel.send(rank, answer, fd)

    def begin_fill(self, key: SaveKey, message: Message) -> BufferFill:
        """Begin a save: choose its buffer, or refuse it.

        A save that is older than the last one is refused, except for one at a fault whose last attempt failed. Saves
        that were begun and not finished by all ranks are given up: their ranks have begun this one.
        """
        fill = BufferFill(key, 1 if self._diverged == key[0] else message["shares"], -1, message["digest"])
        self._drop_ended_ranks()
        if any(fill.repeats(older, message.get("once", False)) for older in self._fills):
            fill.refused = ANOTHER_SAVES_REASON
            return fill
        last = self._fills[0] if self._fills else None
        if last is not None and key < last.key and not (last.failed and donated_step(key[1]) is not None):
            fill.refused = "a later save has begun"
            return fill
        for older in list(self._fills) if donated_step(key[1]) is None else []:
            for copying in list(older.copying_ranks):
                self._receive(copying)  # its report was sent before this save began, and may still be unread
            if len(older.copied_shares) + len(older.copying_ranks) < older.share_count:
                self._fail_save(older, "a later save began before every rank had copied its share")
        self._fills = [older for older in self._fills if older.copying_ranks]
        free, is_part = self._free_buffers(message.get("like")), message.get("copies", 2) == 1
        fill.refused = "" if free else STILL_COPIED_REASON
        own = self._buffers.fds[:OWN_BUFFER_COUNT]
        for fill.buffer in free if is_part else free[:1]:  # without room for two parts the new one replaces the newest
            fill.refused = no_memory_reason(message["size"], [own[fill.buffer]] if is_part else own)
            if not fill.refused:
                break
        if not fill.refused or donated_step(key[1]) is None:  # at a fault a rank tries again
            self._fills.insert(0, fill)
        if not fill.refused:
            self._clear_buffer(fill.buffer, message["size"])
        return fill

    def _clear_buffer(self, number: int, size: int) -> None:
        """Clear a buffer for a new state."""
        snapshot = self._buffers.held[number]
        self._buffers.erase_header(number)
        self._buffers.grow(number, size)
        if snapshot is not None and snapshot.is_due:
            why = "a newer state took its place in memory"
            self._record_result(snapshot, None, why, kind="checkpoint_dropped")

    def _drop_ended_ranks(self) -> None:
        """Ranks whose end is not known yet, as their children hold the connection open."""
        copying = {rank for fill in self._fills for rank in fill.copying_ranks}
        for rank in [connection for connection in copying if peer.process_has_ended(connection)]:
            self._receive(rank)  # its report may still be unread
            self._drop_connection(rank)

    def _free_buffers(self, key: list[int] | None) -> list[int]:
        """The one with this state, if it is not being written; without a key, those that no rank fills, that are not
        being written and have not the only whole state: that with the newest part of a sharded one comes last.
        """
        if key is not None:
            number = self._buffers.find((key[0], key[1]))
            return [] if number is None or number == self._writing else [number]
        busy = {self._writing, *(fill.buffer for fill in self._fills)}
        if self._writing is None:
            busy.add(self._buffers.newest_whole())
        newest_part = self._buffers.newest_part()
        return sorted(set(range(OWN_BUFFER_COUNT)) - busy, key=lambda number: (number == newest_part, number))

    def _do_copied(self, rank: socket.socket, message: Message) -> None:
        key = (message["round"], message["number"])
        fill = next((fill for fill in self._fills if fill.key == key), None)
        if fill is None or rank not in fill.copying_ranks:
            return
        fill.copying_ranks.discard(rank)
        fill.copied_shares.add(message["share"])
        fill.files |= message.get("files", {})
        if message["share"] == 0:
            draft = parse(message["draft"].encode())
            assert isinstance(draft, Manifest)
            fill.snapshot = Snapshot(draft, message["number"], self._task_of(message))
            fill.partner = message.get("partner")
        if fill.failed:
            self._fail_save(fill, fill.failed)
        elif fill.snapshot is not None and not fill.is_incomplete:
            try:
                fill.snapshot = replace(fill.snapshot, files=fill.files)
                self._buffers.trim(fill.buffer, fill.snapshot)
                self._buffers.write_header(fill.buffer, fill.snapshot)
                self._parts_until = float("inf")
                self._report_whole(fill.snapshot)
                self._whole_at = {key: time.monotonic(), **dict(list(self._whole_at.items())[:KEPT_RESULTS])}
                if fill.files:
                    self._partner.request_copy(fill.snapshot, fill.partner)
            except ValueError as error:
                self._fail_save(fill, str(error))
            fill.snapshot = None
            self._changed.notify_all()

    def _task_of(self, message: Message) -> WriteTask | None:
        """The task of a state; a state that was saved at a fault is written at the end."""
        at_end = message.get("at_end")
        self._last.task = WriteTask(**at_end) if at_end else self._last.task
        task = message.get("task") or (at_end if donated_step(message["number"]) is not None else None)
        return WriteTask(**task) if task else None

    def _report_whole(self, snapshot: Snapshot) -> None:
        if (task := snapshot.task) is not None and task.node == 0 and snapshot.is_due:
            events = WorkerEventWriter(task.events or None, snapshot.draft.round, task.rank)
            events.write("snapshot", f"step {snapshot.draft.step} is in memory ({task.why})", snapshot.draft.step)

    def _fail_save(self, fill: BufferFill, why: str) -> None:
        """The buffer stays without a header. Reported once the rank that has the task is known."""
        fill.failed = why
        if fill.snapshot is not None:
            self._record_result(fill.snapshot, None, why)
            fill.snapshot = None

    # --- resuming from a buffer -----------------------------------------------------------------------------------

    def _do_find(self, rank: socket.socket, message: Message) -> None:
        number = message.get("buffer", self._buffers.newest_whole())
        snapshot = None if number is None else self._buffers.held[number]
        channel.send(rank, {"snapshot": snapshot and snapshot.to_json().decode()})

    def _do_open(self, rank: socket.socket, message: Message) -> None:
        number = self._buffers.find((message["round"], message["number"]), message["file"])
        snapshot = self._buffers.held[number] if number is not None else None
        if number is None or snapshot is None:
            channel.send(rank, {"refused": "that state is no longer in this node's memory"})
        else:
            start, size = snapshot.files[message["file"]] if message["file"] else (0, snapshot.draft.bytes)
            channel.send(rank, {"start": start, "size": size}, self._buffers.fds[number])

    def _do_adopt(self, rank: socket.socket, message: Message) -> None:
        """Note that a round has resumed from this state and owns it from now on: it is written under that round, after
        a rest.
        """
        draft = parse(message["draft"].encode())
        assert isinstance(draft, Manifest)
        for number, snapshot in enumerate(self._buffers.held):
            if snapshot is None or snapshot.key != (message["round"], message["number"]):
                continue
            if snapshot.files:  # what is to be written of it stays as it is
                self._buffers.write_header(number, replace(snapshot, adopting_round=draft.round))
            else:
                task = message["task"] and WriteTask(**message["task"])
                self._buffers.write_header(number, Snapshot(draft, 0, task, snapshot.checkpoint_path))
                self._rests_until = time.monotonic() + REST_AFTER_RESUME_S
        self._changed.notify_all()
        channel.send(rank, {})

    def _do_serve(self, rank: socket.socket, message: Message) -> None:
        """Serve this node's shards to other nodes at the address, which a rank of the round knows."""
        if self._server is None or self._server.server[0] != message["address"]:
            try:
                server = ShardServer(message["address"], self._buffers, self._changed)
            except OSError as error:
                channel.send(rank, {"refused": f"the writer cannot listen at {message['address']}: {error}"})
                return
            if self._server is not None:
                self._selector.unregister(self._server.listener)
                self._server.listener.close()
            self._server = server
            self._selector.register(server.listener, selectors.EVENT_READ)
        channel.send(rank, {"server": self._server.server})

    # --- saving at a fault ----------------------------------------------------------------------------------------

    def _do_donate(self, launcher: socket.socket, message: Message) -> None:
        self._donors.request_saves(launcher, message["round"], message.get("signum", 0), message.get("stay", ()))
        if oom_kills() > self._oom_kills:
            # The copies may be what was too much: the disk gets them, and no more are made.
            self._is_last = self._gives_up_copies = True
            self._changed.notify_all()

    # --- results --------------------------------------------------------------------------------------------------

    def _do_flush(self, launcher: socket.socket, message: Message) -> None:
        self._is_last = True
        self._flushes.append(launcher)
        self._changed.notify_all()

    def _do_wait(self, rank: socket.socket, message: Message) -> None:
        self._waiting.append(((message["round"], message["number"]), rank))

    def _do_settle(self, rank: socket.socket, message: Message) -> None:
        self._drop_ended_ranks()
        for fill in list(self._fills):
            for copying in list(fill.copying_ranks):
                self._receive(copying)  # its report may have been sent before this request
        if message["parts_s"] is not None:
            self._parts_until = min(self._parts_until, time.monotonic() + message["parts_s"])
        if message["wait"]:
            self._waiting.append((None, rank))
        else:
            channel.send(rank, {"writing": self._is_writing_shards()})

    def _is_writing_shards(self) -> bool:
        """Or some rank of this node is still copying."""
        is_copied = any(fill.copying_ranks for fill in self._fills if not fill.failed)
        return is_copied or any(
            snapshot is not None and snapshot.files and snapshot.is_due for snapshot in self._buffers.held
        )

    def _answer_waiting(self) -> None:
        with self._changed:
            pending = {
                snapshot.key for snapshot in self._buffers.held if snapshot is not None and snapshot.task is not None
            }
            pending |= {fill.key for fill in self._fills if fill.snapshot is not None}
            for key, rank in list(self._waiting):
                if key is None:
                    if not self._is_writing_shards():
                        self._waiting.remove((key, rank))
                        with contextlib.suppress(OSError):
                            channel.send(rank, {"writing": False})
                elif key in self._results or key not in pending:
                    self._waiting.remove((key, rank))
                    with contextlib.suppress(OSError):
                        channel.send(rank, self._results.get(key) or self._result_in_header(key))
            flushed = self._flushes if self._is_all_written() else []
        while flushed:
            with contextlib.suppress(OSError):
                channel.send(flushed.pop(), self._last.flush_result(self._results))

    def _result_in_header(self, key: SaveKey) -> Message:
        """The result of this save as an earlier writer process has left it."""
        path = next(
            (
                snapshot.checkpoint_path
                for snapshot in self._buffers.held
                if snapshot is not None and snapshot.key == key
            ),
            "",
        )
        return {"saved": bool(path), "path": path, "why": "" if path else WRITER_KILLED_REASON}

    def _record_result(
        self, snapshot: Snapshot, entry: Entry | None, why: str, kind: str = "checkpoint_failed"
    ) -> None:
        """The end of a task, for the ranks and, as a worker event, for the agent."""
        self._results[snapshot.key] = {"saved": entry is not None, "path": str(entry.path) if entry else "", "why": why}
        while len(self._results) > KEPT_RESULTS:
            self._results.pop(next(iter(self._results)))
        task, draft = snapshot.task, snapshot.draft
        if task is None:
            return
        events = WorkerEventWriter(task.events or None, draft.round, task.rank)
        if entry is not None:
            reason, now = f"checkpoint of step {draft.step} saved ({task.why})", time.monotonic()
            written_s = now - self._whole_at.get(snapshot.key, now)
            seconds = {"seconds": task.blocked_s, "written_seconds": task.blocked_s + written_s}
            fields = {"path": str(entry.path), "bytes": entry.manifest.total_bytes}
            events.write("checkpoint_saved", reason, draft.step, **fields, **seconds)
            return
        reason = f"checkpoint of step {draft.step} failed ({why}); {task.again}"
        if kind == "checkpoint_dropped":
            reason = f"checkpoint of step {draft.step} was not written: {why}"
        events.write(kind, reason, draft.step, path=str(Path(task.directory, draft.name)))

    # --- the writing thread ---------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COPY_NICENESS)
        while (number := self._wait_for_due_buffer()) is not None:
            snapshot = self._buffers.held[number]
            assert snapshot is not None
            if not snapshot.files and not self._is_last:
                self._buffers.preallocate_others(number)
            is_last = not snapshot.is_due
            snapshot = replace(snapshot, task=snapshot.task or self._last.task)
            entry, why = self._write(number, snapshot, is_last)
            with self._changed:
                self._writing = None
                there = self._buffers.held[number]
                # A later round may have made it its own meanwhile.
                if there is not None and there.original_key == snapshot.original_key:
                    self._buffers.write_header(number, there.as_written(entry.path if entry else None))
                self._record_result(snapshot, entry, why)
                if is_last:
                    self._last.mark_done(snapshot, entry, why)
            os.write(self._wake_write, b"\0")
            if entry is not None:
                self._retain(snapshot)
            if not (self._ending or self._is_last or snapshot.files):
                self._buffers.preallocate_others(number)

    def _wait_for_due_buffer(self) -> int | None:
        """Wait for the buffer with the newest state that is to be written, and mark it; None at the end."""
        with self._changed:
            while True:
                if self._is_last and (last := self._last.next_buffer()) is not None:
                    self._writing = last
                    return last
                tasks = self._due_saves()
                rest_s = 0.0 if self._ending or self._is_last else self._rests_until - time.monotonic()
                if tasks and rest_s > 0:
                    self._changed.wait(rest_s)
                    continue
                if tasks:
                    self._writing = max(tasks)[1]
                    return self._writing
                if self._ending:
                    return None
                self._changed.wait()

    def _due_saves(self) -> list[tuple[SaveKey, int]]:
        """The saves that are to be written, and the buffers that they are in."""
        return [(snapshot.key, at) for at, snapshot in enumerate(self._buffers.held) if snapshot and snapshot.is_due]

    def _write(self, buffer: int, snapshot: Snapshot, is_last: bool) -> tuple[Entry | None, str]:
        task, draft = snapshot.task, snapshot.draft
        assert task is not None
        try:
            lock = self._locks.setdefault(
                (task.directory, draft.job, draft.run), DirectoryLock(task.directory, draft.job, draft.run)
            )
            lock.acquire()
            if is_last:
                return self._last.write(buffer, snapshot), ""
            if snapshot.checkpoint_path:  # an older round's checkpoint is this state
                return checkpoint_files.relink(task.directory, _read_entry(snapshot.checkpoint_path), draft.round), ""
            own = state_files.file_contents(self._buffers, buffer, snapshot)
            return state_files.write_own_files(own, snapshot, self._why_give_up(snapshot)), ""
        except Exception as error:  # noqa: BLE001 - whatever a file system or a store's package raises: others follow
            if snapshot.checkpoint_path:
                return self._write(buffer, replace(snapshot, checkpoint_path=""), is_last)
            return None, str(error) or repr(error)

    def _why_give_up(self, snapshot: Snapshot) -> Callable[[], Reason]:
        """Why it does not wait any longer for the other nodes' parts of a sharded state."""

        def why() -> Reason:
            with self._changed:
                if any(
                    newer is not None and newer.original_key > snapshot.original_key for newer in self._buffers.held
                ):
                    return "a later save has begun"
                if self._ending or self._flushes:
                    patience_s = PARTS_WAIT_WHEN_ENDED_S if self._ending else PARTS_WAIT_AT_FLUSH_S
                    self._parts_until = min(self._parts_until, time.monotonic() + patience_s)
                return "another node did not write its part" if time.monotonic() > self._parts_until else ""

        return why

    def _retain(self, snapshot: Snapshot) -> None:
        task = snapshot.task
        assert task is not None
        try:
            retain(task.directory, snapshot.draft.round, task.keep, task.keep_every)
        except Exception as error:  # noqa: BLE001 - as in `_write`
            events = WorkerEventWriter(task.events or None, snapshot.draft.round, task.rank)
            events.write("message", f"old checkpoints could not be deleted: {error}", snapshot.draft.step)


def _read_entry(path: str) -> Entry:
    manifest = read(Path(path))
    if not isinstance(manifest, Manifest):
        raise CheckpointError(manifest.why)
    return Entry(Path(path), manifest)


def main() -> None:
    listener, headers, *buffers = map(int, sys.argv[1:])
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(b"elasticd-writer")
    for fd in (listener, headers, *buffers):
        os.set_inheritable(fd, False)
    sys.exit(Writer(socket.socket(fileno=listener), Buffers(headers, buffers)).run())


if __name__ == "__main__":
    main()
