"""Two nodes with an agent each, one etcd, one job that trains on both: what is watched, and hurt."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.daemon.node import AgentNode, until
from tests.etcd import EtcdServers, etcd_servers, free_ports
from tests.faults.job import Fault

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
JOB = "both"


class Pair:
    """`ports` are the agents', by node: they stay the same when an agent is started again."""

    def __init__(self, root: Path, etcd: EtcdServers, **settings: Any) -> None:
        self.etcd = etcd
        self.ports = dict(zip(("n1", "n2"), free_ports(2), strict=True))
        self.plugins, self._ill = root / "health.d", root / "ill"
        self.plugins.mkdir(mode=0o755)
        self._ill.mkdir()
        plugin = self.plugins / "10-link"
        plugin.write_text(f"#!/bin/sh\n[ ! -e {self._ill}/$ELASTICD_NODE ] || {{ echo link is down; exit 1; }}\n")
        plugin.chmod(0o755)
        health = {
            "all_reduce": False, "disk_free_min": "1MB", "plugins_dir": str(self.plugins), "every": "1s",
            "plugin_timeout": "900ms", "cooloff": "10s",
        }  # fmt: skip
        store = {"backend": "etcd", "endpoints": [f"127.0.0.1:{etcd.port}"]}
        common = {"slots": 1, "store": store, "local_addr": "127.0.0.1", "health": health, **settings}
        mark = f"ALERTING_TEST={uuid.uuid4()}"  # of both: what the job started on the one carries the other's, too
        self.nodes = {
            name: AgentNode(root / name, name, mark, http={"port": port}, **common) for name, port in self.ports.items()
        }
        self.n1, self.n2 = self.nodes.values()
        self.work = self.n1.work

    def train(self, *args: str, script: Path = SCRIPT, nodes: str = "1:2", wait: bool = True, **how: Any) -> None:
        """Start both agents with the job, and wait until it makes steps on both."""
        how = {"checkpoint_dir": str(self.work / "ck"), "workers": 1, "hang_floor": "3s", **how}
        self.n1.job(JOB, str(script), *args, nodes=nodes, env={"WORK": str(self.work)}, **how)
        self.n2.start()
        self.n1.start()
        if wait:
            self.on_both()

    def on_both(self, after: int = 0) -> None:
        """Wait until it makes steps on both nodes in a round later than that."""
        both = until(lambda: self._rounds(2, after), self.told)[-1]
        until(lambda: max(self.n1.steps(), default=(0, 0))[0] >= both, self.told)

    def further(self, steps: int = 40) -> None:
        """Wait until it is so many steps beyond the highest that it has ever made."""
        highest = max(step for _, step in self.n1.steps() + self.n1.steps(1))
        until(lambda: max(self.n1.steps())[1] >= highest + steps, self.told)

    def round(self) -> int:
        """The newest."""
        return max(self._rounds(1, 0) + self._rounds(2, 0), default=0)

    def _rounds(self, size: int, after: int) -> list[int]:
        found = [e for node in self.nodes.values() for e in node.job_events(JOB, "round_published")]
        return sorted(e["round"] for e in found if len(e["nodes"]) == size and e["round"] > after)

    def worker(self, node: str) -> int:
        """The pid of the one worker there."""
        return self.nodes[node].workers(JOB)[0]

    def strikes(self, faults: Sequence[Fault]) -> None:
        """What the scripts of tests/hangs do to themselves."""
        (self.work / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]))

    def node_of(self, rank: int) -> str:
        """Whose worker that rank is now."""
        return next(
            node.name for node in self.nodes.values() if rank in node.job_events(JOB, "group_started")[-1]["ranks"]
        )

    def ended(self) -> bool:
        """Whether the job is over."""
        return any(node.job_events(JOB, "job_ended") for node in self.nodes.values())

    @contextlib.contextmanager
    def stuttering(self, still_s: float, goes_s: float) -> Iterator[None]:
        """etcd stands still for so long, goes on for so long, and so on."""
        enough = threading.Event()

        def stutter() -> None:
            while not enough.is_set():
                self.etcd.stop()
                time.sleep(still_s)
                self.etcd.cont()
                enough.wait(goes_s)

        thread = threading.Thread(target=stutter, name="stuttering")
        thread.start()
        try:
            yield
        finally:
            enough.set()
            thread.join(20)

    def fall_ill(self, node: str) -> None:
        """Its health plugin says so from now on."""
        (self._ill / node).touch()

    def recover(self, node: str) -> None:
        (self._ill / node).unlink()

    def told(self) -> str:
        return "".join(node.diagnostics() for node in self.nodes.values())

    def end(self) -> None:
        for node in self.nodes.values():
            if node.process is not None:
                node.process.kill()
        for node in self.nodes.values():
            node.end()


@contextlib.contextmanager
def pair(root: Path, **settings: Any) -> Iterator[Pair]:
    with etcd_servers() as etcd:
        made = Pair(root, etcd, **settings)
        try:
            yield made
        finally:
            made.end()
