"""A DataLoader of any training loop, made again with the elastic sampler in place of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from elasticd.checkpointing.state.training_state import StateDict
from elasticd.errors import UsageError
from elasticd.sampler import ElasticBatchSampler

_COPIED_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
_COPIED_WORKER_OPTIONS = ("prefetch_factor", "persistent_workers")


class ElasticLoader:
    """Iterates over this rank's micro-batches, from the cursor of its `sampler` to the end of that epoch.

    It is no `torch.utils.data.DataLoader`, so that frameworks neither shard nor wrap it. `len()` is a whole epoch's
    number of micro-batches of this rank, wherever the cursor is.

    Args:
        loader: a DataLoader over a map-style dataset. Its dataset and its options are used. A shuffled order becomes
            the elastic sampler's; that of another sampler is kept, and has to be the same on all ranks.
        global_batch: samples in one optimizer step, over all ranks.
        per_rank_batch: how many of them fit on a rank at a time; the number of micro-batches follows from that.
        seed: of the order.

    Raises UsageError for a stream and for a batch sampler of another kind, SamplerError for sizes that cannot work.
    """

    def __init__(self, loader: Any, global_batch: int, per_rank_batch: int | None = None, seed: int = 0) -> None:
        import torch
        from torch.utils.data import DataLoader

        batches = batch_sampler_of(loader)
        order, shuffle = _kept_order(batches.sampler, len(loader.dataset))
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.sampler = ElasticBatchSampler(
            loader.dataset,
            global_batch,
            accumulate=math.ceil(global_batch / (ranks * (per_rank_batch or global_batch))),
            shuffle=shuffle,
            seed=seed,
            drop_last=batches.drop_last,
            order=order,
        )
        options = {name: getattr(loader, name) for name in _COPIED_OPTIONS}
        if loader.num_workers:
            options |= {name: getattr(loader, name) for name in _COPIED_WORKER_OPTIONS}
        # Of its own: a restart begins one iteration more, which would draw from the stream that dropout uses.
        generator = torch.Generator().manual_seed(seed)
        self._loader: Any = DataLoader(loader.dataset, batch_sampler=self.sampler, generator=generator, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch * self.sampler.accumulate

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader  # from the cursor as it is when the first batch is asked for

    def state_dict(self) -> StateDict:
        """The cursor."""
        return dict(self.sampler.state_dict())

    def load_state_dict(self, state: StateDict) -> None:
        self.sampler.load_state_dict(state)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left, in place of `range(count)`; each begins where the cursor is."""
        for epoch in range(self.sampler.epoch, count):
            self.sampler.set_epoch(epoch)
            yield epoch


def batch_sampler_of(loader: Any) -> Any:
    """The loader's own BatchSampler, inside of what shards its batches."""
    from torch.utils.data import BatchSampler, IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            f"{type(loader.dataset).__name__} is a stream, whose samples have no numbers: use a map-style dataset, or "
            "keep the loader and attach its state on each rank: elasticd docs frameworks#streams"
        )
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if not isinstance(batches, BatchSampler) or type(batches).__iter__ is not BatchSampler.__iter__:
        raise UsageError(
            f"{type(batches).__name__} makes batches of its own, and ElasticBatchSampler would replace them: give a "
            "DataLoader with batch_size= and sampler="
        )
    return batches


def _kept_order(sampler: Any, samples: int) -> tuple[Any, bool]:
    """The sampler whose order is kept, None if the elastic sampler's takes its place; whether that is shuffled."""
    from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

    if isinstance(sampler, DistributedSampler):
        return None, sampler.shuffle
    if isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == samples:
        return None, True
    return (None, False) if isinstance(sampler, SequentialSampler) else (sampler, False)
