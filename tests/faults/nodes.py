"""Two or more nodes on this machine: agents that meet in a real etcd over loopback. Their network cannot be cut."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from elasticd_agent.model.keys import Keys
from tests.etcd import EtcdServers
from tests.faults.job import REPOSITORY, Job, until

COLD = "${local_rank}"


class StartJob(Protocol):
    def __call__(self, script: str, *args: str, **how: Any) -> Job: ...


class Nodes:
    """Agents of one job, `nnodes` MIN:MAX; MIN of them begin at once.

    Each has a `work` directory of its own, so what scripts write is asked for node by node.
    """

    def __init__(self, start: StartJob, etcd: EtcdServers, nnodes: str, job: str = "job") -> None:
        self._start, self.etcd, self.nnodes, self.job = start, etcd, nnodes, job
        self.agents: list[Job] = []

    def agent(
        self,
        node: str,
        script: str,
        *args: str,
        flags: Sequence[str] = (),
        path: Path | None = None,
        warm: bool = False,
        **how: Any,
    ) -> Job:
        """One more node. Its last arguments are `args`; cold workers start quickest. `path` goes before PYTHONPATH."""
        if path is not None:
            how["env"] = {"PYTHONPATH": os.pathsep.join(map(str, (path, REPOSITORY, REPOSITORY / "agents")))}
        meet = ["--nnodes", self.nnodes, "--rdzv-backend", "etcd", "--rdzv-id", self.job, "--node-id", node]
        meet += ["--rdzv-conf", "last_call_timeout=0"]
        meet += ["--rdzv-endpoint", f"127.0.0.1:{self.etcd.port}", "--local-addr", "127.0.0.1"]
        given = args if warm else (COLD, *args)
        self.agents.append(self._start(script, *given, flags=[*meet, *flags], **{"workers": "1", **how}))
        return self.agents[-1]

    def registered(self, node: str, **having: Any) -> bool:
        """True if that node's record says this."""
        found = self.etcd.ctl("get", Keys(self.job).node(node), "--print-value-only").strip()
        return bool(found) and having.items() <= json.loads(found).items()

    def wait_for_start(self, nodes: str, round: int) -> None:
        """Until the records of these nodes say that their groups of this round have started."""
        until(lambda: all(self.registered(node, ready_round=round) for node in nodes), f"starts in round {round}")

    def enough(self) -> list[int]:
        """Let the workers end; every agent's exit code."""
        for agent in self.agents:
            (agent.work / "enough").touch()
        return [agent.wait() for agent in self.agents]
