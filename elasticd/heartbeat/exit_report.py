"""How a script ended, as far as python could see, said in its beat by its last exit handler.

It exists so that the agent can tell a script's own mistake from what a dying peer did to it. No hook is replaced: the
script cannot tell. It never raises into the script's exit, and says nothing of ends that python does not live to see.
Like record.py it is also loaded by file, where elasticd is not installed: it imports the standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import traceback
from dataclasses import dataclass
from typing import Protocol

_MESSAGE_CHARACTERS, _BASES = 1000, 8


@dataclass(frozen=True, slots=True)
class ExitReport:
    """What ended the script, as far as python could see; believe an "exception" only beside a non-zero exit code.

    `kind` "exception": it went unhandled; `bases` names its type's base classes, nearest first. "exit": python ended in
    order, so by no os._exit and no signal; with which exit code is the agent's to know.
    """

    kind: str
    type: str = ""
    message: str = ""
    traceback: str = ""
    code: int | None = None
    bases: tuple[str, ...] = ()


class ExitReportSink(Protocol):
    """Where last words go: a BeatWriter."""

    def write_exit_report(self, words: ExitReport) -> None: ...


def install_last_words(writer: ExitReportSink) -> None:
    """Have the way this process ends written to its beat.

    Call it before anybody else registers an exit handler: the first registered runs last. Python keeps the unhandled
    exception in `sys.last_*`, so no hook is replaced and the script cannot tell. SystemExit leaves no trace there: then
    "exit" is written, with no code, and means that python went down in order.
    """
    atexit.register(_say_last_words, writer)


def _say_last_words(writer: ExitReportSink) -> None:
    # Whatever goes wrong here would be printed as the script's own failure.
    with contextlib.suppress(Exception):
        if not report_exception(writer):
            writer.write_exit_report(ExitReport("exit"))


def report_exception(writer: ExitReportSink) -> bool:
    """Write down the exception that has ended the script, if one has; True then. It may be said more than once."""
    with contextlib.suppress(Exception):
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if not isinstance(error, BaseException):
            return False
        name, *bases = (_name_of(base) for base in type(error).__mro__[:-1])
        lines = traceback.TracebackException(type(error), error, error.__traceback__)
        # "Type: message", with python's own words for a message that cannot be printed.
        message = "".join(lines.format_exception_only()).partition(": ")[2].rstrip("\n")
        writer.write_exit_report(ExitReport("exception", name, message, "".join(lines.format()), bases=tuple(bases)))
    return True


def _name_of(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def encode(words: ExitReport, room: int) -> bytes:
    """`words` as JSON of at most `room` bytes; of the traceback the end is kept."""
    name, message = words.type[:_MESSAGE_CHARACTERS], words.message[:_MESSAGE_CHARACTERS]
    fields = {"kind": words.kind, "type": name, "message": message, "code": words.code}
    bases = [base[:_MESSAGE_CHARACTERS] for base in words.bases[:_BASES]]
    text = words.traceback[-room:]
    while True:
        data = json.dumps({**fields, "bases": bases, "traceback": text}, ensure_ascii=False).encode("utf-8", "replace")
        if len(data) <= room:
            return data
        if not text:
            bases.pop()
        text = text[len(text) // 8 + 1 :]


def decode(data: bytes) -> ExitReport:
    """What `encode` made. Raises ValueError, KeyError or TypeError for anything else."""
    found = json.loads(data)
    kind, name, message, text = (found[key] for key in ("kind", "type", "message", "traceback"))
    code, bases = found["code"], found.get("bases", [])
    if not all(isinstance(each, str) for each in (kind, name, message, text, *bases)):
        raise TypeError("a field is not a text")
    if not isinstance(code, int | None):
        raise TypeError("the code is not a number")
    return ExitReport(kind, name, message, text, code, tuple(bases))
