"""Pure: whether a worker's last words tell of a mistake of its own, or of a peer, the network or the machine.

It exists because a survivor of a killed peer raises too, often before the dead one is reaped, and must neither be
blamed nor taken for a mistake in the user's script. When in doubt the answer is "not its own": a restart too many
costs a fraction of a second, a job given up wrongly costs the job. Nothing here decides what happens next.
"""

from __future__ import annotations

from elasticd_agent.model.messages import LastWords, WorkerExited

# Class names, without their modules: torch spells some both torch.X and torch._C.X. Subclasses are found by `bases`.
_PEERS = frozenset({
    "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError",
    "DecisionTimeout", "BarrierTimeout",
})  # fmt: skip
"""A peer or the network: torch.distributed's errors, and ours."""
_CONNECTIONS = frozenset({
    "ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError",
    "TimeoutError",
})  # fmt: skip
"""The interpreter's own: of a peer, or of anybody else the script speaks to."""
_MACHINE = frozenset({"OutOfMemoryError", "MemoryError", "AcceleratorError", "KeyboardInterrupt"})
"""The machine, or a person."""
_NOT_OWN_TYPES = _PEERS | _CONNECTIONS | _MACHINE
_RANK_0S = "on rank 0: "
"""How the library tells the others that rank 0 failed at what it does for all; an ElasticdError if rank 0's is none."""

# torch raises plain RuntimeError for these (seen on 2.13): gloo's transport names its C++ file, the others themselves.
_NOT_OWN_TEXTS = (
    "/gloo/", "Connection closed by peer", "Connection reset by peer", "Application timeout caused pair closure",
    "NCCL", "CUDA error", "Timed out",
)  # fmt: skip

# A peer's end of a connection is gone: it has died, or is about to. Spelled as gloo, NCCL and the kernel do.
_ECHO_TYPES = frozenset({"ConnectionResetError", "ConnectionAbortedError", "BrokenPipeError"})
_ECHO_TEXTS = (
    "closed by peer", "reset by peer", "broken pipe", "closed by remote peer", "remote process exited",
    "ncclremoteerror",
)  # fmt: skip

# A first line is cut to so much, unless it names the ranks that were missing: that is what the reader is after.
_LINE, _LINE_OF_NAMES = 160, 480
_NAMING = ("BarrierTimeout", "DecisionTimeout")


def own(words: LastWords | None) -> bool:
    """True if the worker ended by an exception or exit that nothing outside its script explains."""
    if words is None:
        return False
    if words.kind == "exit":
        return True
    if _rank_0s(words):
        return False
    if any(name.rpartition(".")[2] in _NOT_OWN_TYPES for name in (words.type, *words.bases)):
        return False
    return not (words.type == "RuntimeError" and any(text in words.message for text in _NOT_OWN_TEXTS))


def victim(exit: WorkerExited) -> bool:
    """True if the worker raised because of somebody else: it failed, but is not to blame."""
    words = exit.last_words
    return words is not None and words.kind == "exception" and not own(words)


def echo(exit: WorkerExited) -> bool:
    """True if it fell with a peer whose connection ended: that peer's own end, which says why, comes if it has not."""
    words = exit.last_words
    if words is None or not victim(exit):
        return False
    if _rank_0s(words):
        return True
    if any(name.rpartition(".")[2] in _ECHO_TYPES for name in (words.type, *words.bases)):
        return True
    return any(text in words.message.lower() for text in _ECHO_TEXTS)


def fell(exit: WorkerExited) -> str:
    """Why a victim fell, to go after "rank 3": "lost its peers"; "" where another rank need not be the reason."""
    words = exit.last_words
    if words is None:
        return ""
    if _rank_0s(words):
        return "failed with rank 0"
    names = {name.rpartition(".")[2] for name in (words.type, *words.bases)}
    if names & _PEERS:
        return "lost its peers"
    if names & _MACHINE or "CUDA error" in words.message:
        return ""
    return "lost a connection" if names & _CONNECTIONS else "lost its peers"


def raised(words: LastWords) -> str:
    """What a worker that has not ended yet ends by, "raised KeyError: 'x'"; "" if that is somebody else's doing."""
    if words.kind != "exception" or not (own(words) or _machines(words)):
        return ""
    return f"raised {_in_a_line(words)}"


def _machines(words: LastWords) -> bool:
    names = {name.rpartition(".")[2] for name in (words.type, *words.bases)}
    return bool(names & _MACHINE) or (words.type == "RuntimeError" and "CUDA error" in words.message)


def _rank_0s(words: LastWords) -> bool:
    return words.type.rpartition(".")[2] == "ElasticdError" and words.message.startswith(_RANK_0S)


def mistake(exit: WorkerExited) -> str | None:
    """The kind of user's mistake this exit may be a part of, the same on every rank if it is one; else None.

    An exception counts by its type; sys.exit counts with code 2, which is how argparse answers a bad argument.
    """
    words = exit.last_words
    if words is None or exit.status.signal is not None or not own(words):
        return None
    if words.kind == "exit":
        return "SystemExit" if exit.status.code == 2 else None
    return words.type


def said(exit: WorkerExited) -> str:
    """The exit in a few words: "was killed by SIGKILL", "exited with code 1 (ValueError: no such file)"."""
    words = exit.last_words
    if words is None or words.kind == "exit":
        return exit.status.text
    return f"{exit.status.text} ({_in_a_line(words)})"


def _in_a_line(words: LastWords) -> str:
    first_line = words.message.strip().partition("\n")[0]
    text = f"{words.type}: {first_line}" if first_line else words.type
    most = _LINE_OF_NAMES if words.type.rpartition(".")[2] in _NAMING else _LINE
    return text if len(text) <= most else text[: most - 3] + "..."
