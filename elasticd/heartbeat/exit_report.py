"""The end of a script, as far as Python could see it: the script's last exit handler writes it into the heartbeat.

With it the agent tells a user error from a failure caused by a dead peer. No hook of the script is replaced, and
nothing is raised into its exit. An end by a signal or os._exit leaves no report.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import traceback
from dataclasses import dataclass
from typing import Protocol

CONNECTION_LOST_PHRASES = ("closed by peer", "reset by peer", "broken pipe", "recv, got 0 bytes", "send, sent 0 bytes")
"""Words of gloo, torch's store and the kernel, in lower case: the process at the other end is gone."""
_MISSED_RANKS_ERRORS = tuple(f"elasticd.errors.{name}" for name in ("MissedCall", "DecisionTimeout", "BarrierTimeout"))
"""The errors of a session call for ranks that do not come; by name: the launcher and the script each import theirs."""
_MAX_MESSAGE_CHARACTERS = 1000
_MAX_BASES = 8


@dataclass(frozen=True, slots=True)
class ExitReport:
    """The cause of the script's end; an "exception" counts only together with a non-zero exit code."""

    kind: str  #: "exception": it was not handled. "exit": Python ended in order, so not by os._exit or a signal.
    type: str = ""
    message: str = ""
    traceback: str = ""
    code: int | None = None
    bases: tuple[str, ...] = ()  #: the base classes of the exception's type, nearest first


class ExitReportSink(Protocol):
    """The receiver of exit reports: a HeartbeatWriter."""

    def write_exit_report(self, report: ExitReport) -> None: ...


def install_exit_report(writer: ExitReportSink) -> None:
    """Report the end of this process in its heartbeat. Call it first: the first exit handler registered runs last."""
    # Python keeps the unhandled exception in sys.last_*, so no hook is replaced; SystemExit leaves no trace there.
    atexit.register(_report_exit, writer)


def _report_exit(writer: ExitReportSink) -> None:
    # An exception here would be printed as the script's own failure.
    with contextlib.suppress(Exception):
        if not report_exception(writer):
            writer.write_exit_report(ExitReport("exit"))


def report_exception(writer: ExitReportSink) -> bool:
    """Report the exception that has ended the script; False if there is none. It may be called more than once."""
    with contextlib.suppress(Exception):
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if not isinstance(error, BaseException):
            return False
        writer.write_exit_report(report_of(error))
    return True


def report_of(error: BaseException) -> ExitReport:
    """The report of a script that ends by this exception."""
    cause = _cause_of(error)
    name, *bases = (_name_of(base) for base in type(cause).__mro__[:-1])
    lines = traceback.TracebackException(type(cause), cause, None)
    # "Type: message", with Python's own text for a message that cannot be printed.
    message = "".join(lines.format_exception_only()).partition(": ")[2].rstrip("\n")
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return ExitReport("exception", name, message, text, bases=tuple(bases))


def _cause_of(error: BaseException) -> BaseException:
    """The exception by which a rank leaves its script, where it has then waited in vain for others which train on: in
    `save()` or `barrier()` of a `finally`.
    """
    while _name_of(type(error)) in _MISSED_RANKS_ERRORS and error.__context__ is not None:
        error = error.__context__
    return error


def _name_of(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def encode(report: ExitReport, max_bytes: int) -> bytes:
    """The report as JSON of at most `max_bytes`; the end of the traceback is kept."""
    name, message = report.type[:_MAX_MESSAGE_CHARACTERS], report.message[:_MAX_MESSAGE_CHARACTERS]
    fields = {"kind": report.kind, "type": name, "message": message, "code": report.code}
    bases = [base[:_MAX_MESSAGE_CHARACTERS] for base in report.bases[:_MAX_BASES]]
    text = report.traceback[-max_bytes:]
    while True:
        data = json.dumps({**fields, "bases": bases, "traceback": text}, ensure_ascii=False).encode("utf-8", "replace")
        if len(data) <= max_bytes:
            return data
        if not text:
            bases.pop()
        text = text[len(text) // 8 + 1 :]


def decode(data: bytes) -> ExitReport:
    """The inverse of `encode`. Raises ValueError, KeyError or TypeError for anything else."""
    fields = json.loads(data)
    kind, name, message, text = (fields[key] for key in ("kind", "type", "message", "traceback"))
    code, bases = fields["code"], fields.get("bases", [])
    if not all(isinstance(field, str) for field in (kind, name, message, text, *bases)):
        raise TypeError("a field is not a string")
    if not isinstance(code, int | None):
        raise TypeError("the code is not a number")
    return ExitReport(kind, name, message, text, code, tuple(bases))
