"""How long a job needs from a preemption notice until this node is saved and drained, and the steps that it costs.

    python -m benchmarks.notices --megabytes 300 --times 3
    python -m benchmarks.notices --services gcp slurm

A stand-in of each service has a notice from one moment on; seconds count from there, so that the two seconds between
two requests are in them. `alone`: one node with two workers, until `elasticd run` has ended; the newest checkpoint is
compared with the last step that a rank recorded. `in place`: two nodes with one worker each and `session.run`; the node
that the notice is for leaves, and the first step of the other one alone is compared with the last step of both.
`slurm`: the batch script, `--signal`'s USR1 at its shell, until `scontrol requeue`. Fails above 5 s, or with a step
lost.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks import report
from benchmarks.launchers import ELASTICD
from benchmarks.processes import adopt_orphans, end_all
from tests.etcd import free_ports
from tests.examples.test_slurm import BATCH, REAL, SLURM
from tests.system.test_preemption import NOTICES, QUIET

SCRIPT = Path(__file__).with_name("scripts") / "in_place_job.py"
DEADLINE_S, MAX_S = 120.0, 5.0
STEPS_BEFORE = 15
# A pod's service account is at a fixed path, which only a pod has.
AGENT = """
import pathlib, sys
from elasticd_agent.cli.main import main
from elasticd_agent.system.network import kubernetes
kubernetes.SERVICE_ACCOUNT_DIR = pathlib.Path(sys.argv.pop(1))
sys.exit(main())
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's record of one step."""

    number: int
    world: int


@dataclass(frozen=True, slots=True)
class Left:
    """One notice: seconds until the node was saved and drained, and steps trained twice or not at all."""

    seconds: float
    lost: int


class Service:
    """A stand-in of one service; `answers` may change at any time."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        self.answers = dict(answers)
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = service.answers.get(self.path)
                self.send_response(404 if body is None else 200)
                self.end_headers()
                self.wfile.write((body or "").encode())

            def do_PUT(self) -> None:
                self.do_GET()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class NoticedJob:
    """The agents of one job in a folder; leaving it ends everything."""

    def __init__(self, args: argparse.Namespace, way: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="notices-", dir=args.scratch))
        account = self.folder / "account"
        account.mkdir()
        for name, text in (("token", "secret"), ("namespace", "ml")):
            (account / name).write_text(text)
        self.agent = [sys.executable, "-c", AGENT, str(account), "run"]
        self.script = [str(SCRIPT), "--directory", str(self.folder), "--way", way, "--megabytes", str(args.megabytes)]
        self.environment = {**ELASTICD.full_environment(), "POD_NAME": "pod-3"}
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> NoticedJob:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        end_all()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, command: list[str], **more: str) -> subprocess.Popen[bytes]:
        with (self.folder / "output.log").open("ab") as output:
            environment = {**self.environment, **more}
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=self.folder)
        self.processes.append(process)
        return process

    def node(self, *options: str) -> subprocess.Popen[bytes]:
        return self.start([*self.agent, "--checkpoint-dir", str(self.folder / "checkpoints"), *options, *self.script])

    def steps(self) -> list[Step]:
        """All records so far, in the order of time."""
        lines = [line.split() for path in self.folder.glob("steps-*.log") for line in path.read_text().splitlines()]
        whole = sorted((words for words in lines if len(words) == 7), key=lambda words: float(words[1]))
        return [Step(int(words[0]), int(words[3])) for words in whole]

    def saved(self) -> int:
        """The step of the newest checkpoint."""
        names = (path.name.partition("-s")[2] for path in self.folder.glob("checkpoints*/r*-s*"))
        return max((int(name) for name in names if name.isdigit()), default=0)

    def wait(self, true: Callable[[], bool]) -> float:
        """Until it is true; returns when that was."""
        deadline = time.monotonic() + DEADLINE_S
        while not true():
            if time.monotonic() > deadline:
                raise SystemExit((self.folder / "output.log").read_text()[-3000:])
            time.sleep(0.01)
        return time.monotonic()

    def train(self, world: int) -> None:
        self.wait(lambda: sum(step.world == world for step in self.steps()) > STEPS_BEFORE * world)


def alone(args: argparse.Namespace, service: Service, name: str, notice: Mapping[str, str]) -> Left:
    with NoticedJob(args, "restart") as job:
        node = job.node("--nproc-per-node", "2", "--preemption-notices", f"{name}={service.url}")
        job.train(2)
        at = time.monotonic()
        service.answers |= notice
        seconds = job.wait(lambda: node.poll() is not None) - at
        if node.returncode != 128 + signal.SIGTERM:
            raise SystemExit((job.folder / "output.log").read_text()[-3000:])
        return Left(seconds, abs(max(step.number for step in job.steps()) - job.saved()))


def in_place(args: argparse.Namespace, service: Service, name: str, notice: Mapping[str, str]) -> Left:
    with NoticedJob(args, "in place") as job:
        meet = f"--nnodes 1:2 --rdzv-id j --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_ports(1)[0]}".split()
        job.node(*meet, "--node-id", "stays", "--rdzv-conf", "is_host=1")
        asks = ("--preemption-notices", f"{name}={service.url}")
        leaves = job.node(*meet, "--node-id", "leaves", "--rdzv-conf", "is_host=0", *asks)
        job.train(2)
        at = time.monotonic()
        service.answers |= notice
        seconds = job.wait(lambda: leaves.poll() is not None) - at
        # The first node may have trained alone until the second one joined.
        job.wait(lambda: job.steps()[-1].world == 1)
        steps = job.steps()
        both = max(step.number for step in steps if step.world == 2)
        begun = next(at for at in range(len(steps) - 1, -1, -1) if steps[at].world == 2) + 1
        # The ranks leave at the end of a step, inside of `session.step()`: that one is trained, saved and not recorded.
        skipped = steps[begun].number - both - 1
        return Left(seconds, 0 if skipped in (0, 1) else abs(skipped))


def slurm(args: argparse.Namespace) -> Left:
    with NoticedJob(args, "restart") as job:
        commands = job.folder / "bin"
        commands.mkdir()
        for name, text in {"srun": SLURM, "scancel": SLURM, "scontrol": SLURM, "real": REAL}.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        given = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
        given |= {"SLURM_SUBMIT_DIR": str(job.folder), "GPUS": "1 1", "ELASTICD": "real"}
        told = job.folder / "told"
        path = f"{commands}:{os.environ['PATH']}"
        shell = job.start(["bash", str(BATCH), *job.script], PATH=path, TOLD=str(told), **given)
        job.train(2)
        at = time.monotonic()
        shell.send_signal(signal.SIGUSR1)
        seconds = job.wait(lambda: "scontrol requeue 4711" in told.read_text()) - at
        return Left(seconds, abs(max(step.number for step in job.steps()) - job.saved()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", nargs="+", choices=(*QUIET, "slurm"), default=[*QUIET, "slurm"])
    parser.add_argument("--megabytes", type=float, default=300)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    adopt_orphans()
    first = {name: answers for name, answers, _ in reversed(NOTICES)}
    print(report.machine_line(report.machine()), "", sep="\n")
    print("| seconds until saved and drained: median (max) | alone | steps lost | in place | steps lost |")
    print("|---|---|---|---|---|", flush=True)
    bad = False
    for name in args.services:
        ways: list[Callable[[], Left]] = [functools.partial(slurm, args)] if name == "slurm" else []
        if name != "slurm":
            ways = [functools.partial(with_service, kind, args, name, first[name]) for kind in (alone, in_place)]
        cells = []
        for way in ways:
            found = [way() for _ in range(args.times)]
            seconds = [one.seconds for one in found]
            bad |= max(seconds) > MAX_S or any(one.lost for one in found)
            cells += [f"{statistics.median(seconds):.2f} ({max(seconds):.2f})", str(max(one.lost for one in found))]
        print(f"| {name} | {' | '.join([*cells, '–', '–'][:4])} |", flush=True)
    sys.exit(bad)


def with_service(
    way: Callable[[argparse.Namespace, Service, str, Mapping[str, str]], Left],
    args: argparse.Namespace,
    name: str,
    notice: Mapping[str, str],
) -> Left:
    with ExitStack() as stack:
        service = Service(QUIET[name])
        stack.callback(service.close)
        return way(args, service, name, notice)


if __name__ == "__main__":
    main()
