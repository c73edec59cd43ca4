"""A rank's connection to its node's writer: it borrows a buffer, copies its share of the state, and may wait.

The copy goes into memory that both processes have mapped, so a state crosses no socket: what is sent are descriptors
and a few fields. A rank that fails in the middle closes its connection; the writer then knows that this share will not
come, and never shows a half of a state as a whole one.

A writer may die and be replaced by the launcher at any moment. A request that finds the connection broken is asked once
more of the next writer, which knows nothing of saves that the first one had not finished; what that means for them is
reported before (`before_successor`). A writer that does not answer is not replaced here: a machine that stands still
would get two of them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elasticd import channel
from elasticd.channel import Message
from elasticd.checkpointing.memory.buffers import (
    PARTNER_BUFFER,
    PROTOCOL_VERSION,
    FilePlace,
    SaveKey,
    Snapshot,
    WriteTask,
)
from elasticd.checkpointing.memory.mapped_buffer import MappedBuffers
from elasticd.checkpointing.memory.shard_server import ServerAddress
from elasticd.checkpointing.state.layout import Layout
from elasticd.checkpointing.storage.manifest import Manifest

WRITER_VARIABLE = "ELASTICD_WRITER"
"""share/shares:path, the path of the writer's socket; set by the launcher."""
_ANSWER_TIMEOUT_S = 30.0
"""The writer answers within milliseconds; it, or the machine, may be stopped for a while."""
LOST_PART_WAIT_S = 2.0
"""The wait for the part of a node that does not write any more: a network file system may show it late."""

BorrowedBuffer = tuple[int, int]
"""The descriptor of a buffer, and the number of shares that it is filled by."""
OpenedBuffer = tuple[int, int, int]
"""The descriptor of a buffer; start and size in it of a state, or of a file."""


class SnapshotRefused(Exception):
    """The writer takes no copy of this state; the reason is the message."""


@dataclass
class WriterClient:
    """Share `share` of `shares` of this node's copies is this rank's. Connects when it is used first."""

    socket_path: str
    share: int
    shares: int
    is_first_node: bool
    make_task_at_end: Callable[[], WriteTask] | None = None
    """Returns the writer's task with the newest state when the job ends."""
    before_successor: Callable[[], None] | None = None
    """Called before the next writer is asked, once the one before it has died: what it had not read is lost."""
    _is_handling_successor: bool = False
    _socket: socket.socket | None = field(default=None, repr=False)
    _mapped: MappedBuffers = field(default_factory=MappedBuffers, repr=False)

    def copy_share(
        self,
        draft: Manifest,
        number: int,
        layout: Layout,
        copy_unshared: Callable[[int], None],
        task: Callable[[], WriteTask] | None = None,
    ) -> None:
        """Copy this rank's share of the state into the writer's memory; share 0 adds all that is not shared.

        The draft's checksum is none. `task` is called after the copy. Raises SnapshotRefused, and OSError when there
        is no writer.
        """
        fd, shares = self.borrow_buffer(draft, number, self.share, self.shares, layout.shared_digest)
        try:
            buffer = self._mapped.begin_copy(fd)
            layout.copy_shared(buffer.write, self.share, shares)
            if self.share == 0:
                copy_unshared(fd)
            self.report_copied(draft, number, self.share, task)
            buffer.end_copy()
        except BaseException:
            self.close()  # so that the writer knows that this share will not come
            raise
        finally:
            os.close(fd)

    def borrow_buffer(
        self,
        draft: Manifest,
        number: int,
        share: int,
        shares: int,
        digest: str,
        copies: int = 2,
        like: SaveKey | None = None,
        once: bool = False,
    ) -> BorrowedBuffer:
        """Borrow a buffer for one of the shares of a state; returns its descriptor and how many shares there are.

        `copies`: for so many states of this size there has to be memory. `like`: the buffer with this state, which the
        rank will change in parts. `once`: at a fault, unless another rank has saved that step.

        Raises SnapshotRefused, OSError.
        """
        key = {"round": draft.round, "number": number, "share": share}
        need = {"size": draft.bytes, "copies": copies}
        how = {"shares": shares, "digest": digest, "like": like, "once": once}
        fd, answer = self._request_descriptor({"do": "begin", **key, **need, **how})
        if like is not None and not answer.get("like"):
            os.close(fd)
            raise SnapshotRefused("the launcher's writer is older and lends an empty buffer")
        return fd, answer["shares"]

    def report_copied(
        self,
        draft: Manifest,
        number: int,
        share: int,
        task: Callable[[], WriteTask] | None = None,
        files: Mapping[str, FilePlace] | None = None,
        partner: Mapping[str, Any] | None = None,
    ) -> None:
        """The share is in the buffer; of a sharded state these files, each at an offset. Raises OSError.

        `partner`: of that node's part the writer keeps a copy, as `PartnerCopy.request_copy` has it.
        """
        key = {"round": draft.round, "number": number, "share": share, "files": files or {}}
        described = {**self._draft_fields(draft, task and task()), "partner": partner}
        self._send({"do": "copied", **key, **(described if share == 0 else {})})

    def find_newest(self) -> Snapshot | None:
        """The newest state that is whole in one buffer of this node. Raises SnapshotRefused, and OSError when there is
        no writer.
        """
        return self._find_snapshot({})

    def find_all(self) -> list[Snapshot]:
        """The state in each buffer of this node. Raises as `find_newest` does."""
        return [
            snapshot
            for buffer in range(PARTNER_BUFFER + 1)
            if (snapshot := self._find_snapshot({"buffer": buffer})) is not None
        ]

    def _find_snapshot(self, where: Mapping[str, int]) -> Snapshot | None:
        data = self._request({"do": "find", **where})[0]["snapshot"]
        return Snapshot.from_json(data.encode()) if data else None

    def open_buffer(self, key: SaveKey, file: str = "") -> OpenedBuffer:
        """A descriptor of the buffer with this state, or with that file of it; start and size in it.

        Raises SnapshotRefused, OSError.
        """
        fd, answer = self._request_descriptor({"do": "open", "round": key[0], "number": key[1], "file": file})
        return fd, answer["start"], answer["size"]

    def serve_shards(self, address: str) -> ServerAddress:
        """Serve this node's shards to other nodes; returns the address. Raises SnapshotRefused, OSError."""
        server: ServerAddress = self._request({"do": "serve", "address": address})[0]["server"]
        return server

    def adopt(self, key: SaveKey, draft: Manifest, task: WriteTask | None) -> None:
        """The round of `draft` has resumed from this state, and owns it now. Raises SnapshotRefused, OSError."""
        self._request({"do": "adopt", "round": key[0], "number": key[1], **self._draft_fields(draft, task)})

    def wait_for_result(self, round: int, number: int, timeout_s: float) -> Message:
        """The result of a save: {saved, path, why}. Raises SnapshotRefused, OSError."""
        return self._request({"do": "wait", "round": round, "number": number}, timeout_s)[0]

    def are_shards_pending(
        self, wait: bool, timeout_s: float = _ANSWER_TIMEOUT_S, parts_s: float | None = None
    ) -> bool:
        """True if a sharded state is being copied or written; with `wait`, the answer comes when none is. From now on
        the writer waits for the parts of other nodes for `parts_s` at most. Raises SnapshotRefused, OSError.
        """
        return bool(self._request({"do": "settle", "wait": wait, "parts_s": parts_s}, timeout_s)[0]["writing"])

    def close(self) -> None:
        self._mapped.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _draft_fields(self, draft: Manifest, task: WriteTask | None = None) -> Message:
        at_end = self.make_task_at_end() if self.make_task_at_end else None
        return {"draft": draft.to_json().decode(), "task": task and asdict(task), "at_end": at_end and asdict(at_end)}

    def _send(self, message: Mapping[str, Any]) -> socket.socket:
        try:
            if self._socket is None:
                self._socket = channel.connect(self.socket_path, _ANSWER_TIMEOUT_S)
            channel.send(self._socket, {**message, "version": PROTOCOL_VERSION})
        except OSError:
            self.close()
            raise
        return self._socket

    def _request_descriptor(self, message: Mapping[str, Any]) -> tuple[int, Message]:
        answer, fds = self._request(message)
        if not fds:
            raise ConnectionError("the writer's answer has no buffer")
        return fds[0], answer

    def _request(self, message: Mapping[str, Any], timeout_s: float = _ANSWER_TIMEOUT_S) -> tuple[Message, list[int]]:
        """The answer, with descriptors. Where the writer has died, also since the last request, the next one is asked.

        Raises SnapshotRefused, and OSError: TimeoutError, or when there is no writer.
        """
        try:
            return self._ask_once(message, timeout_s)
        except TimeoutError:
            raise
        except OSError:
            if self.before_successor is not None and not self._is_handling_successor:
                self._is_handling_successor = True
                try:
                    self.before_successor()
                finally:
                    self._is_handling_successor = False
            return self._ask_once(message, timeout_s)

    def _ask_once(self, message: Mapping[str, Any], timeout_s: float) -> tuple[Message, list[int]]:
        connection = self._send(message)
        connection.settimeout(timeout_s)
        try:
            answer, fds = channel.receive_with_descriptors(connection, 1)
            if answer is None:
                raise ConnectionResetError("the writer ended")
        except OSError:
            self.close()
            raise
        if "refused" in answer:
            raise SnapshotRefused(answer["refused"])
        return answer, fds


def from_environment() -> WriterClient | None:
    """This rank's client; None where no launcher of ours runs a writer."""
    shares, colon, path = os.environ.get(WRITER_VARIABLE, "").partition(":")
    if not colon:
        return None
    share, _, count = shares.partition("/")
    return WriterClient(path, int(share), int(count), os.environ.get("GROUP_RANK") == "0")
