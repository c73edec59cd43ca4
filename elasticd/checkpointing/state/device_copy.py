"""Copies a device's memory to the host: a GPU's through pinned memory, on a stream of its own.

An H200 fills pinned memory with 50 GB/s and other memory with 1.2 GB/s (torch 2.11, CUDA 13.0, 288 MB). So two chunks
of pinned memory take turns: one is filled while the other is read.

At a fault the training thread's stream waits for a collective that does not end, and a copy in that stream would wait
with it. One in a stream of its own does not, unless the training thread stands in a launch: with about 1,000 kernels
that have not run yet it waits there for room in CUDA's queue, and so does every copy of the process, in whatever stream
(seen on an H200). `can_copy` says whether copies are possible.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

CHUNK_BYTES = 16 << 20
"""The bytes that are copied at once. Each `GpuCopies` has two such chunks of pinned memory, and a rank has two of
these."""
FIRST_COPY_TIMEOUT_S = 10.0
_PIECE_ALIGNMENT = 64
StoragePart = tuple[int, "torch.UntypedStorage", int, int]
"""The part's offset in a file; the storage; the first byte of the part in it, and the one behind the last."""


class GpuCopies:
    """Copies from one GPU, in one stream, for one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.chunks = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
        self._byte = torch.zeros(1, dtype=torch.uint8, device=device)

    def copy_pieces(self, parts: Iterable[StoragePart], at_once: bool = True) -> Iterator[tuple[int, memoryview]]:
        """Each piece with its place in the file, valid until the next one. Unless `at_once`, what is queued in the
        thread's current stream comes first.
        """
        if not at_once:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        filled: list[tuple[int, memoryview]] = []
        for number, batch in enumerate(chunk_batches(parts)):
            chunk, filling = self.chunks[number % 2], []
            with torch.cuda.stream(self._stream):
                for at, place, source in batch:
                    target = chunk[at : at + len(source)]
                    target.copy_(source, non_blocking=True)
                    filling.append((place, host_view(target.data_ptr(), len(source))))
            yield from filled  # while this batch is copied
            self._stream.synchronize()
            filled = filling
        yield from filled

    def can_copy(self, within_s: float) -> bool:
        """True if a copy ends within so long, whatever is queued elsewhere. If not, a thread is left waiting.

        Nothing is allocated: at a fault that may wait for the GPU, too.
        """
        done = threading.Event()

        def copy() -> None:
            with contextlib.suppress(RuntimeError), torch.cuda.stream(self._stream):
                self.chunks[0][:1].copy_(self._byte, non_blocking=True)
                self._stream.synchronize()
                done.set()

        threading.Thread(target=copy, name="elasticd-probe", daemon=True).start()
        return done.wait(within_s)


def copy_pieces(device: torch.device, parts: Iterable[StoragePart]) -> Iterator[tuple[int, memoryview]]:
    """Copy pieces as `GpuCopies.copy_pieces` does, from any device, after what is queued there."""
    if device.type == "cuda":
        yield from _gpu_copies(device).copy_pieces(parts, at_once=False)
        return
    for batch in chunk_batches(parts):
        for _, place, source in batch:
            copied = source.cpu()
            yield place, host_view(copied.data_ptr(), copied.nbytes)


@functools.cache
def _gpu_copies(device: torch.device) -> GpuCopies:
    """The training thread's copies from a GPU."""
    return GpuCopies(device)


def chunk_batches(parts: Iterable[StoragePart]) -> Iterator[list[tuple[int, int, torch.Tensor]]]:
    """Batches that fit into a chunk: the place of each piece there and in the file, and its memory."""
    batch: list[tuple[int, int, torch.Tensor]] = []
    used = 0
    for place, storage, first, last in parts:
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for start in range(first, last, CHUNK_BYTES):
            piece = whole[start : min(start + CHUNK_BYTES, last)]
            if used + len(piece) > CHUNK_BYTES:
                yield batch
                batch, used = [], 0
            batch.append((used, place + start - first, piece))
            used += -(-len(piece) // _PIECE_ALIGNMENT) * _PIECE_ALIGNMENT
    if batch:
        yield batch


def host_view(address: int, size: int) -> memoryview:
    """A view of the host's memory."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
