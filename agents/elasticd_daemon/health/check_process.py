"""A process for one run of checks: directories and plugins, each in a child process with a deadline.

It runs as `python -S -m`, reads the request as one line from standard input, writes each result as a line as soon as it
has it, and kills everything it started when its standard input ends. It is the subreaper of its children's children
(PR_SET_CHILD_SUBREAPER), so that a plugin cannot leave processes behind. One thread, so that it may fork.

A check may hang where no signal reaches it: a `stat` on a mount whose server is gone sleeps in the kernel. So each
check has a process of its own, and the run goes past it. After its deadline the child is killed; if it survives that,
its check has failed with the state and the kernel function in which the child sleeps, and the agent gets
its pid, so that the check is not started again on top of it.

What a child writes is foreign: at most `KEPT_OUTPUT_BYTES` of it are kept, one printable line of that is shown, and a
child that writes without end is killed. Results are sent one by one, so an agent that stops waiting still has those of
the checks that were quick.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

from elasticd_agent.model.phrases import shortened
from elasticd_agent.system.processes.process import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    STRAY_SIGNALS,
    children,
    describe_wait_status,
    handle_signals_unless_ignored,
    ignore_signal,
    prctl,
    reap_children,
)
from elasticd_agent.system.processes.procfs import read, stat
from elasticd_daemon.health import directories, network_ports
from elasticd_daemon.health.result import CheckResult, failed, passed, skipped

Message = dict[str, Any]
"""A line of JSON."""
MAX_OUTPUT_BYTES = 1 << 20
KEPT_OUTPUT_BYTES = 16 * 1024
MAX_REASON_CHARS = 200
LOOK_INTERVAL_S = 0.02
"""Between two looks at the children; they run for a second of each minute."""
EXIT_TIMEOUT_S = 1.0
"""After SIGKILL; a process that hangs in the kernel is left behind."""
CANNOT_RUN_EXIT_CODE = 125
"""The exit code of a child that could not execute the plugin."""


@dataclass
class RunningCheck:
    """One check that runs: its process, its deadline, what it has written, and how its end becomes a result."""

    check: str
    pid: int
    output_fd: int
    began_at: float
    deadline: float
    to_result: Callable[[RunningCheck, int], CheckResult]
    output: bytes = b""  #: the beginning of what it wrote
    output_bytes: int = 0
    kill_reason: str = ""
    ports: Message = field(default_factory=dict)  # the network's, for the next run


class CheckRunner:
    """Runs the checks of one request, `at_once` at a time."""

    def __init__(self, send: Callable[[Message], None], stop_fd: int) -> None:
        """`stop_fd` becomes readable when the results are no longer needed."""
        self._send = send
        self._stop_fd = stop_fd
        self._children: dict[int, RunningCheck] = {}
        self._stopped = False
        handle_signals_unless_ignored(STRAY_SIGNALS, ignore_signal)

    def run(self, request: Message) -> None:
        """Run all checks of the request, and leave no process behind but those that survive SIGKILL."""
        waiting = [self._directory_starter(asked, request) for asked in request["directories"]]
        waiting += [self._ports_starter(asked, request) for asked in request.get("ports", ())]
        waiting += [self._plugin_starter(asked, request) for asked in request["plugins"]]
        waiting.reverse()
        while (waiting or self._children) and not self._stopped:
            while waiting and len(self._children) < request["at_once"]:
                waiting.pop()()
            self._turn()
        self._kill_descendants()

    def _directory_starter(self, asked: Message, request: Message) -> Callable[[], None]:
        """Return the start of a check of one directory: it exists, can be written, and has enough free space."""

        def ask() -> None:
            result = directories.check_directory(asked["check"], asked["path"], asked["free_min_bytes"], asked["made"])
            os.write(1, json.dumps(asdict(result)).encode())
            os._exit(0)

        return lambda: self._start(asked["check"], request["directory_s"], ask, _directory_result)

    def _ports_starter(self, asked: Message, request: Message) -> Callable[[], None]:
        """Return the start of a check of the network's ports, compared with the counters of the run before."""

        def ask() -> None:
            os.write(1, json.dumps(network_ports.read_ports()).encode())
            os._exit(0)

        def judge(child: RunningCheck, status: int) -> CheckResult:
            if child.kill_reason:
                return failed(child.check, f"{child.kill_reason}: does the adapter's driver answer?")
            try:
                result, child.ports = network_ports.judge_ports(asked["before"], json.loads(child.output))
            except (ValueError, TypeError):
                return skipped(child.check, first_line(child.output) or describe_wait_status(status))
            return result

        return lambda: self._start(asked["check"], request["directory_s"], ask, judge)

    def _plugin_starter(self, asked: Message, request: Message) -> Callable[[], None]:
        """Return the start of a plugin: any program; exit code 0 is healthy, its first line is the reason."""

        def become() -> None:
            try:
                os.execve(asked["path"], [asked["path"]], request["environment"])
            except OSError as error:
                os.write(1, f"{asked['path']} cannot be executed: {error.strerror}".encode())
            os._exit(CANNOT_RUN_EXIT_CODE)

        return lambda: self._start(asked["check"], request["plugin_s"], become, _plugin_result)

    def _start(
        self,
        check: str,
        within_s: float,
        act: Callable[[], None],
        to_result: Callable[[RunningCheck, int], CheckResult],
    ) -> None:
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        us = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_child(us, theirs, act)
        os.close(theirs)
        now = time.monotonic()
        self._children[pid] = RunningCheck(check, pid, ours, now, now + within_s, to_result)

    def _turn(self) -> None:
        """Look at all children once: results of those that have ended, output, deadlines."""
        if select.select([self._stop_fd], [], [], LOOK_INTERVAL_S)[0]:
            self._stopped = True
        for pid, status in reap_children().items():
            if (child := self._children.pop(pid, None)) is not None:
                self._close_output(child)
                self._report(child, child.to_result(child, status))
        for child in list(self._children.values()):
            self._read_output(child)
            if time.monotonic() >= child.deadline:
                self._on_deadline(child)
            elif not child.kill_reason and child.output_bytes > MAX_OUTPUT_BYTES:
                self._kill(child, f"it wrote more than {MAX_OUTPUT_BYTES >> 20} MiB; only the first line counts")

    def _read_output(self, child: RunningCheck) -> None:
        with contextlib.suppress(BlockingIOError):
            while child.output_bytes <= MAX_OUTPUT_BYTES and (data := os.read(child.output_fd, 1 << 16)):
                child.output += data[: KEPT_OUTPUT_BYTES - len(child.output)]
                child.output_bytes += len(data)

    def _close_output(self, child: RunningCheck) -> None:
        self._read_output(child)
        os.close(child.output_fd)

    def _on_deadline(self, child: RunningCheck) -> None:
        """Kill a child that is late; when it is late for its end as well, report it and leave it behind."""
        if not child.kill_reason:
            self._kill(child, f"no result within {child.deadline - child.began_at:g} s")
            return
        del self._children[child.pid]
        self._close_output(child)
        process = stat(child.pid)
        state = process.state if process is not None else "?"
        where = read(f"/proc/{child.pid}/wchan").decode("ascii", "replace")
        why = f"{child.kill_reason}; process {child.pid} survives SIGKILL (state {state}{' in ' * bool(where)}{where})"
        self._report(child, failed(child.check, why))
        started = process.start_ticks if process is not None else 0
        self._send({"stuck": {"check": child.check, "pid": child.pid, "started": started}})

    def _kill(self, child: RunningCheck, why: str) -> None:
        child.kill_reason = why
        child.deadline = time.monotonic() + EXIT_TIMEOUT_S
        _kill_with_group(child.pid)

    def _report(self, child: RunningCheck, result: CheckResult) -> None:
        took_s = time.monotonic() - child.began_at
        self._send({"result": asdict(replace(result, seconds=took_s))})
        if child.ports:
            self._send({"ports": child.ports})

    def _kill_descendants(self) -> None:
        """No descendant outlives this process, except unkillable ones."""
        until = time.monotonic() + EXIT_TIMEOUT_S
        while (left := children()) and time.monotonic() < until:
            for pid in left:
                _kill_with_group(pid)
            time.sleep(0.01)
            reap_children()


def _become_child(parent: int, out: int, act: Callable[[], None]) -> NoReturn:
    """It holds no file of the parent open: a reader that waits for the parent's end must not wait for a hung child."""
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(CANNOT_RUN_EXIT_CODE)
        for number in (signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.set_blocking(out, True)
        os.dup2(nothing, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir("/")
        act()
    except BaseException as error:  # noqa: BLE001  a forked child must never continue as its parent
        os.write(1, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
    os._exit(CANNOT_RUN_EXIT_CODE)


def _directory_result(child: RunningCheck, status: int) -> CheckResult:
    if child.kill_reason:
        return failed(child.check, f"{child.kill_reason}: is it a mount whose server is unreachable?")
    try:
        return CheckResult(**json.loads(child.output))
    except (ValueError, TypeError):
        return skipped(
            child.check, f"it could not be checked: {first_line(child.output) or f'it {describe_wait_status(status)}'}"
        )


def _plugin_result(child: RunningCheck, status: int) -> CheckResult:
    reason = first_line(child.output)
    if child.kill_reason:
        return failed(child.check, child.kill_reason)
    if os.WIFSIGNALED(status):
        return failed(child.check, f"it {describe_wait_status(status)}{': ' * bool(reason)}{reason}")
    code = os.WEXITSTATUS(status)
    if code == CANNOT_RUN_EXIT_CODE and "cannot be executed" in reason:
        return skipped(child.check, reason)
    if code:
        return failed(child.check, reason or f"it exited with {code} and wrote nothing")
    return passed(child.check, reason or "exit code 0")


def first_line(output: bytes) -> str:
    """One printable line."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    text = "".join(letter if letter.isprintable() else "·" for letter in (lines[0].strip() if lines else ""))
    return shortened(text, MAX_REASON_CHARS)


def _kill_with_group(pid: int) -> None:
    """The process, and the group that it leads, if it leads one."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line:
        return
    prctl(PR_SET_CHILD_SUBREAPER, 1)

    def send(message: Message) -> None:
        os.write(1, json.dumps(message).encode() + b"\n")

    CheckRunner(send, sys.stdin.fileno()).run(json.loads(line))
    send({"done": True})


if __name__ == "__main__":
    main()
