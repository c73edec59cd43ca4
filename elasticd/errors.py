"""Every error that elasticd raises on purpose, in one tree.

    ElasticdError
    ├── UsageError              a command, a configuration or a script that cannot work; the command line exits with 2
    │   ├── StoreRefused        the store answered and refused: credentials, TLS, another kind of server
    │   └── MissedCall          a rank cannot come to the session call in which another one waits for it
    ├── WireError               a record from a file, a process or the network that cannot be decoded
    ├── StoreUnavailable        the coordination store did not answer (a lost race is a value, never an error)
    ├── DecisionTimeout         rank 0's decision at a decision point did not arrive in time
    ├── BarrierTimeout          ranks did not reach `session.barrier` in time; names them
    ├── LaunchError             the workers of `elasticd.launch` have failed; holds the rank's traceback
    ├── SamplerError            a use of the elastic batch sampler that would lose or repeat samples
    └── CheckpointError
        ├── CheckpointRefused   the state holds a value that `torch.load(weights_only=True)` would not load; names it
        │   └── StateDiffers    it differs between ranks, of which one alone would be saved
        ├── CheckpointCorrupt   a checkpoint failed its checksum, or its manifest is invalid
        ├── DirectoryInUse      another run holds the checkpoint directory
        └── ObjectStoreError    the object store of the checkpoints refuses, or does not answer; an OSError, too

A message says what happened, where, and what to do about it. RoundChanged is no error, and stands beside the tree.
"""

from __future__ import annotations

from collections.abc import Mapping

Reason = str
"""A sentence that says why something is refused or has failed, "" if it is not and has not."""


class ElasticdError(Exception):
    """Base of every error that elasticd raises on purpose."""


class UsageError(ElasticdError):
    """Something a person typed or configured cannot work; the message says what would."""


class StoreRefused(UsageError):
    """The coordination store answered and refused; a retry will not help."""


class MissedCall(UsageError):
    """A rank waits in a session call for one that has provably passed it: all ranks must make the same calls."""


class WireError(ElasticdError):
    """A record that crossed a process or the network could not be decoded."""


class StoreUnavailable(ElasticdError):
    """The coordination store did not answer in time; the outcome of the request is unknown."""


class DecisionTimeout(ElasticdError):
    """Rank 0's decision at a decision point did not arrive before the deadline."""


class LaunchError(ElasticdError):
    """The job of `elasticd.launch` has failed; the message has the traceback of the rank that failed first.

    `exit_code` is the supervisor's.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class BarrierTimeout(ElasticdError):
    """A barrier ended without all ranks; the message gives the last known status of the missing ones.

    `name` is the barrier's, `missing` the ranks that did not come (none where the store itself did not answer), and
    `waited_s` how long this rank waited.
    """

    def __init__(self, message: str, *, name: str = "", missing: tuple[int, ...] = (), waited_s: float = 0.0) -> None:
        super().__init__(message)
        self.name = name
        self.missing = missing
        self.waited_s = waited_s


class SamplerError(ElasticdError):
    """A use of the sampler that would lose or repeat samples."""


class CheckpointError(ElasticdError):
    """A checkpoint could not be written, read or trusted."""


class CheckpointRefused(CheckpointError):
    """The state holds something that `torch.load(..., weights_only=True)` would refuse, or see StateDiffers."""


class StateDiffers(CheckpointRefused):
    """Something differs between ranks of which rank 0's alone would be saved."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint failed its checksum, or its manifest is missing or invalid."""


class DirectoryInUse(CheckpointError):
    """Another run holds the lock on the checkpoint directory."""

    holder: Mapping[str, str] = {}
    """The job and the run that hold it, where they can be read."""


class ObjectStoreError(CheckpointError, OSError):
    """The object store that holds the checkpoints refuses, or does not answer; or its copy has no room on this node."""


class RoundChanged(BaseException):
    """The ranks of the job change, and this process stays: raised in `train`, and caught by `session.run(train)`.

    No Exception, so that `except Exception` in a script lets it pass.
    """
