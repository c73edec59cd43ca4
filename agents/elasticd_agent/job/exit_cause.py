"""Pure: whether a worker's last words tell of a mistake of its own, or of a peer, the network or the machine.

It exists because a survivor of a killed peer raises too, often before the dead one is reaped, and must neither be
blamed nor taken for a mistake in the user's script. When in doubt the answer is "not its own": a restart too many
costs a fraction of a second, a job given up wrongly costs the job. Nothing here decides what happens next.
"""

from __future__ import annotations

from elasticd.heartbeat.exit_report import ExitReport
from elasticd_agent.model.messages import WorkerExited

# Class names, without their modules: torch spells some both torch.X and torch._C.X. Subclasses are found by `bases`.
_PEER_ERRORS = frozenset({
    "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError",
    "DecisionTimeout", "BarrierTimeout",
})  # fmt: skip
"""A peer or the network: torch.distributed's errors, and ours."""
_CONNECTION_ERRORS = frozenset({
    "ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError",
    "TimeoutError",
})  # fmt: skip
"""The interpreter's own: of a peer, or of anybody else the script speaks to."""
_MACHINE_ERRORS = frozenset({"OutOfMemoryError", "MemoryError", "AcceleratorError", "KeyboardInterrupt"})
"""The machine, or a person."""
_EXTERNAL_TYPES = _PEER_ERRORS | _CONNECTION_ERRORS | _MACHINE_ERRORS
_RANK_0_PREFIX = "on rank 0: "
"""How the library tells the others that rank 0 failed at what it does for all; an ElasticdError if rank 0's is none."""

# torch raises plain RuntimeError for these (seen on 2.13): gloo's transport names its C++ file, the others themselves.
_EXTERNAL_TEXTS = (
    "/gloo/", "Connection closed by peer", "Connection reset by peer", "Application timeout caused pair closure",
    "NCCL", "CUDA error", "Timed out",
)  # fmt: skip

# A peer's end of a connection is gone: it has died, or is about to. Spelled as gloo, NCCL and the kernel do.
_CONNECTION_LOST_TYPES = frozenset({"ConnectionResetError", "ConnectionAbortedError", "BrokenPipeError"})
_CONNECTION_LOST_TEXTS = (
    "closed by peer", "reset by peer", "broken pipe", "closed by remote peer", "remote process exited",
    "ncclremoteerror",
)  # fmt: skip

# A first line is cut to so much, unless it names the ranks that were missing: that is what the reader is after.
_MAX_LINE, _MAX_LINE_WITH_RANKS = 160, 480
_NAMES_RANKS = ("BarrierTimeout", "DecisionTimeout")


def is_own_failure(words: ExitReport | None) -> bool:
    """True if the worker ended by an exception or exit that nothing outside its script explains."""
    if words is None:
        return False
    if words.kind == "exit":
        return True
    if _is_rank_0_failure(words):
        return False
    if any(name.rpartition(".")[2] in _EXTERNAL_TYPES for name in (words.type, *words.bases)):
        return False
    return not (words.type == "RuntimeError" and any(text in words.message for text in _EXTERNAL_TEXTS))


def is_secondary(exit: WorkerExited) -> bool:
    """True if the worker raised because of somebody else: it failed, but is not to blame."""
    words = exit.exit_report
    return words is not None and words.kind == "exception" and not is_own_failure(words)


def may_be_secondary(exit: WorkerExited) -> bool:
    """True if it fell with a peer whose connection ended: that peer's own end, which says why, comes if it has not."""
    words = exit.exit_report
    if words is None or not is_secondary(exit):
        return False
    if _is_rank_0_failure(words):
        return True
    if any(name.rpartition(".")[2] in _CONNECTION_LOST_TYPES for name in (words.type, *words.bases)):
        return True
    return any(text in words.message.lower() for text in _CONNECTION_LOST_TEXTS)


def describe_peer_loss(exit: WorkerExited) -> str:
    """Why a victim fell, to go after "rank 3": "lost its peers"; "" where another rank need not be the reason."""
    words = exit.exit_report
    if words is None:
        return ""
    if _is_rank_0_failure(words):
        return "failed with rank 0"
    names = {name.rpartition(".")[2] for name in (words.type, *words.bases)}
    if names & _PEER_ERRORS:
        return "lost its peers"
    if names & _MACHINE_ERRORS or "CUDA error" in words.message:
        return ""
    return "lost a connection" if names & _CONNECTION_ERRORS else "lost its peers"


def describe_exception(words: ExitReport) -> str:
    """What a worker that has not ended yet ends by, "raised KeyError: 'x'"; "" if that is somebody else's doing."""
    if words.kind != "exception" or not (is_own_failure(words) or _is_machine_failure(words)):
        return ""
    return f"raised {_one_line(words)}"


def _is_machine_failure(words: ExitReport) -> bool:
    names = {name.rpartition(".")[2] for name in (words.type, *words.bases)}
    return bool(names & _MACHINE_ERRORS) or (words.type == "RuntimeError" and "CUDA error" in words.message)


def _is_rank_0_failure(words: ExitReport) -> bool:
    return words.type.rpartition(".")[2] == "ElasticdError" and words.message.startswith(_RANK_0_PREFIX)


def user_error(exit: WorkerExited) -> str | None:
    """The kind of user's mistake this exit may be a part of, the same on every rank if it is one; else None.

    An exception counts by its type; sys.exit counts with code 2, which is how argparse answers a bad argument.
    """
    words = exit.exit_report
    if words is None or exit.status.signal is not None or not is_own_failure(words):
        return None
    if words.kind == "exit":
        return "SystemExit" if exit.status.code == 2 else None
    return words.type


def describe_exit(exit: WorkerExited) -> str:
    """The exit in a few words: "was killed by SIGKILL", "exited with code 1 (ValueError: no such file)"."""
    words = exit.exit_report
    if words is None or words.kind == "exit":
        return exit.status.text
    return f"{exit.status.text} ({_one_line(words)})"


def _one_line(words: ExitReport) -> str:
    first_line = words.message.strip().partition("\n")[0]
    text = f"{words.type}: {first_line}" if first_line else words.type
    most = _MAX_LINE_WITH_RANKS if words.type.rpartition(".")[2] in _NAMES_RANKS else _MAX_LINE
    return text if len(text) <= most else text[: most - 3] + "..."
