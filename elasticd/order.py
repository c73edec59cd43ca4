"""An epoch's order as a script's own sampler gives it: weighted, grouped by length, filtered.

Every rank draws the whole order, with generators seeded by (seed, epoch), so that it is the same on all ranks and after
a restart. A sampler that draws from elsewhere (numpy, Python's `random`, the rank) has another order each time; the
order's checksum, which is in the sampler's state, finds that at the first batch, at the first save and at a restore.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sized
from typing import Any, cast

from elasticd.errors import SamplerError


class GivenOrder:
    """The order of one epoch."""

    def __init__(self, order: Iterable[int] | Callable[[int], Iterable[int]], seed: int, epoch: int) -> None:
        """`order`: a sampler or a sequence of indices, or a function that gives one for an epoch."""
        import torch

        numbers = hashlib.blake2b(f"elasticd/{seed}/{epoch}".encode("ascii"), digest_size=8).digest()
        number = int.from_bytes(numbers, "little") >> 1
        if callable(set_epoch := getattr(order, "set_epoch", None)):
            set_epoch(epoch)
        if getattr(order, "generator", self) is not self:
            cast("Any", order).generator = torch.Generator().manual_seed(number)
        name = getattr(order, "__name__", type(order).__name__)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(number)
            indices = order(epoch) if callable(order) and not hasattr(order, "__iter__") else order
            try:
                self._indices = array("q", cast("Iterable[int]", indices))
            except TypeError as error:
                raise SamplerError(
                    f"order={name}: {error}; it has to give the numbers of single samples, of which "
                    "ElasticBatchSampler makes the batches"
                ) from error
        digest = hashlib.blake2b(self._indices.tobytes(), digest_size=8).hexdigest()
        self.name = f"{name}/{digest}"

    def __len__(self) -> int:
        return len(self._indices)

    def at(self, positions: list[int]) -> list[int]:
        """The samples at these positions of the order."""
        return [self._indices[position] for position in positions]


def length(order: Any, seed: int) -> int:
    """The length of an epoch. Raises SamplerError for a sampler that shards, and for one that gives no indices."""
    if hasattr(order, "num_replicas"):
        raise SamplerError(
            f"order={type(order).__name__}: it gives each rank a share, which ElasticBatchSampler would share out "
            "again; give the order of the whole dataset"
        )
    if not callable(getattr(order, "__iter__", order)):
        raise SamplerError(f"order={order!r}: give a sampler, a sequence of indices, or a function of the epoch")
    return len(order) if isinstance(order, Sized) else len(GivenOrder(order, seed, 0))
