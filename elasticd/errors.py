"""Every error elasticd raises on purpose, in one tree.

    ElasticdError
    ├── UsageError              something the user typed or configured; the command line answers with exit code 2
    │   └── StoreRefused        the store answered, and will not have us: credentials, TLS, not that kind of server
    ├── WireError               a record from a file, a process or the network that cannot be understood
    ├── StoreUnavailable        the coordination store did not answer (a lost race is a value, never an error)
    ├── DecisionTimeout         rank 0's verdict at a decision point did not arrive in time
    ├── BarrierTimeout          ranks did not come to `session.barrier` in time; names them
    ├── SamplerError            the elastic batch sampler was used in a way that would lose or repeat samples
    └── CheckpointError
        ├── CheckpointRefused   the state holds something `torch.load(weights_only=True)` would not load; names the key
        ├── CheckpointCorrupt   a checkpoint failed its checksum or its manifest makes no sense
        └── DirectoryInUse      another run holds the checkpoint directory

A message says what happened, where, and what to do about it.
"""

from __future__ import annotations


class ElasticdError(Exception):
    """Base of every error elasticd raises on purpose."""


class UsageError(ElasticdError):
    """Something the user typed or configured cannot work; the message says what would."""


class StoreRefused(UsageError):
    """The coordination store answered and refused; trying again will not help."""


class WireError(ElasticdError):
    """A record that crossed a process or the network could not be understood."""


class StoreUnavailable(ElasticdError):
    """The coordination store did not answer in time; nothing is known about the outcome of the request."""


class DecisionTimeout(ElasticdError):
    """Rank 0's verdict at a decision point did not arrive before the deadline."""


class BarrierTimeout(ElasticdError):
    """A barrier ended without all ranks; the message says where the missing ones are, as they last said.

    `name` is the barrier's. `missing` holds the ranks that had not come, and is empty where the round's store itself
    did not answer. `waited_s`: how long this rank waited.
    """

    def __init__(self, message: str, *, name: str = "", missing: tuple[int, ...] = (), waited_s: float = 0.0) -> None:
        super().__init__(message)
        self.name, self.missing, self.waited_s = name, missing, waited_s


class SamplerError(ElasticdError):
    """The sampler was used in a way that would lose or repeat samples."""


class CheckpointError(ElasticdError):
    """A checkpoint could not be written, read or trusted."""


class CheckpointRefused(CheckpointError):
    """The state holds something that `torch.load(..., weights_only=True)` would refuse to load."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint failed its checksum, or its manifest is missing or makes no sense."""


class DirectoryInUse(CheckpointError):
    """Another run holds the lock on the checkpoint directory."""
