"""An agent's API with its server, over a store in memory, with runners played by the test: no process is started."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticd.errors import StoreUnavailable
from elasticd_agent.store import Versioned
from elasticd_agent.store.memory import MemoryStore
from elasticd_agent.system.network.control_socket import ControlSocketError
from elasticd_agent.system.network.http_auth import TokenAuth
from elasticd_agent.system.network.http_server import Routes
from elasticd_agent.telemetry.metrics_server import HealthProbeResult, MonitoringPages
from elasticd_daemon import keys as names
from elasticd_daemon.api.client import AgentClient, client_tls_context
from elasticd_daemon.api.local import LocalJobs
from elasticd_daemon.api.peers import Peers
from elasticd_daemon.api.routes import ApiRoutes
from elasticd_daemon.api.server import ApiServer
from elasticd_daemon.api.service import JobService
from elasticd_daemon.config.agent_settings import HttpSettings
from elasticd_daemon.job_dir import JobFiles
from elasticd_daemon.records import NodeStatus, Placement, RunnerStatus, SlotAssignment
from tests.log_lines import raw_line

TOKEN = "correct-horse-battery-staple-0a4b"
JOB = b'command = ["train.py"]\nworkdir = "/tmp"\nworkers = "1:2"\n'
DEADLINE = 30.0


class Outage(MemoryStore):
    """A store in memory with outages."""

    is_down = False

    def read(self, key: str) -> Versioned | None:
        self._require_up()
        return super().read(key)

    def list(self, prefix: str, known: dict[str, Versioned] | None = None) -> dict[str, Versioned]:
        self._require_up()
        return super().list(prefix, known)

    def _require_up(self) -> None:
        if self.is_down:
            raise StoreUnavailable("127.0.0.1:2379 refuses connections")


@dataclass(slots=True)
class Served:
    """One node's API. `answers`: its runners' answers, by request."""

    root: Path
    store: Outage = field(default_factory=Outage)
    node: str = "n1"
    token: str | None = TOKEN
    connection_s: float = DEADLINE
    where: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    front: Callable[[ApiRoutes, TokenAuth, bool], Routes] = lambda api, token, tls: api
    now: Callable[[], float] = time.time
    server: ApiServer = field(init=False)
    service: JobService = field(init=False)
    pages: MonitoringPages = field(init=False)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        token_file = self.token_file if self.token is not None else None
        if self.token is not None:
            self.token_file.write_text(self.token + "\n")
            self.token_file.chmod(0o600)
        here = LocalJobs(self.node, self.root / "state", self._ask)
        http = HttpSettings(port=0, token_file=token_file, **self.where)
        tls = http.tls_cert is not None
        token = TokenAuth(token_file, http.tokens, http.read_only, http.agents_token_file)
        peers = Peers(token.agents_token, tls, http.tls_ca, http.tls_name)
        self.service = JobService(self.store, here, peers, clock=self.now)
        well, absent = HealthProbeResult(True, "well"), HealthProbeResult(False, "not in")
        self.pages = MonitoringPages(lambda: b"up 1.0\n", lambda: {"node": self.node}, lambda: well, lambda: absent)
        routes = self.front(ApiRoutes(self.service, self.pages), token, tls)
        self.server = ApiServer(self.socket, http, routes, token, self.connection_s)

    @property
    def token_file(self) -> Path:
        return self.root / "token"

    @property
    def address(self) -> tuple[str, int]:
        return self.server.address

    @property
    def socket(self) -> Path:
        return self.root / "run" / "agent.sock"

    def unix(self) -> AgentClient:
        return AgentClient(self.socket)

    def tcp(self, token: str | None = TOKEN, ca: Path | None = None) -> AgentClient:
        return AgentClient(None, *self.address, token, None if ca is None else client_tls_context(ca))

    def connected(self) -> socket.socket:
        return socket.create_connection(self.address, DEADLINE)

    def announce(self, *running: RunnerStatus, slots: int = 4, **card: Any) -> None:
        """This node's status is in the store, as its agent would write it."""
        host, port = self.address
        it = NodeStatus(self.node, "i1", slots, f"{host}:{port}", runners=running, elasticd="0.1.0", **card)
        self.store.delete(names.NODES + self.node)
        assert self.store.announce(names.NODES + self.node, it.to_json(), 1e6) is not None

    def submit(self, job: str = "llama") -> int:
        reply = self.unix().post("/v1/jobs", JOB, "application/toml", query={"id": job})
        assert reply.code == 201, reply
        return int(reply.document()["number"])

    def place(self, job: str, number: int, *nodes: str, reason: str = "runs", last: tuple[str, ...] = ()) -> None:
        key = names.PLACEMENTS + job
        found = self.store.read(key)
        places = tuple(SlotAssignment(node, (0, 1)) for node in nodes)
        record = Placement(job, number, places, reason, previous_nodes=last).to_json()
        assert self.store.compare_and_swap(key, None if found is None else found.version, record)

    def files(self, job: str = "llama", number: int = 1) -> JobFiles:
        return self.service.local.files(job, number)

    def log(self, round: int, rank: int, stream: str, text: str, job: str = "llama", number: int = 1) -> Path:
        path = self.files(job, number).logs / f"round-{round}" / f"rank-{rank}" / f"{stream}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)
        return path

    def event(self, kind: str, wall: float, round: int = 1, job: str = "llama", number: int = 1, **more: Any) -> None:
        files = self.files(job, number)
        files.root.mkdir(parents=True, exist_ok=True)
        with files.events.open("a") as file:
            file.write(raw_line(kind, wall, round, **more))

    def close(self) -> None:
        assert self.server.close(within_s=DEADLINE)

    def _ask(self, files: JobFiles, request: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        found = self.answers.get(str(request["do"]))
        if found is None:
            raise ControlSocketError("no runner is there")
        return dict(found)


def ended(sock: socket.socket) -> bool:
    """Whether the other end closes within the deadline."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        try:
            while sock.recv(65536):
                pass
        except TimeoutError:
            return False
    return True


def fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))
