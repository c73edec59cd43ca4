"""Loaders that keep a state of their own on each rank: torchdata's StatefulDataLoader, streams, shards of files.

loader = RankLoader(StatefulDataLoader(dataset, batch_size=8))
session.attach(model=model, optimizer=optimizer, per_rank={"loader": loader})
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from elasticd.checkpointing.state.training_state import StateDict
from elasticd.errors import Reason, UsageError


class RankLoader:
    """A loader whose every rank continues at its own place. Iterate over this in place of the loader.

    On the same number of ranks each rank's loader gets its own state back, and nothing is lost or repeated. On another:

    - A map-style dataset with torchdata's StatefulDistributedSampler continues where the ranks were together. Less than
      one sample a rank is trained on again, where their number does not divide what had been trained on.
    - Any other loader begins its epoch again, because the parts of a stream belong to ranks that no longer exist.

    The event `resumed` says which of them happened.

    Args:
        loader: with `state_dict()` and `load_state_dict()`, over this rank's share of the data.
    """

    def __init__(self, loader: Any) -> None:
        missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(loader, name, None))]
        if missing:
            raise UsageError(
                f"RankLoader({type(loader).__name__}): it has no {' and no '.join(missing)}; use torchdata's "
                "StatefulDataLoader, or ElasticBatchSampler for a dataset whose samples have numbers"
            )
        self._loader = loader
        self.epoch = 0
        """The epoch that the next iteration begins or continues."""
        self.ended_epochs = 0
        """Epochs that this process has come to the end of: what follows is repeated by a run that resumes before it."""
        self._samples = 0
        """The batches of this rank and epoch that the loop has got."""
        self._per_batch = getattr(loader, "batch_size", None) or 1
        self._is_loaded = self._stopped = False
        """The next iteration continues where a state was; the job stops."""
        self._world_size = _world_size()
        """The ranks among which the loader's own sampler shares out the data."""

    def on_stop(self) -> None:
        """The job stops: there are no more batches and no more epochs."""
        self._stopped = True

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left, in place of `range(count)`."""
        while (epoch := self.epoch) < count and not self._stopped:
            yield epoch
            if self.epoch == epoch and not self._stopped:  # the loop over its batches was left early
                self._end_epoch()

    def __iter__(self) -> Iterator[Any]:
        for name in ("sampler", "dataset"):
            if callable(set_epoch := getattr(getattr(self._loader, name, None), "set_epoch", None)):
                set_epoch(self.epoch)
        self._samples = self._samples if self._is_loaded else 0  # of an iteration that was left early
        self._is_loaded = False
        for batch in self._loader:
            if self._stopped:
                return
            self._samples += self._per_batch
            yield batch
        self._end_epoch()

    def _end_epoch(self) -> None:
        self.epoch, self._samples = self.epoch + 1, 0
        self.ended_epochs += 1

    def state_dict(self) -> StateDict:
        """The state of this rank. Between two epochs the loader's own state is of a finished iteration and left out."""
        own = self._loader.state_dict() if self._samples else {}
        return {"epoch": self.epoch, "samples": self._samples, "loader": own}

    def load_state_dict(self, state: StateDict) -> None:
        self.epoch, self._samples = state["epoch"], state["samples"]
        self._is_loaded = True
        if self._samples:
            self._loader.load_state_dict(state["loader"])

    def load_state_dicts(self, states: list[StateDict], rank: int, world_size: int) -> Reason:
        """Load the states of another number of ranks; returns a sentence about what cannot be continued, or "".

        Raises UsageError in a process that stays, where the loader's sampler has the number of ranks of before.
        """
        sampler = getattr(self._loader, "sampler", None)
        if hasattr(sampler, "num_replicas") and self._world_size != world_size:
            raise UsageError(
                f"RankLoader: its {type(sampler).__name__} was made for {self._world_size} ranks, and now there are "
                f"{world_size}: make the loader in what session.run() calls"
            )
        self.epoch, self._samples = max(state["epoch"] for state in states), 0
        self._is_loaded = True
        samples = min(state["samples"] for state in states if state["epoch"] == self.epoch)
        if not samples:
            return ""
        ranks = f"{len(states)} ranks, and now there are {world_size}"
        load = getattr(sampler, "load_state_dict", None)
        if not hasattr(sampler, "num_replicas") or load is None:
            return f"epoch {self.epoch} begins again: its stream was read by {ranks}"
        # Rank r of n has had the positions r, r + n, r + 2n, … of the epoch's order.
        self._samples, again = divmod(samples * len(states), world_size)
        load({"yielded": self._samples})
        return f"{again} samples are trained on again: the epoch was shared by {ranks}" if again else ""


def _world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
