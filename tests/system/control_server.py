"""An agent that is small: a control socket, and a thread that decides what is answered."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from elasticd_agent.hangs.causes import DUMP_REASON
from elasticd_agent.hangs.collector.record import NodeEvidence, RankEvidence
from elasticd_agent.system.network.control_socket import SOCKET_NAME, ControlServer, DumpRequested


class Answering:
    """An agent's deciding thread: answers what comes into its inbox, with evidence in `directory`."""

    def __init__(self, runtime: Path, directory: Path, answer: str = "") -> None:
        self.inbox: queue.SimpleQueue[DumpRequested | None] = queue.SimpleQueue()
        self.asked: list[DumpRequested] = []
        self._directory, self._answer = directory, answer
        self.server = ControlServer(runtime / SOCKET_NAME, self.inbox.put, {"job": "llama", "node": "here"})
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while (message := self.inbox.get()) is not None:
            self.asked.append(message)
            message.reply(self._answer or self._take(message.out or self._directory))

    def _take(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        rank = RankEvidence(0, 7, state="S", phase="step", step=41)
        record = NodeEvidence(3, "here", DUMP_REASON, 1.0, (rank,))
        (directory / record.file_name).write_bytes(record.to_json())
        return directory

    def close(self) -> None:
        self.server.close()
        self.inbox.put(None)
        self._thread.join()
