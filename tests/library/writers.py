"""The launcher's part of saving for tests: a node's memory, the writer's socket, and a writer process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import elasticd.checkpointing.memory.writer as program
from elasticd.checkpointing.memory.writer_client import WriterClient


class Node:
    """One node: its memory outlives its writer, and a new writer is started when there is none."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "writer"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.memory = [os.memfd_create(f"test-{number}") for number in range(4)]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self, *prefix: str) -> None:
        fds = [self.listener.fileno(), *self.memory]
        argv = [sys.executable, "-I", program.__file__, *map(str, fds)]
        self.process = subprocess.Popen([*prefix, *argv], pass_fds=fds)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(30)
        self.process = None
        return code

    def flush(self) -> dict[str, Any]:
        """As the launcher does when no round follows."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as launcher:
            launcher.settimeout(60)
            launcher.connect(str(self.path))
            launcher.send(b'{"do": "flush"}')
            answer: dict[str, Any] = json.loads(launcher.recv(4096))
            return answer

    def client(self, share: int = 0, shares: int = 1) -> WriterClient:
        return WriterClient(str(self.path), share, shares, is_first_node=True)

    def environment(self, node: int, nodes: int, share: int, shares: int) -> dict[str, str]:
        """What the launcher sets for one rank of this node."""
        group = {"GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(nodes), "LOCAL_RANK": str(share)}
        return {**group, "ELASTICD_WRITER": f"{share}/{shares}:{self.path}"}

    def close(self) -> None:
        if self.process is not None:
            self.end(signal.SIGKILL)
        self.listener.close()
        for fd in self.memory:
            os.close(fd)
