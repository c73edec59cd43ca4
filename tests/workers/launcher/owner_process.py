"""A real owner, with the test as its agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

from elasticd import channel
from elasticd_agent.system.installation import import_path, program
from elasticd_agent.workers.launcher import messages
from elasticd_agent.workers.launcher.messages import Execute, Report, Request

PATIENCE_S = 30.0
ENV = {"PATH": "/usr/bin:/bin"}

R = TypeVar("R", bound=Report)


class OwnerProcess:
    def __init__(self, directory: Path) -> None:
        self.runtime = directory / "run"
        self.runtime.mkdir(exist_ok=True)
        self.agent, theirs = channel.pair()
        self.agent.settimeout(PATIENCE_S)
        with theirs:
            argv = [sys.executable, "-I", "-S", program("owner"), str(theirs.fileno()), str(self.runtime)]
            argv.append(os.pathsep.join(import_path()))
            fds = [theirs.fileno()]
            self.process = subprocess.Popen(argv, pass_fds=fds, stderr=subprocess.PIPE, text=True)
        self.reports: list[Report] = []

    def send(self, request: Request) -> None:
        channel.send(self.agent, messages.to_message(request))

    def receive(self) -> Report:
        message = channel.receive(self.agent)
        assert message is not None, self.process.communicate()
        report = messages.decode_report(message)
        assert report is not None
        self.reports.append(report)
        return report

    def until(self, kind: type[R], group: int | None = None) -> R:
        while True:
            report = self.receive()
            if isinstance(report, kind) and group in (None, getattr(report, "group", None)):
                return report

    def wait(self) -> tuple[int, str]:
        """Its exit code, and what it wrote to standard error."""
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        self.agent.close()
        return self.process.returncode, errors

    def end(self) -> tuple[int, str]:
        """As an agent that has died."""
        self.agent.close()
        return self.wait()


def execute(group: int, *argvs: list[str], env: dict[str, str] = ENV, output: Path | None = None) -> Execute:
    """A cold group without a store; each worker's output goes to OUTPUT-RANK."""
    files = [None if output is None else f"{output}-{rank}" for rank in range(len(argvs))]
    workers: list[messages.ColdWorkerFields] = [
        {"argv": argv, "env": {}, "stdout": file, "stderr": file} for argv, file in zip(argvs, files, strict=True)
    ]
    return Execute(group, None, False, "127.0.0.1", 0, "/", env, [], {}, workers)
