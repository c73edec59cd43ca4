"""Shards in the memory of another node: its writer serves them over TCP, to ranks that restore and to partner nodes.

    {version, secret, job, run, round, number, file, start, size, wait_s}   one line of JSON for each request
        ->  {snapshot}: the state is whole there; {size, file_size} and so many bytes of the file; or {refused: why}

The secret reaches other nodes through the round's store, so only ranks of the job have it. A state is never changed
while it keeps its key: a peer that has read all of a state, and then finds it still there, has read that state.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from elasticd.channel import Message
from elasticd.checkpointing.memory.buffers import PARTNER_BUFFER, PROTOCOL_VERSION, Buffers, SaveKey, Snapshot
from elasticd.checkpointing.memory.memory_limit import SPARE_BYTES, available_bytes
from elasticd.checkpointing.storage.atomic_write import write_at
from elasticd.errors import CheckpointError, Reason
from elasticd.heartbeat.worker_events import WorkerEventWriter

ServerAddress = Sequence[Any]
"""Address, port and secret of a node's writer."""
COPY_NICENESS = 10
"""The niceness of threads that copy: where cores are scarce, training comes first."""
CONNECT_S, PATIENCE_S = 3.0, 30.0
"""To reach the other side, and its longest pause."""
WHOLE_STATE_WAIT_S = 60.0
"""The time that a partner waits for all ranks of the other node to have copied their parts."""
_PIECE_BYTES = 4 << 20
_MAX_ANSWER_BYTES = 2 << 20
_MAX_CONNECTIONS = 1024


class ShardClient:
    """A connection to another node's writer, for one state. Raises OSError, and CheckpointError for a refusal."""

    def __init__(self, server: ServerAddress, job: str, run: str, key: SaveKey) -> None:
        """Connect to the writer at `server` for the state `key`: the round, and the number of the save in it."""
        host, port, secret = server
        own = {"version": PROTOCOL_VERSION, "secret": secret, "job": job, "run": run}
        self._request = {**own, "round": key[0], "number": key[1]}
        self._socket = socket.create_connection((host, port), CONNECT_S)
        self._socket.settimeout(PATIENCE_S)
        self._answers = self._socket.makefile("rb", buffering=1 << 16)

    def wait_for_snapshot(self, wait_s: float = 0.0) -> Snapshot:
        """The part that is held there; waits until it is whole."""
        self._socket.settimeout(PATIENCE_S + wait_s)
        try:
            return Snapshot.from_json(self._ask(wait_s=wait_s)["snapshot"].encode())
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"it describes its part in another way: {error!r}") from error

    def file_size(self, file: str) -> int:
        """The size of a file in bytes."""
        return int(self._ask(file=file, start=0, size=0)["file_size"])

    def read(self, file: str, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `start` on."""
        if self._ask(file=file, start=start, size=len(into))["size"] != len(into):
            raise CheckpointError(f"{file} is shorter there")
        while len(into):
            count = self._answers.readinto(into)  # type: ignore[attr-defined]
            if not count:
                raise ConnectionResetError("the other node has ended the connection")
            into = into[count:]

    def _ask(self, **what: Any) -> Message:
        self._socket.sendall(json.dumps({**self._request, **what}).encode() + b"\n")
        line = self._answers.readline(_MAX_ANSWER_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the other node has ended the connection")
        answer: Message = json.loads(line)
        if "refused" in answer:
            raise CheckpointError(answer["refused"])
        return answer

    def close(self) -> None:
        self._answers.close()
        self._socket.close()


class ShardServer:
    """The shard server of one writer. `changed` guards the buffers and is notified when a state is whole."""

    def __init__(self, address: str, buffers: Buffers, changed: threading.Condition) -> None:
        """Raises OSError if it cannot listen at this address of the node."""
        self._buffers, self._changed = buffers, changed
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener = socket.create_server((address, 0), family=family)
        self.server: ServerAddress = (address, self.listener.getsockname()[1], secrets.token_hex(16))
        self._connections = threading.Semaphore(_MAX_CONNECTIONS)

    def accept(self) -> None:
        """A node connects."""
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            if not self._connections.acquire(blocking=False):
                connection.close()
                return
            threading.Thread(target=self._serve, args=(connection,), name="shard-server", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one connection's requests until it ends. A request that is not one of ours ends it."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COPY_NICENESS)
        patience = struct.pack("ll", int(PATIENCE_S), 0)
        try:
            with connection, connection.makefile("rb") as requests:
                connection.settimeout(None)
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # sendfile needs a blocking socket
                    connection.setsockopt(socket.SOL_SOCKET, option, patience)
                while (line := requests.readline(1 << 16)).endswith(b"\n"):
                    self._answer(connection, json.loads(line))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # not one of ours, or it has ended
        finally:
            self._connections.release()

    def _answer(self, connection: socket.socket, request: Message) -> None:
        """Answer one request. A file is sent from its buffer by sendfile, without a copy in this process.

        The buffer may be given to a newer state meanwhile, and the reader gets bytes of both. It finds out by asking
        for the state once more at its end (see the module).
        """
        if not hmac.compare_digest(str(request["secret"]), self.server[2]) or request["version"] != PROTOCOL_VERSION:
            raise ValueError("a stranger")
        file = request.get("file", "")
        place = self._wait_for_buffer(request, file)
        if place is None or not file:
            refused = {"refused": "that state is not in its memory"}
            answer = refused if place is None else {"snapshot": place[1].to_json().decode()}
            connection.sendall(json.dumps(answer).encode() + b"\n")
            return
        number, snapshot = place
        first, length = snapshot.files[file]
        start = min(max(request["start"], 0), length)
        size = max(min(request["size"], length - start), 0)
        connection.sendall(json.dumps({"size": size, "file_size": length}).encode() + b"\n")
        at, end = first + start, first + start + size
        while at < end:
            count = os.sendfile(connection.fileno(), self._buffers.fds[number], at, end - at)
            if not count:
                raise OSError("a smaller state has taken its place")
            at += count

    def _wait_for_buffer(self, request: Message, file: str) -> tuple[int, Snapshot] | None:
        """Return the buffer with the state, waiting for it to be whole as long as the request allows."""
        key, whose = (request["round"], request["number"]), (request["job"], request["run"])
        deadline = time.monotonic() + min(request.get("wait_s", 0.0), WHOLE_STATE_WAIT_S)

        def held() -> tuple[int, Snapshot] | None:
            number = self._buffers.find(key, file, with_copies=bool(file))
            snapshot = None if number is None else self._buffers.held[number]
            if number is None or snapshot is None or (snapshot.draft.job, snapshot.draft.run) != whose:
                return None
            return number, snapshot

        with self._changed:
            while (buffer := held()) is None and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return buffer


class PartnerCopy:
    """Keeps a copy of another node's part of the newest sharded state: its memory survives that node.

    One copy at a time, in a thread; it ends where a later save asks for the next one. The copy before it is erased
    first: at a save, all earlier states are on the disk.
    """

    def __init__(self, buffers: Buffers, changed: threading.Condition) -> None:
        self._buffers, self._changed = buffers, changed
        self._wanted: Message | None = None
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="partner-copy", daemon=True)

    def request_copy(self, own: Snapshot, partner: Message | None) -> None:
        """Copy what `partner` has of the state `own`: {server, node, events, rank}. With `changed` held.

        None: no copy is needed any more.
        """
        if partner is None:
            self._buffers.erase_header(PARTNER_BUFFER)
            os.ftruncate(self._buffers.fds[PARTNER_BUFFER], 0)
            return
        self._wanted = {**partner, "own": own}
        self._changed.notify_all()
        if not self._thread.is_alive():
            self._thread.start()

    def _run(self) -> None:
        """Make one copy after the other; a request that arrives during a copy replaces it."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COPY_NICENESS)
        while True:
            with self._changed:
                while (wanted := self._wanted) is None:
                    self._changed.wait()
                self._wanted = None
            self.copy_and_report(wanted)

    def copy_and_report(self, wanted: Message) -> None:
        """Make one copy. A failure is a sentence, once, and no reason to end anything: the disk has
        or gets the state.
        """
        own, node = wanted["own"], wanted["node"]
        events = WorkerEventWriter(wanted["events"] or None, own.draft.round, wanted["rank"])
        try:
            if not self._copy(wanted):
                return
        except Exception as error:  # noqa: BLE001 - whatever another node sends: the next copy may succeed
            why = f"this node has no copy of node {node}'s part of the state: {error}"
            if why != self._said:  # once
                self._said = why
                events.write("message", why, own.draft.step)
            return
        self._said = ""
        events.write("snapshot", f"node {node}'s part of step {own.draft.step} is in memory here", own.draft.step)

    def _copy(self, wanted: Message) -> bool:
        """False: the state was never whole there, and a later save has begun."""
        draft, key = wanted["own"].draft, wanted["own"].key
        remote = ShardClient(wanted["server"], draft.job, draft.run, key)
        with contextlib.closing(remote):
            snapshot = self._wait_for_state(remote)
            if snapshot is None:
                return False
            if (snapshot.key, snapshot.draft.step) != (key, draft.step):
                raise CheckpointError(f"it holds step {snapshot.draft.step}, not {draft.step}")
            size = max((at + size for at, size in snapshot.files.values()), default=0)
            with self._changed:
                if why := self._no_memory_reason(size):
                    raise CheckpointError(why)
                self._buffers.erase_header(PARTNER_BUFFER)
                self._buffers.grow(PARTNER_BUFFER, size)
            piece = memoryview(bytearray(min(_PIECE_BYTES, max(size, 1))))
            for name, (offset, length) in snapshot.files.items():
                for start in range(0, length, len(piece)):
                    part = piece[: min(len(piece), length - start)]
                    remote.read(name, start, part)
                    write_at(self._buffers.fds[PARTNER_BUFFER], offset + start, part)
                    if self._wanted is not None:
                        raise CheckpointError("the next save began before it was copied")
            remote.wait_for_snapshot()  # it was there all the time
            with self._changed:
                copy = replace(snapshot, task=None, checkpoint_path="", is_copy=True)
                self._buffers.trim(PARTNER_BUFFER, copy)
                self._buffers.write_header(PARTNER_BUFFER, copy)
        return True

    def _wait_for_state(self, remote: ShardClient) -> Snapshot | None:
        """Wait until all ranks of the other node have copied their parts. None: a later save has begun."""
        deadline = time.monotonic() + WHOLE_STATE_WAIT_S
        while self._wanted is None:
            try:
                return remote.wait_for_snapshot(1.0)
            except CheckpointError:
                if time.monotonic() > deadline:
                    raise
        return None

    def _no_memory_reason(self, size: int) -> Reason:
        """Why there is no memory for a copy, beside what this node's own part will take; "" if there is."""
        status = [os.fstat(fd) for fd in self._buffers.fds]
        lacking = [max(buffer.st_size - buffer.st_blocks * 512, 0) for buffer in status[:PARTNER_BUFFER]]
        need = max(size - status[PARTNER_BUFFER].st_blocks * 512, 0) + sum(lacking) + SPARE_BYTES
        left, where = available_bytes()
        if need <= left:
            return ""
        return f"a copy of {size >> 20} MB takes {need >> 20} MB more, and {max(left, 0) >> 20} MB are left {where}"


def own_address_toward(master: str) -> str:
    """This node's address on the way to `master`, the address of rank 0's node. Raises OSError."""
    family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        address: str = probe.getsockname()[0]
        return address
