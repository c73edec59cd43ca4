"""Short words between the ranks, out of band: over the round's own store, never by a collective.

Every wait has a deadline and names who is missing, and where that rank last said it is. Keys live under a prefix that
belongs to one session of one process group, so that nothing of an earlier attempt in the same store (torchrun re-uses
its store) can be read. Nothing here knows what the words mean, and no pickle is read from them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elasticd import errors
from elasticd.coordination.rank_status import StatusReader, new_connection
from elasticd.errors import DecisionTimeout, ElasticdError

if TYPE_CHECKING:
    import torch

# A wait that torch does, at most: after it a signal's handler gets its turn. torch prints two lines for each that runs
# out, so what takes longer is asked for, in pauses that add no more than this share of the wait.
_PIECE_S = 1.0
_PAUSE, _LONGEST_PAUSE_S = 0.02, 0.25
_LOOK_S = 1.0
_PARTING_S = 5.0
_CLASSES = {
    name: found for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, ElasticdError)
}


class StoreChannel:
    """One per session. Rank 0 speaks or collects; the others listen or report. A group of one needs no store.

    `attempt` must be the same on all ranks and new in this store. `timeout_s` is the deadline of every wait, after
    which DecisionTimeout is raised; a store that is gone raises torch.distributed's own error.
    """

    def __init__(self, rank: int, world_size: int, store: Any, attempt: str, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.store = store
        self.in_use = False
        """Another thread talks over it now, perhaps for ever: a store that is frozen answers nothing."""
        # A process may make a second session in the same group.
        self.prefix = f"{attempt}/{store.add(f'{attempt}/sessions/{rank}', 1)}/" if store is not None else ""

    def new_connection(self) -> Any:
        """Another connection to its store, for another thread; the same keys under the same `prefix`."""
        return new_connection(self.store)

    def put(self, key: str, value: bytes) -> None:
        """Leave a word."""
        self.store.set(self.prefix + key, value)

    def read(self, key: str, what: str, timeout_s: float | None = None) -> bytes:
        """Wait for rank 0's word and read it; `what` tells the error what was to come. It may have its own deadline."""
        self._wait({key: 0}, what, timeout_s)
        found: bytes = self.store.get(self.prefix + key)
        return found

    def delete(self, key: str) -> None:
        """Delete a word; it may be gone already."""
        self.store.delete_key(self.prefix + key)

    def exists(self, key: str) -> bool:
        """True if the word is there."""
        return bool(self.store.check([self.prefix + key]))

    def on_rank0(self, key: str, what: str, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0 acts, and every rank hears how it went: gets what it returned (JSON), or raises.

        Rank 0 raises what `act` did, the others the same class where it is one of ours, else ElasticdError. Each key is
        for one use.
        """
        if self.rank != 0:
            told: dict[str, Any] = json.loads(self.read(key, what))
            if "error" in told:
                self.leave(f"{key}/heard")
                raise _CLASSES.get(told["error"], ElasticdError)(f"on rank 0: {told['message']}")
            return told
        try:
            answer = act()
        except Exception as error:
            kind = type(error).__name__
            message = str(error) if kind in _CLASSES else f"{kind}: {error}"
            self._tell(key, {"error": kind, "message": message})
            self.leave(f"{key}/heard")  # rank 0 may serve the store itself, and is about to leave
            raise
        self._tell(key, answer)
        return answer

    def _tell(self, key: str, value: dict[str, Any]) -> None:
        if self.store is not None:
            self.put(key, json.dumps(value).encode())

    def collect(self, key: str, mine: bytes, what: str) -> list[bytes]:
        """Rank 0 gets what every rank gives, in the order of ranks; the others get nothing and do not wait."""
        if self.rank != 0:
            self.put(f"{key}/{self.rank}", mine)
            return []
        keys = {f"{key}/{rank}": rank for rank in range(1, self.world_size)}
        if not keys:
            return [mine]
        self._wait(keys, what)
        found = [mine, *(self.store.get(self.prefix + each) for each in keys)]
        for each in keys:
            self.delete(each)
        return found

    def leave(self, key: str = "parted") -> None:
        """The last word of each rank; rank 0 waits for them, but not for long and not for ranks that are gone."""
        if self.in_use:
            return
        patient_s, self.timeout_s = self.timeout_s, min(self.timeout_s, _PARTING_S)
        with contextlib.suppress(DecisionTimeout, RuntimeError):  # torch's DistError is a RuntimeError
            self.collect(key, b"", "their last word")
        self.timeout_s = patient_s

    def _wait(self, awaited: dict[str, int], what: str, timeout_s: float | None = None) -> None:
        """Wait for these keys; each is one rank's to write."""
        from torch.distributed import DistStoreError

        full = [self.prefix + key for key in awaited]
        patience_s = self.timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        piece = max(min(_PIECE_S, patience_s), 0.001)
        try:
            self.store.wait(full, timedelta(seconds=piece))
            return
        except DistStoreError:
            if time.monotonic() - start < piece / 2:
                raise  # not a wait that ran out: the store itself failed
        looks, look_at = StatusReader(self.prefix), start
        while not self.store.check(full):
            waited = time.monotonic() - start
            over = waited >= patience_s
            if over or time.monotonic() >= look_at:
                missing = [rank for key, rank in awaited.items() if not self.exists(key)]
                looks.read(self.store, missing)
                look_at = time.monotonic() + _LOOK_S
                if over and missing:
                    raise DecisionTimeout(self._missed(missing, looks, what, patience_s))
            time.sleep(min(_PAUSE * waited, _LONGEST_PAUSE_S, max(patience_s - waited, 0.0)))

    def _missed(self, missing: list[int], looks: StatusReader, what: str, patience_s: float) -> str:
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        told = [rank for rank in missing if looks.has_status(rank)]
        where = f" What was last heard: {looks.describe_all(told)}" if told else ""
        return (
            f"rank {self.rank} waited {patience_s:g} s for {ranks}: {what}. Ranks must call the same session functions "
            f"at the same steps; look at what that rank does.{where}"
        )


def open_channel(rank: int, world_size: int, round: int, device: torch.device, timeout_s: float) -> StoreChannel:
    """A channel over the default process group's store. All ranks call it at the same place.

    A store that serves one round (an agent's) needs only the round's number; another may have served an earlier attempt
    and needs a token, which rank 0 broadcasts.
    """
    if world_size == 1:
        return StoreChannel(rank, world_size, None, "", timeout_s)
    import torch.distributed.distributed_c10d as c10d

    # A connection of our own: a wait on the shared one would block NCCL's watchdog, which uses it too.
    store = new_connection(c10d._get_default_store())
    attempt = f"elasticd/r{round}" if round else f"elasticd/{_agree_on_token(device)}"
    return StoreChannel(rank, world_size, store, attempt, timeout_s)


def _agree_on_token(device: torch.device) -> str:
    """A number that no earlier process group used; from the system's entropy, so that no random stream moves."""
    import torch
    import torch.distributed as dist

    token = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=device)
    dist.broadcast(token, src=0)
    return f"{int(token.item()):x}"
