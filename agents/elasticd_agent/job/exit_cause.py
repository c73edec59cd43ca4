"""Pure: whether a worker's exit report tells of its own failure, or of a peer, the network or the machine.

A survivor of a killed peer raises too, often before the dead one is reaped, and is neither the root cause nor a user
error. In doubt the failure is not its own: one restart too many costs a fraction of a second, a job that fails wrongly
costs the job.
"""

from __future__ import annotations

from elasticd.heartbeat.exit_report import ExitReport
from elasticd_agent.model.messages import WorkerExited

# Class names without modules: torch has both torch.X and torch._C.X. Subclasses are found by `bases`.
_PEER_ERRORS = frozenset({
    "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError",
    "DecisionTimeout", "BarrierTimeout",
})  # fmt: skip
"""A peer or the network: torch.distributed's errors, and ours."""
_CONNECTION_ERRORS = frozenset({
    "ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError",
    "TimeoutError",
})  # fmt: skip
"""The interpreter's: of a peer, or of another service that the script uses."""
_MACHINE_ERRORS = frozenset({"OutOfMemoryError", "MemoryError", "AcceleratorError", "KeyboardInterrupt"})
"""The machine, or the user."""
_EXTERNAL_TYPES = _PEER_ERRORS | _CONNECTION_ERRORS | _MACHINE_ERRORS
_RANK_0_PREFIX = "on rank 0: "
"""The library's prefix for an error of rank 0 on all other ranks, an ElasticdError unless rank 0's is one."""

# torch raises plain RuntimeError for these (seen on 2.13): gloo's transport names its C++ file, the others themselves.
_EXTERNAL_TEXTS = (
    "/gloo/", "Connection closed by peer", "Connection reset by peer", "Application timeout caused pair closure",
    "NCCL", "CUDA error", "Timed out",
)  # fmt: skip

# A peer has closed its end of a connection: it has died, or is about to. As gloo, NCCL and the kernel spell it.
_CONNECTION_LOST_TYPES = frozenset({"ConnectionResetError", "ConnectionAbortedError", "BrokenPipeError"})
_CONNECTION_LOST_TEXTS = (
    "closed by peer", "reset by peer", "broken pipe", "closed by remote peer", "remote process exited",
    "ncclremoteerror",
)  # fmt: skip

# A first line is cut to this length; one that names missing ranks, to the longer one.
_MAX_LINE, _MAX_LINE_WITH_RANKS = 160, 480
_NAMES_RANKS = ("BarrierTimeout", "DecisionTimeout")


def is_own_failure(words: ExitReport | None) -> bool:
    """True if nothing outside the script explains the exception or exit."""
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
    """True if the worker raised because of another failure."""
    words = exit.exit_report
    return words is not None and words.kind == "exception" and not is_own_failure(words)


def may_be_secondary(exit: WorkerExited) -> bool:
    """True if a peer's connection ended, which may not be reported yet: its own exit names the root cause."""
    words = exit.exit_report
    if words is None or not is_secondary(exit):
        return False
    if _is_rank_0_failure(words):
        return True
    if any(name.rpartition(".")[2] in _CONNECTION_LOST_TYPES for name in (words.type, *words.bases)):
        return True
    return any(text in words.message.lower() for text in _CONNECTION_LOST_TEXTS)


def describe_peer_loss(exit: WorkerExited) -> str:
    """A secondary failure, after "rank 3": "lost its peers"; "" where no other rank need be the cause."""
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
    """The exception of a worker that has not exited yet, "raised KeyError: 'x'"; "" for a secondary failure."""
    if words.kind != "exception" or not (is_own_failure(words) or _is_machine_failure(words)):
        return ""
    return f"raised {_one_line(words)}"


def _is_machine_failure(words: ExitReport) -> bool:
    names = {name.rpartition(".")[2] for name in (words.type, *words.bases)}
    return bool(names & _MACHINE_ERRORS) or (words.type == "RuntimeError" and "CUDA error" in words.message)


def _is_rank_0_failure(words: ExitReport) -> bool:
    return words.type.rpartition(".")[2] == "ElasticdError" and words.message.startswith(_RANK_0_PREFIX)


def user_error(exit: WorkerExited) -> str | None:
    """The kind of user error that this exit may be a part of, which is the same on every rank; otherwise None.

    An exception counts by its type, sys.exit only with code 2, argparse's answer to a bad argument.
    """
    words = exit.exit_report
    if words is None or exit.status.signal is not None or not is_own_failure(words):
        return None
    if words.kind == "exit":
        return "SystemExit" if exit.status.code == 2 else None
    return words.type


def describe_exit(exit: WorkerExited) -> str:
    """ "was killed by SIGKILL", "exited with code 1 (ValueError: no such file)"."""
    words = exit.exit_report
    if words is None or words.kind == "exit":
        return exit.status.text
    return f"{exit.status.text} ({_one_line(words)})"


def _one_line(words: ExitReport) -> str:
    first_line = words.message.strip().partition("\n")[0]
    text = f"{words.type}: {first_line}" if first_line else words.type
    most = _MAX_LINE_WITH_RANKS if words.type.rpartition(".")[2] in _NAMES_RANKS else _MAX_LINE
    return text if len(text) <= most else text[: most - 3] + "..."
