"""A process for one look: directories and plugins, each in a process of its own that may take its time and no longer.

It runs as `python -S -m`, is told what to look at by one line on its standard input, says each reading on a line as
soon as it is there, and ends everything it started when it ends itself or its standard input does. It is the parent of
whatever its children leave behind (PR_SET_CHILD_SUBREAPER), so that a plugin cannot fill the machine with processes.
One thread, so that it may fork. It judges nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

from elasticd_agent.node.health import directories
from elasticd_agent.node.health.result import Reading, bad, good, skipped
from elasticd_agent.system.procfs import read, stat
from elasticd_agent.workers.launcher.reaping import signal_name

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MOST_OUTPUT = 1 << 20
KEPT = 4096
LONGEST_REASON = 200
DIES_S = 1.0
"""How long after SIGKILL a process may take; one that hangs in the kernel takes for ever and is left."""
CANNOT_RUN = 125
"""The exit code of a child that could not become the plugin; a plugin that exits so has said so itself."""


@dataclass
class Child:
    check: str
    pid: int
    fd: int
    began: float
    until: float
    read: Callable[[Child, int], Reading]
    said: bytearray = field(default_factory=bytearray)
    count: int = 0
    killed: str = ""  # why


class Examiner:
    """`look` is called once."""

    def __init__(self, say: Callable[[dict[str, Any]], None], leave: int) -> None:
        """`leave`: an fd that becomes readable when nobody wants an answer any more."""
        self._say = say
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Child] = {}
        self._left = False
        awake, wake = socket.socketpair()
        for end in (awake, wake):
            end.setblocking(False)
        self._awake, self._wake = awake, wake
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(awake, selectors.EVENT_READ)
        self._selector.register(leave, selectors.EVENT_READ)
        self._leave = leave

    def look(self, asked: dict[str, Any]) -> None:
        waiting = [self._directory(one, asked) for one in asked["directories"]]
        waiting += [self._plugin(one, asked) for one in asked["plugins"]]
        waiting.reverse()
        while (waiting or self._children) and not self._left:
            while waiting and len(self._children) < asked["at_once"]:
                waiting.pop()()
            self._turn()
        self._sweep()

    # ---- starting

    def _directory(self, one: dict[str, Any], asked: dict[str, Any]) -> Callable[[], None]:
        def ask() -> None:
            found = directories.look(one["check"], one["path"], one["free_min_bytes"], one["made"])
            os.write(1, json.dumps(asdict(found)).encode())
            os._exit(0)

        return lambda: self._start(one["check"], asked["directory_s"], ask, _of_directory)

    def _plugin(self, one: dict[str, Any], asked: dict[str, Any]) -> Callable[[], None]:
        def become() -> None:
            try:
                os.execve(one["path"], [one["path"]], asked["environment"])
            except OSError as error:
                os.write(1, f"{one['path']} cannot be executed: {error.strerror}".encode())
            os._exit(CANNOT_RUN)

        return lambda: self._start(one["check"], asked["plugin_s"], become, _of_plugin)

    def _start(
        self, check: str, within_s: float, act: Callable[[], None], read: Callable[[Child, int], Reading]
    ) -> None:
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        us = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_a_child(us, theirs, act)
        os.close(theirs)
        now = time.monotonic()
        self._children[pid] = Child(check, pid, ours, now, now + within_s, read)
        self._selector.register(ours, selectors.EVENT_READ, self._children[pid])

    # ---- waiting

    def _turn(self) -> None:
        until = min(child.until for child in self._children.values())
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            if key.fd == self._leave:
                self._left = True
            elif key.data is not None:
                self._listen(key.data)
        self._awake_again()
        self._reap()
        now = time.monotonic()
        for child in list(self._children.values()):
            if now >= child.until:
                self._late(child)

    def _awake_again(self) -> None:
        try:
            while self._awake.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _listen(self, child: Child) -> None:
        try:
            data = os.read(child.fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(child.fd)
            return
        child.count += len(data)
        child.said += data[: KEPT - len(child.said)]
        if child.count > MOST_OUTPUT and not child.killed:
            self._kill(child, f"it wrote more than {MOST_OUTPUT >> 20} MiB; the first line is what counts")

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is not None:
                self._listen_to_the_end(child)
                self._ended(child, child.read(child, status))

    def _listen_to_the_end(self, child: Child) -> None:
        if child.fd in self._selector.get_map():
            self._listen(child)
        if child.fd in self._selector.get_map():
            self._selector.unregister(child.fd)
        os.close(child.fd)

    def _late(self, child: Child) -> None:
        if not child.killed:
            self._kill(child, f"it has not answered within {child.until - child.began:g} s")
            return
        del self._children[child.pid]
        self._listen_to_the_end(child)
        process = stat(child.pid)
        state = process.state if process is not None else "?"
        where = read(f"/proc/{child.pid}/wchan").decode("ascii", "replace")
        why = (
            f"{child.killed}; process {child.pid} does not die of SIGKILL (state {state}{' in ' * bool(where)}{where})"
        )
        self._ended(child, bad(child.check, why))
        started = process.started if process is not None else 0
        self._say({"stuck": {"check": child.check, "pid": child.pid, "started": started}})

    def _kill(self, child: Child, why: str) -> None:
        child.killed = why
        child.until = time.monotonic() + DIES_S
        _kill_group(child.pid)
        _kill(child.pid)

    def _ended(self, child: Child, found: Reading) -> None:
        took_s = time.monotonic() - child.began
        self._say({"reading": asdict(replace(found, seconds=took_s))})

    def _sweep(self) -> None:
        """Nobody whom we started, or who became ours, outlives us, but for those who cannot die."""
        until = time.monotonic() + DIES_S
        while True:
            for child in read(f"/proc/self/task/{os.getpid()}/children", 1 << 20).split():
                _kill_group(int(child))
                _kill(int(child))
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            if time.monotonic() >= until:
                return
            self._selector.select(0.01)
            self._awake_again()


def _be_a_child(parent: int, out: int, act: Callable[[], None]) -> NoReturn:
    """It must hold nothing of ours open: whoever waits for our end would wait for one that hangs, too."""
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(CANNOT_RUN)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.set_blocking(out, True)
        os.dup2(nothing, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir("/")
        act()
    except BaseException as error:  # noqa: BLE001  whatever it is, this child must not go on as its parent
        os.write(1, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
    os._exit(CANNOT_RUN)


def _of_directory(child: Child, status: int) -> Reading:
    if child.killed:
        return bad(child.check, f"{child.killed}: is it a mount whose server is gone?")
    try:
        found = json.loads(child.said)
        return Reading(found["check"], found["outcome"], found["why"])
    except (ValueError, KeyError, TypeError):
        return skipped(child.check, f"it could not be looked at: {first_line(bytes(child.said)) or _ending(status)}")


def _of_plugin(child: Child, status: int) -> Reading:
    reason = first_line(bytes(child.said))
    if child.killed:
        return bad(child.check, child.killed)
    if os.WIFSIGNALED(status):
        return bad(child.check, f"{_ending(status)}{': ' * bool(reason)}{reason}")
    code = os.WEXITSTATUS(status)
    if code == CANNOT_RUN and "cannot be executed" in reason:
        return skipped(child.check, reason)
    if code:
        return bad(child.check, reason or f"it exited with {code} and said nothing")
    return good(child.check, reason or "exit code 0")


def first_line(output: bytes) -> str:
    """What a person may be shown of it: one line, nothing a terminal would obey."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    text = "".join(letter if letter.isprintable() else "·" for letter in (lines[0].strip() if lines else ""))
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"it was ended by {signal_name(os.WTERMSIG(status))}"
    return f"it exited with {os.WEXITSTATUS(status)}"


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it leads no group yet, or any more
        pass


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line:
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def say(message: dict[str, Any]) -> None:
        os.write(1, json.dumps(message).encode() + b"\n")

    Examiner(say, sys.stdin.fileno()).look(json.loads(line))
    say({"done": True})


if __name__ == "__main__":
    main()
