"""Runs a helper: a program that may hang, addressed in JSON lines and ended at a deadline.

A process that hangs in the kernel, in a dead mount or a broken driver, survives SIGKILL. Every wait here is therefore
bounded, and `close` leaves such a helper behind and reports it.

The protocol is one request and its answers, a JSON object a line, over pipes. A helper that ends says so by the end of
its output, whatever the reason. Three things end a wait: a line, the end of the output, and the deadline, or a
descriptor by which the caller gives up. A late answer belongs to no later question, since a helper that was late is
closed and replaced.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from elasticd.channel import Message

CLOSE_S = 2.0
_CHUNK_BYTES = 1 << 16


class HelperError(Exception):
    """The helper gave no answer. The text says why."""


class HelperExited(HelperError):
    """It ended, or closed its output, before it answered."""


class HelperTimeout(HelperError):
    """It did not answer by the deadline."""


class HelperCancelled(HelperError):
    """The caller's `cancel` descriptor became readable first."""


class LineReader:
    """The lines that a helper writes to `fd`. Every deadline is a time on time.monotonic()."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unread = b""

    def next_line(self, deadline: float, cancel: int | None = None) -> bytes:
        """Raises HelperExited at the end, HelperTimeout, or HelperCancelled once `cancel` is readable."""
        while b"\n" not in self._unread:
            _wait_for_fd(self._fd, select.POLLIN, deadline, cancel)
            try:
                data = os.read(self._fd, _CHUNK_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                raise HelperExited("it has ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line


class HelperProcess:
    """One helper, the leader of a session of its own. Only `kill` may be called from another thread."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        keep_errors: bool = False,
    ) -> None:
        """Raises OSError if it cannot be started. `keep_errors`: HelperExited quotes the last line of its stderr."""
        self._errors = os.memfd_create("errors", os.MFD_CLOEXEC) if keep_errors else -1
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors if keep_errors else subprocess.DEVNULL,
                env=env,
                cwd=cwd,
                start_new_session=True,
            )
        except OSError:
            self._close_stderr_file()
            raise
        assert self._process.stdin is not None and self._process.stdout is not None
        self.pid = self._process.pid
        self._input = self._process.stdin
        self._output = self._process.stdout
        os.set_blocking(self._input.fileno(), False)
        self._lines = LineReader(self._output.fileno())

    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: Mapping[str, Any], deadline: float) -> None:
        """Write one line. Raises HelperExited or HelperTimeout."""
        left = memoryview(json.dumps(message).encode() + b"\n")
        while left:
            try:
                left = left[os.write(self._input.fileno(), left) :]
            except BlockingIOError:
                _wait_for_fd(self._input.fileno(), select.POLLOUT, deadline, None)
            except OSError:
                raise HelperExited(self._end_and_explain()) from None

    def receive(self, deadline: float, cancel: int | None = None) -> Message:
        """The next line. Raises HelperError, as HelperCancelled as soon as the descriptor `cancel` is readable."""
        try:
            line = self._lines.next_line(deadline, cancel)
        except HelperExited:
            raise HelperExited(self._end_and_explain()) from None
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            raise HelperError(f"it wrote a line that is not a JSON object: {line[:80]!r}") from None

    def messages(self, deadline: float, cancel: int | None = None) -> Iterator[Message]:
        """Every line up to {"done": true}, which is not one of them. Raises as `receive` does."""
        while not (message := self.receive(deadline, cancel)).get("done"):
            yield message

    def kill(self) -> None:
        """SIGKILL its session. From another thread only while `close` does not run."""
        if self._process.returncode is None:  # a reaped process' id may belong to another one
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self, grace_s: float = 0.0, within_s: float = CLOSE_S) -> str:
        """Close its input, wait for `grace_s`, then kill its session and reap it. Safe to call again.

        Returns "", or a phrase about the process that survives SIGKILL.
        """
        for stream in (self._input, self._output):
            with suppress(OSError):
                stream.close()
        gone = end_process(self._process, grace_s, within_s)
        self._close_stderr_file()
        return "" if gone else f"process {self.pid} survives SIGKILL"

    def _end_and_explain(self) -> str:
        end_process(self._process, within_s=CLOSE_S)
        lines = (
            os.pread(self._errors, _CHUNK_BYTES, 0).decode("utf-8", "replace").split("\n") if self._errors >= 0 else []
        )
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last or f"exit status {self._process.returncode}"

    def _close_stderr_file(self) -> None:
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1


def _wait_for_fd(fd: int, events: int, deadline: float, cancel: int | None) -> None:
    poll = select.poll()  # which takes no descriptor, and any number of them
    poll.register(fd, events)
    if cancel is not None:
        poll.register(cancel, select.POLLIN)
    timeout_ms = None if deadline == math.inf else max(0.0, deadline - time.monotonic()) * 1000
    ready = {fd for fd, _ in poll.poll(timeout_ms)}
    if cancel in ready:
        raise HelperCancelled("cancelled")
    if not ready:
        raise HelperTimeout("it did not answer in time")


def end_process(process: subprocess.Popen[bytes], grace_s: float = 0.0, within_s: float = CLOSE_S) -> bool:
    """Wait `grace_s` for a process that leads a session, then kill the session and reap what died of it.

    False if the process itself has not died within `within_s` of SIGKILL.
    """
    if process.returncode is not None:
        return True
    if grace_s > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    # A reaped leader's id names its session for as long as a member is left, and may be given away after that.
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + within_s
    with suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    with suppress(ChildProcessError):  # a subreaper adopts what the process had started
        while time.monotonic() < deadline and os.waitpid(-process.pid, os.WNOHANG) is not None:
            time.sleep(0.002)
    return process.returncode is not None
