"""Pure: whether a worker's exit report tells of its own failure, or of a peer, the network or the machine.

A survivor of a killed peer raises too, often before the dead one is reaped, and is neither the root cause nor a user
error. In doubt the failure is not its own: one restart too many costs a fraction of a second, a job that fails wrongly
costs the job.

The evidence is the exception's type with its bases, its text, and the frames of its traceback, in this order of trust.
Types are compared by name, because a report comes from another process that may have another torch. Texts are those
that gloo, NCCL, CUDA and the kernel print; each of them was seen, and a text that is not known counts as the script's
own only where the type says so. An exception that the script raised while it handled another one is judged by the whole
chain: the first in it may be the loss of a peer.
"""

from __future__ import annotations

import builtins
import re

from elasticd.heartbeat.exit_report import CONNECTION_LOST_PHRASES, ExitReport
from elasticd_agent.model.messages import WorkerExited
from elasticd_agent.model.phrases import shortened

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

_PROGRAM_ERRORS = frozenset({"SyntaxError", "NameError"})
"""An interpreter's verdict on the source, which is the same at every start."""
_SERVICE_PACKAGES = frozenset({
    "aiohttp", "botocore", "google", "grpc", "http", "httpcore", "httpx", "huggingface_hub", "requests", "subprocess",
    "urllib", "urllib3",
})  # fmt: skip
"""Packages whose exceptions tell of a service, a network or another program."""
_ENVIRONMENT_TEXTS = (
    "CUDA driver", "CUDA initialization", "CUDA unknown error", "NVIDIA driver", "No CUDA GPUs", "No HIP GPUs",
    "HIP error", "cudaGetDeviceCount", "cuDNN error", "DataLoader worker", "cannot open shared object file",
)  # fmt: skip
"""Texts of a RuntimeError or ImportError: a device that does not start, a killed helper process, a missing mount."""
_KEYED_BY_TYPE = frozenset({"OutOfMemoryError", "MissedCall", "CheckpointRefused", "StateDiffers"})
_RAISED_TYPES = re.compile(r"^([\w.]+)(?=:|$)", re.MULTILINE)
"""The type of each exception of the chain in a traceback."""
_OF_ONE_PROCESS = re.compile(r"\b0x[0-9a-fA-F]+|(?<=\bpid )\d+|(?<=\bpid\(s\) )[\d, ]+")
"""An object's address, as `object.__repr__` shows it, and pids, as torch's DataLoader does: others in each round."""
_FRAME_FILE = re.compile(r'^  File "([^<"][^"]*)"', re.MULTILINE)
_OUTSIDE_SIGNALS = frozenset({2, 9, 15})  # SIGINT, SIGKILL, SIGTERM
_LIBRARY_PATHS = ("/site-packages/", "/dist-packages/", "/lib/python3")

# A peer has closed its end of a connection: it has died, or is about to. As gloo, NCCL and the kernel spell it.
_CONNECTION_LOST_TYPES = frozenset({"ConnectionResetError", "ConnectionAbortedError", "BrokenPipeError"})
_CONNECTION_LOST_TEXTS = (*CONNECTION_LOST_PHRASES, "closed by remote peer", "remote process exited", "ncclremoteerror")

# A first line is cut to this length; one that names missing ranks, to the longer one.
_MAX_LINE, _MAX_LINE_WITH_RANKS = 160, 480
_TRACEBACK_HEAD = "Traceback (most recent call last):"
_TYPES_NAMING_RANKS = ("BarrierTimeout", "DecisionTimeout")


def is_own_failure(report: ExitReport | None) -> bool:
    """True if nothing outside the script explains the exception or exit."""
    if report is None:
        return False
    if report.kind == "exit":
        return True
    if _is_rank_0_failure(report):
        return False
    if any(name.rpartition(".")[2] in _EXTERNAL_TYPES for name in (report.type, *report.bases)):
        return False
    return not (report.type == "RuntimeError" and any(text in report.message for text in _EXTERNAL_TEXTS))


def has_external_cause(exit: WorkerExited) -> bool:
    """True if the worker raised because of a peer, the network or the machine."""
    report = exit.exit_report
    return report is not None and report.kind == "exception" and not is_own_failure(report)


def follows_peer_failure(exit: WorkerExited) -> bool:
    """True if a peer's connection ended, which may not be reported yet: its own exit names the root cause."""
    report = exit.exit_report
    if report is None or not has_external_cause(exit):
        return False
    if _is_rank_0_failure(report):
        return True
    if any(name.rpartition(".")[2] in _CONNECTION_LOST_TYPES for name in (report.type, *report.bases)):
        return True
    return any(text in report.message.lower() for text in _CONNECTION_LOST_TEXTS)


def describe_peer_loss(exit: WorkerExited) -> str:
    """A secondary failure, after "rank 3": "lost its peers"; "" where no other rank need be the cause."""
    report = exit.exit_report
    if report is None:
        return ""
    if _is_rank_0_failure(report):
        return "failed with rank 0"
    names = {name.rpartition(".")[2] for name in (report.type, *report.bases)}
    if names & _PEER_ERRORS:
        return "lost its peers"
    if names & _MACHINE_ERRORS or "CUDA error" in report.message:
        return ""
    return "lost a connection" if names & _CONNECTION_ERRORS else "lost its peers"


def describe_primary_exception(report: ExitReport) -> str:
    """The exception of a worker that has not exited yet, "raised KeyError: 'x'"; "" for a secondary failure."""
    if report.kind != "exception" or not (is_own_failure(report) or _is_machine_failure(report)):
        return ""
    return f"raised {_one_line(report)}"


def _is_machine_failure(report: ExitReport) -> bool:
    names = {name.rpartition(".")[2] for name in (report.type, *report.bases)}
    return bool(names & _MACHINE_ERRORS) or (report.type == "RuntimeError" and "CUDA error" in report.message)


def _is_rank_0_failure(report: ExitReport) -> bool:
    return report.type.rpartition(".")[2] == "ElasticdError" and report.message.startswith(_RANK_0_PREFIX)


def shareable_error(exit: WorkerExited) -> str | None:
    """The error, by its type, that all ranks of the script may share; None where it is not the script's.

    sys.exit counts only with code 2, argparse's answer to a bad argument. A process that has stayed may raise what a
    new one does not, where its script does for a second time what can be done once.
    """
    report = exit.exit_report
    if report is None or exit.stayed or exit.status.signal is not None or not is_own_failure(report):
        return None
    if report.kind == "exit":
        return "SystemExit" if exit.status.code == 2 else None
    return report.type if _is_user_error(report) or not _is_environment_error(report) else None


def is_user_error(exit: WorkerExited) -> bool:
    """True if every start of this program raises this `shareable_error`."""
    return exit.exit_report is not None and (exit.exit_report.kind == "exit" or _is_user_error(exit.exit_report))


def repeat_key(exit: WorkerExited, *, shared: bool) -> str:
    """Equal for two exits, of two rounds, with the same error; "" where the worker was killed from outside.

    `shared`: all ranks of the node raised the same.
    """
    report = exit.exit_report
    # Their messages differ: sizes and pids, the time that a rank has waited, which rank reports it.
    if report is not None and report.type.rpartition(".")[2] in _KEYED_BY_TYPE:
        return report.type
    if has_external_cause(exit) or (exit.status.signal in _OUTSIDE_SIGNALS and not exit.status.out_of_memory):
        return ""
    described = _OF_ONE_PROCESS.sub("…", describe_exit(exit))
    return described if shared else f"a rank {described}"  # of ranks that end alike any may be the first


def _is_user_error(report: ExitReport) -> bool:
    """SyntaxError, NameError, or a module that the script's own files import and that is not there."""
    names = {report.type, *report.bases}
    if names & _PROGRAM_ERRORS:
        return True
    missing = "ImportError" in names and report.message.startswith("cannot import name")
    files = _FRAME_FILE.findall(report.traceback)
    own = not files or not any(part in files[-1] for part in _LIBRARY_PATHS)
    return own and (missing or "ModuleNotFoundError" in names)


def _is_environment_error(report: ExitReport) -> bool:
    """Files, devices, services and networks may be there at the next start: theirs, or raised in their consequence."""
    names = {report.type, *report.bases, *_RAISED_TYPES.findall(report.traceback)}
    return (
        any(_is_os_error(name) or name.partition(".")[0] in _SERVICE_PACKAGES for name in names)
        or "EOFError" in names
        or (
            bool(names & {"RuntimeError", "ImportError"}) and any(text in report.message for text in _ENVIRONMENT_TEXTS)
        )
    )


def _first_sentence(report: ExitReport) -> str:
    """The first line of the message, with the one that it announces: torch's "Error(s) in loading state_dict:" the next
    one, "Caught ValueError in DataLoader worker" the last one, below the traceback of the other process.
    """
    first, *others = report.message.strip().splitlines() or [""]
    if others and first.endswith(":"):
        return f"{first} {others[0].strip()}"
    if any(line.endswith(_TRACEBACK_HEAD) for line in others):
        return f"{first} {(report.traceback or report.message).rstrip().splitlines()[-1].strip()}"
    return first


def _is_os_error(name: str) -> bool:
    builtin = getattr(builtins, name, None)
    return isinstance(builtin, type) and issubclass(builtin, OSError)


def describe_exit(exit: WorkerExited) -> str:
    """ "was killed by SIGKILL", "exited with code 1 (ValueError: no such file)"."""
    report = exit.exit_report
    if report is None or report.kind == "exit":
        return exit.status.text
    return f"raised {_one_line(report)}" if exit.still_runs else f"{exit.status.text} ({_one_line(report)})"


def _one_line(report: ExitReport) -> str:
    text = ": ".join(filter(None, (report.type, _first_sentence(report))))
    limit = _MAX_LINE_WITH_RANKS if report.type.rpartition(".")[2] in _TYPES_NAMING_RANKS else _MAX_LINE
    return shortened(text, limit)
