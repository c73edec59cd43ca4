"""A state on its way from one rank to nodes that lack it, by the process group: all of it, or the pieces that differ.

At a fault several nodes may save the same step. Of these states one is chosen; the others differ from it by little,
such as random states. Checksums of pieces show what a node has already.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from typing import TypedDict

import torch
import torch.distributed as dist

from elasticd.checkpointing.storage.manifest import Checksum
from elasticd.errors import CheckpointError
from elasticd.process_group import DefaultGroup

MAX_BYTES_AT_ONCE = 64 << 20
"""The most that is sent at once, and the most that is received beside a state that a node has already."""
_MIN_PIECE_BYTES = 1 << 20
_MAX_PIECES = 1024
_READ_BYTES = 1 << 20
_SHORTER_REASON = "the state is shorter than its description"

Span = tuple[int, int]
"""Offset and end."""


def _piece_spans(size: int) -> list[Span]:
    step = max(-(-size // _MAX_PIECES // 4096) * 4096, _MIN_PIECE_BYTES)
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def piece_checksums(fd: int, size: int) -> list[str]:
    """Checksums of each piece of a state of `size` bytes. Raises OSError."""
    buffer = memoryview(bytearray(_READ_BYTES))
    sums = []
    for start, end in _piece_spans(size):
        checksum = Checksum()
        while start < end:
            count = os.preadv(fd, [buffer[: end - start]], start)
            if not count:
                raise OSError(_SHORTER_REASON)
            checksum.update(buffer[:count])
            start += count
        sums.append(str(checksum))
    return sums


class ReadAnswer(TypedDict):
    """A rank's answer to the question whether it can read the state."""

    host: str
    error: str  #: the reason why it cannot, "" if it can
    pieces: list[str]  #: checksums of a state of the same step in its node's memory, none without one
    first: bool  #: it receives for its node


class SendingPlan(TypedDict):
    """The rank that sends, those that receive, and the spans of the state."""

    sender: int
    receivers: list[int]
    spans: list[Span]
    patched: bool


def plan_sending(name: str, answers: list[ReadAnswer], size: int) -> SendingPlan:
    """The least that has to be sent so that all ranks have the state. Raises CheckpointError if no rank has it."""
    hosts = {answer["host"] for answer in answers if answer["error"]}
    senders = [rank for rank, answer in enumerate(answers) if not answer["error"]]
    if not senders:
        raise CheckpointError(f"{name} cannot be read by any rank any more: {answers[0]['error']}")
    sender = senders[0]
    receivers = [rank for rank, answer in enumerate(answers) if answer["host"] in hosts and rank != sender]
    whole: SendingPlan = {"sender": sender, "receivers": receivers, "spans": [(0, size)], "patched": False}
    sent = answers[sender]["pieces"]
    known = [answers[rank]["pieces"] for rank in receivers if answers[rank]["first"]]
    if not sent or not known or any(len(pieces) != len(sent) for pieces in known):
        return whole
    spans = [span for at, span in enumerate(_piece_spans(size)) if any(pieces[at] != sent[at] for pieces in known)]
    if sum(end - start for start, end in spans) > MAX_BYTES_AT_ONCE:
        return whole
    return {**whole, "spans": spans, "patched": True}


def broadcast_spans(
    fd: int, sender: int, spans: Iterable[Span], group: DefaultGroup, write: Callable[[int, memoryview], None] | None
) -> None:
    """Send these spans of the file `fd` of one rank to all; `write(offset, data)` where they are kept.

    All ranks call it. Raises OSError.
    """
    parts = [
        (at, min(at + MAX_BYTES_AT_ONCE, end)) for start, end in spans for at in range(start, end, MAX_BYTES_AT_ONCE)
    ]
    most = max((end - start for start, end in parts), default=0)
    host = torch.empty(most, dtype=torch.uint8, device="cpu")
    view = memoryview((ctypes.c_char * host.numel()).from_address(host.data_ptr())).cast("B")
    for start, end in parts:
        count, done = end - start, 0
        while group.rank == sender and done < count:
            if not (read := os.preadv(fd, [view[done:count]], start + done)):
                raise OSError(_SHORTER_REASON)
            done += read
        piece = host[:count].to(group.device)
        dist.broadcast(piece, src=sender)
        if group.rank != sender and write is not None:
            host[:count].copy_(piece)
            write(start, view[:count])
