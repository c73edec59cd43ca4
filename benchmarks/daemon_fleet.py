"""Several `elasticd agent`s over one etcd, on this machine, with a stream of small jobs: the fleet of daemon_soak.py.

It starts agents, sends requests, follows them, and records every request and observation for daemon_checker.py, which
judges them. Each node has its own state directory, and a mark in the environment by which all of its processes are
found. The last node's state directory is a small file system of its own, which can be filled.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.daemon_adversary import ATTACKER, PASSWORD, STORE_USER, Adversary, python_of_others
from elasticd.errors import ElasticdError, WireError
from elasticd_agent.model.keys import Keys
from elasticd_agent.store import Store
from elasticd_agent.store.etcd.store import EtcdStore
from elasticd_daemon import keys as names
from elasticd_daemon.api.client import AgentClient, Unreachable
from elasticd_daemon.job_dir import JobFiles
from elasticd_daemon.records import JobResult, Submission
from elasticd_daemon.runners import liveness as alive
from elasticd_daemon.runners.spec import read_spec
from tests.daemon.node import AgentNode
from tests.etcd import EtcdServers, free_ports
from tests.faults.job import REPOSITORY, SCRIPTS
from tests.multihost.cluster import LINEAGE
from tests.multihost.net import Host

SLOTS = 2
ADOPT_S = 12
SAMPLES = 600
DISK_MB = 24
KEEP_ENDED = "20m"
"""Records and logs of an ended job. They are judged within minutes, and what has them is full within the first hour."""
STEPS = (60, 300)
"""A job has so many, of some 20 ms, and starts in a few seconds."""
LONG_PAUSE_S = 0.25
"""A long job's steps are rare: its record is read again and again."""
MAX_MEMORY = 150_000_000
"""Bytes of an agent, which has 55 to 85 MB without an adversary."""
MAX_KEYS = 20
_MARK = "SOAK_OF_DAEMONS"
_LOOK_S = 0.25
_STORE_S = 5.0
"""A busy etcd takes a second to check a password."""
_TOKEN = "0123456789abcdef0123456789abcdef"


def small_disk(work: Path, node: str) -> Path | None:
    """A small file system as the state directory of that node, which can be filled; None: that needs root.

    Hosts see what is mounted before them.
    """
    state = work / "nodes" / node / "state"
    state.mkdir(0o700, parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=0700", "none", str(state)]
    return state if subprocess.run(mount, capture_output=True).returncode == 0 else None


class FleetJournal:
    """Appends lines to files of a directory; from any thread."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._lock = threading.Lock()

    def write(self, name: str, **line: Any) -> None:
        with self._lock, (self.work / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps({"mono": time.monotonic(), **line}) + "\n")


@dataclass(slots=True)
class SubmittedJob:
    """A job that was submitted, or may have been. `number` 0: not known yet. `over`: its result was observed."""

    seq: int
    job: str
    steps: int
    number: int = 0
    refused: bool = False
    cancelled: bool = False
    over: bool = False
    long: bool = False  #: it trains beside the others, for hours


@dataclass(eq=False)
class Fleet:
    """`nodes` by name. Everything that waits for a daemon or the store is bounded."""

    work: Path
    etcd: EtcdServers
    count: int
    seed: int
    steps: tuple[int, int] = STEPS
    nodes: dict[str, AgentNode] = field(default_factory=dict)
    submissions: dict[int, SubmittedJob] = field(default_factory=dict)
    disk: Path | None = None
    adversary: Adversary | None = None
    hosts: Sequence[Host] = ()
    """A network of its own for each node; none: all on loopback."""
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _endings: dict[tuple[str, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.journal = FleetJournal(self.work)
        token = self.work / "token"
        token.touch(0o600)
        token.write_text(_TOKEN + "\n")
        self._own = random.Random(self.seed)  # jobs are the same whatever strikes
        self.work.chmod(0o711)
        self._ports = free_ports(self.count)
        store: dict[str, Any] = {"backend": "etcd", "endpoints": [":".join(map(str, self.etcd.endpoints[0]))]}
        python = None
        if self.adversary is not None:
            secret = self.work / "password"
            secret.touch(0o600)
            secret.write_text(PASSWORD + "\n")
            store |= {"user": STORE_USER, "password_file": secret}
            python = python_of_others()
        for number in range(1, self.count + 1):
            name = f"n{number}"
            root = self.work / "nodes" / name
            root.mkdir(parents=True, exist_ok=True)
            address = self.hosts[number - 1].address if self.hosts else "127.0.0.1"
            self.nodes[name] = AgentNode(
                root,
                name,
                f"{_MARK}={self.seed}-{os.getpid()}-{name}",
                slots=SLOTS,
                store=store,
                local_addr=address,
                adopt_timeout=f"{ADOPT_S}s",
                drain_timeout="20s",
                keep_ended=KEEP_ENDED,
                http={"bind": address, "port": self._ports[number - 1], "token_file": token},
                # A full disk must not quarantine a node here, and faults are injected ones.
                health={"all_reduce": False, "disk_free_min": 0, "strikes": 1_000_000},
            )
            if self.hosts:
                self.nodes[name].popen = self.hosts[number - 1].popen
            if python is not None:
                self.nodes[name].python, path = python
                self.nodes[name].path += path

    # --- its life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for name in self.nodes:
            self.start_agent(name)
        for node in self.nodes.values():
            node.until(lambda node=node: node.events("node_registered"), "the agent to take part")
        for target in (self._watch_nodes, self._watch_store):
            self._threads.append(threading.Thread(target=target, name=target.__name__, daemon=True))
            self._threads[-1].start()

    def start_agent(self, name: str) -> None:
        """It need not come far."""
        self.nodes[name].start(wait=False, LINEAGE_NODE=name, OMP_NUM_THREADS="1")

    def running(self, name: str) -> bool:
        process = self.nodes[name].process
        return process is not None and process.poll() is None

    def stop_watching(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)

    def close(self) -> None:
        self.stop_watching()
        for node in self.nodes.values():
            for pid in node.processes():  # a stopped process reacts to nothing else
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            node.end()
        if self.disk is not None:  # what is on it is read later
            beside = self.disk.with_name("kept")
            shutil.copytree(self.disk, beside, symlinks=True, ignore=_not_kept)
            subprocess.run(["umount", "--lazy", self.disk], check=True)
            shutil.copytree(beside, self.disk, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(beside)

    def leave(self) -> None:
        """Stop all agents, and record what is left when they have ended."""
        self.stop_watching()
        for node in self.nodes.values():
            node.signal(signal.SIGTERM)
        for name, node in self.nodes.items():
            self.journal.write("left", node=name, code=node.wait())
        left = []
        for name, node in self.nodes.items():
            left += [f"{name}: process {pid} {comm}" for pid, comm in node.processes().items()]
            left += [f"{name}: {path} is held" for path in self._folders(name) if alive.is_locked(path / "lock")]
        if self.adversary is not None:
            left += self.adversary.left(_TOKEN)
        user = None if self.adversary is None else f"{STORE_USER}:{PASSWORD}"
        keys = self.etcd.ctl("get", "--prefix", "--keys-only", f"{names.ROOT}/", user=user).split()
        left += [f"key {key}" for key in keys if key.startswith((names.NODES, names.SCHEDULER, names.CORDONS))]
        for job in {one.job for one in self.submissions.values()}:
            own = Keys(job)
            there = [key for key in keys if key.startswith(own.spec.removesuffix("spec"))]
            left += [f"key {key}" for key in there if key.startswith((own.nodes, own.planner))]
            if len(there) > MAX_KEYS:  # they go with the job's other records, after keep_ended
                left.append(f"{len(there)} keys of {job}: {', '.join(there)}")
        self.journal.write("end", left=left)

    # --- asking ---------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[SubmittedJob]:
        """Jobs that may have been submitted and whose end was not observed."""
        return [one for one in self.submissions.values() if not one.refused and not one.over]

    def submit(self, long_steps: int = 0) -> SubmittedJob:
        """Submit a job, as the command does: tried again with the same token where the answer is lost.

        With `long_steps` one of so many, whose ranks stay in their processes, with a spare.
        """
        rng = self._own
        few, many = rng.choice(((1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3)))
        workers = rng.choice((1, 1, 2))
        drawn = rng.randrange(*self.steps)
        stays = rng.random() < 0.5
        seq = len(self.submissions) + 1
        if any(one.long for one in self.submissions.values()):
            workers = 1  # the long job leaves one slot of each node
        if long_steps:
            few, many, workers, drawn, stays = 2, 3, 1, long_steps, True
        one = SubmittedJob(seq, "long" if long_steps else f"j{seq % 7}", drawn, long=bool(long_steps))
        self.submissions[seq] = one
        folder = self.work / "jobs" / str(seq)
        folder.mkdir(parents=True)
        (folder / "faults.json").write_text("[]")
        path = [str(REPOSITORY), str(REPOSITORY / "agents"), str(SCRIPTS)]
        spec: dict[str, Any] = {
            "id": one.job,
            "command": [str(LINEAGE), "--steps", str(one.steps), "--samples", str(SAMPLES), "--every", "15"],
            "workdir": str(folder),
            "env": {"WORK": str(folder), "PYTHONPATH": os.pathsep.join(path)},
            "nodes": f"{few}:{many}",
            "workers": workers,
            "checkpoint_dir": str(folder / "checkpoints"),
            "max_restarts": 1_000_000,
            "node_cooloff": 0,
            "spares": int(one.long),
        }
        spec["command"] += ["--pause", str(LONG_PAUSE_S if one.long else 0.015), *(["--stay"] if stays else [])]
        if self.adversary is not None:
            spec["user"] = self.adversary.user(seq)
            path += python[1] if (python := python_of_others()) else []
            spec["env"]["PYTHONPATH"] = os.pathsep.join(path)
            roots = [node.root for node in self.nodes.values()]
            if self.adversary.is_hostile(seq):
                spec["command"].insert(0, str(ATTACKER))
                self.adversary.arm(folder, one.job, roots, self._ports, self.work / "token")
            shutil.chown(folder, spec["user"])
        self._post(one, json.dumps(spec).encode())
        return one

    def resubmit(self, one: SubmittedJob) -> int:
        """The same job once more, by another caller."""
        spec = (self.work / "jobs" / str(one.seq) / "spec.json").read_bytes()
        return self.request("POST", "/v1/jobs", spec, {"id": one.job, "token": os.urandom(16).hex()})[0]

    def _post(self, one: SubmittedJob, spec: bytes) -> None:
        (self.work / "jobs" / str(one.seq) / "spec.json").write_bytes(spec)
        query = {"id": one.job, "token": os.urandom(16).hex()}
        began = time.monotonic()
        code: int = 0
        answer: Mapping[str, Any] = {}
        for _ in range(3):
            code, answer = self.request("POST", "/v1/jobs", spec, query)
            if code not in (503, 0):
                break
            time.sleep(0.3)
        one.refused = code not in (201, 503, 0)
        one.number = int(answer.get("number", 0))
        self.journal.write(
            "requests", do="submit", seq=one.seq, job=one.job, steps=one.steps, number=one.number, code=code,
            hostile=self.adversary is not None and self.adversary.is_hostile(one.seq), long=one.long,
            began=began, answer=str(answer)[:300],
        )  # fmt: skip

    def cancel(self, one: SubmittedJob) -> tuple[int, Mapping[str, Any]]:
        code, answer = self.request("POST", f"/v1/jobs/{one.job}/cancel")
        if code == 200 and answer.get("outcome") == "cancelled":
            for other in self.submissions.values():
                other.cancelled |= other.number == answer["number"]
        self.journal.write("requests", do="cancel", job=one.job, code=code, answer=answer, seq=one.seq)
        return code, answer

    def recorded(self, one: SubmittedJob) -> int:
        """Bytes of what its ranks have written about their steps."""
        record = self.work / "jobs" / str(one.seq) / "record"
        return record.stat().st_size if record.exists() else 0

    def histories(self) -> None:
        """What is shown of every job's newest run."""
        newest = {one.job: one for one in self.submissions.values() if one.number}
        for one in newest.values():
            code, answer = self.request("GET", f"/v1/jobs/{one.job}")
            progress = answer.get("progress") or {}
            rounds, silent = progress.get("rounds", []), list(progress.get("unreachable", ()))
            self.journal.write(
                "history", job=one.job, number=answer.get("number"), code=code, rounds=rounds, unreachable=silent
            )

    def request(
        self, method: str, path: str, body: bytes = b"", query: Mapping[str, object] | None = None
    ) -> tuple[int, Mapping[str, Any]]:
        """Of any agent that runs; code 0 when none answers."""
        willing = [name for name in self.nodes if self.running(name) and _state(self.nodes[name].pid) != "T"]
        for name in self._own.sample(willing, len(willing)):
            client = AgentClient(self.nodes[name].root / "run" / "agent.sock")
            kind = "application/json" if body else ""
            try:
                reply = client.request(method, path, query, body=body, content_type=kind, within_s=15.0)
            except Unreachable:
                continue
            try:
                return reply.code, json.loads(reply.body)
            except ValueError:
                return reply.code, {}
        return 0, {}

    # --- following ------------------------------------------------------------------------------------------------

    def runners(self, name: str) -> dict[tuple[str, int], int]:
        """The pid that holds each job's lock on this node, 0 where the lock has none."""
        found = {}
        for folder in self._folders(name):
            if alive.has_processes(JobFiles(folder)):
                job, _, number = folder.name.rpartition(".")
                holder = alive.lock_owner(folder / "lock")
                found[job, int(number)] = 0 if holder is None else holder.pid
        return found

    def left_of_ended(self) -> list[str]:
        """Processes of jobs whose end was observed."""
        over = {f"WORK={self.work / 'jobs' / str(one.seq)}" for one in self.submissions.values() if one.over}
        return [
            f"{name}: {comm} (pid {pid})"
            for name, node in self.nodes.items()
            for pid, comm in node.processes().items()
            if not over.isdisjoint(environment(pid))
        ]

    def _folders(self, name: str) -> list[Path]:
        try:
            return [folder for folder in (self.nodes[name].state / "runners").iterdir() if folder.is_dir()]
        except OSError:
            return []

    def _watch_nodes(self) -> None:
        """No two locks are held at once whose specs name the same slot: the first is checked again afterwards."""
        reported: set[tuple[str, str]] = set()
        while not self._over.wait(_LOOK_S):
            for name in self.nodes:
                held: dict[int, Path] = {}
                for folder in self._folders(name):
                    slots = _slots(folder)
                    if not slots or not alive.has_processes(JobFiles(folder)):
                        continue
                    for slot in slots:
                        other = held.setdefault(slot, folder)
                        if (
                            other is folder
                            or not alive.has_processes(JobFiles(other))
                            or not alive.has_processes(JobFiles(folder))
                        ):
                            continue
                        if slot in _slots(other) and (other.name, folder.name) not in reported:
                            reported.add((other.name, folder.name))
                            self.journal.write(
                                "observed", what="slot", node=name, slot=slot, by=[other.name, folder.name]
                            )

    def _watch_store(self) -> None:
        store = self.store()
        known: dict[int, int] = {}
        try:
            while not self._over.wait(_LOOK_S):
                with contextlib.suppress(ElasticdError):
                    self.look(store)
                self._weigh(known)
        finally:
            store.close()

    def _weigh(self, known: dict[int, int]) -> None:
        """`known`: the most memory that each agent has had so far."""
        for name, node in self.nodes.items():
            pid = 0 if node.process is None else node.process.pid
            with contextlib.suppress(OSError):
                text = Path("/proc", str(pid), "status").read_text()
                found = re.search(r"VmHWM:\s+(\d+) kB", text)
                most = int(found[1]) << 10 if found else 0
                if "elasticd-job" not in text and most > max(MAX_MEMORY, known.get(pid, 0)):
                    known[pid] = most
                    self.journal.write("observed", what="memory", node=name, pid=pid, bytes=most)

    def store(self) -> Store:
        """A client of its own, for its caller to close."""
        if self.adversary is None:
            return EtcdStore(self.etcd.endpoints, timeout_s=_STORE_S)
        return EtcdStore(self.etcd.endpoints, user=STORE_USER, password=PASSWORD, timeout_s=_STORE_S)

    def look(self, store: Store) -> None:
        """Read which jobs have been submitted and which have ended."""
        for key, found in store.list(names.SUBMISSIONS).items():
            with contextlib.suppress(WireError, ValueError, KeyError):
                submission = Submission.from_json(found.value)
                one = self.submissions[int(Path(json.loads(submission.spec)["env"]["WORK"]).name)]
                if one.number != submission.number:
                    self.journal.write("observed", what="submission", seq=one.seq, job=key, number=submission.number)
                    one.number, one.refused = submission.number, False
        for found in store.list(names.RESULTS).values():
            with contextlib.suppress(WireError):
                self._ended(JobResult.from_json(found.value))

    def _ended(self, result: JobResult) -> None:
        what = f"{result.outcome}: {result.reason}"
        if self._endings.get((result.job, result.number)) != what:
            self._endings[result.job, result.number] = what
            self.journal.write(
                "observed",
                what="ending",
                job=result.job,
                number=result.number,
                outcome=result.outcome,
                exit_code=result.exit_code,
                reason=result.reason,
            )
        for one in self.submissions.values():
            if one.number == result.number and not one.over:
                one.over = True


def _not_kept(folder: str, names: list[str]) -> set[str]:
    """What cannot be copied, or must not: a hostile job's pipes, sockets and sparse files, and what fills the disk."""

    def plain(path: Path) -> bool:
        return path.is_symlink() or path.is_dir() or (path.is_file() and path.stat().st_size < 1 << 28)

    return {name for name in names if name == "filler" or not plain(Path(folder, name))}


def _slots(folder: Path) -> tuple[int, ...]:
    try:
        return read_spec(JobFiles(folder)).slots
    except (OSError, WireError):
        return ()


def environment(pid: int) -> list[str]:
    try:
        return Path("/proc", str(pid), "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _state(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def helpers(pids: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """Of a node's processes those that elasticd made beside the workers, with the names they go by."""
    for pid, comm in pids.items():
        if comm.startswith("elasticd-") and comm != "elasticd-job":
            yield pid, comm
