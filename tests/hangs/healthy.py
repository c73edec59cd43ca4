"""Healthy jobs that wait: none of them is killed, and none is lost. One table for the benchmark and the tests.

Each is a run of scripts/waits.py under the default policy: with a session, within its `run`, and without one. What a
script cannot do to itself (`harm`) is done from outside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.job import Job, descendants, until
from tests.hangs import harms
from tests.hangs.situations import SCRIPTS

SCRIPT = SCRIPTS / "waits.py"
WAIT_AT = 220
"""As in the script."""
AROUND_S = 600.0
"""What a job takes at most beside its wait: 300 s at a load of 100 on 2 cores. It bounds a run, it measures nothing."""
QUICK_S = 20.0


@dataclass(frozen=True, slots=True)
class HealthyWait:
    """`place`, `use` and `seconds` are waits.py's. `kills`: so many may happen with a session, in an idle wait of more
    than 60 s; without one none may. `in_all_s`: of a wait that happens several times. `busy`: it needs a processor for
    most of the time. `harm`: what is done from outside, or must be there. `faults`: restarts that the script asks for.
    """

    name: str
    place: str
    use: str
    seconds: float
    kills: int = 0
    workers: int = 2
    in_all_s: float = 0.0
    busy: bool = False
    args: tuple[str, ...] = ()
    harm: str = ""
    flags: tuple[str, ...] = ()
    faults: int = 0

    @property
    def wait_s(self) -> float:
        return self.in_all_s or self.seconds

    def missing(self) -> str:
        """Why this machine cannot run it; "" if it can."""
        return _MISSING[self.harm]() if self.harm in _MISSING else ""


HEALTHY = (
    HealthyWait("first step of 90 s, compiling", "first", "compile", 90, busy=True),
    HealthyWait("first step of 90 s, idle", "first", "idle", 90),
    HealthyWait("evaluation of 30 s on all, computing", "all", "compute", 30, busy=True),
    HealthyWait("evaluation of 30 s on all, idle", "all", "idle", 30),
    HealthyWait("evaluation of 30 s on all, 30 ms of CPU in 100", "all", "trickle", 30),
    HealthyWait("evaluation of 40 s on rank 0, others in a barrier, computing", "barrier", "compute", 40, busy=True),
    HealthyWait("evaluation of 40 s on rank 0, others in a barrier, idle", "barrier", "idle", 40),
    HealthyWait("evaluation of 40 s on rank 0, others in a barrier, 30 ms of CPU in 100", "barrier", "trickle", 40),
    HealthyWait("upload of 45 s by rank 0", "rank0", "send", 45),
    HealthyWait("request of 45 s by rank 0", "rank0", "ask", 45),
    HealthyWait("download of 8 s by rank 0, 1 MB/s", "rank0", "receive", 8),
    HealthyWait("download of 70 s by rank 0, 1 MB/s", "rank0", "receive", 70),
    HealthyWait("export of 20 s at the end, idle", "end", "idle", 20),
    HealthyWait("export of 75 s at the end, computing", "end", "compute", 75, busy=True),
    HealthyWait("export of 75 s at the end, uploading", "end", "send", 75),
    HealthyWait("export of 75 s at the end, idle", "end", "idle", 75),
    HealthyWait("export of 20 s in atexit, idle", "atexit", "idle", 20),
    HealthyWait("export of 90 s in atexit, computing", "atexit", "matmul", 90, busy=True),
    HealthyWait("export of 90 s in atexit, downloading", "atexit", "receive", 90),
    HealthyWait("four polling lines of 0.5 s, for 45 s", "rank0", "poll", 45),
    HealthyWait("DataLoader worker_init of 8 s in every epoch", "loader", "idle", 8, in_all_s=24),
    HealthyWait("DataLoader workers with 4 % of a processor", "items", "process-time", 0.2, in_all_s=80, harm="quota"),
    HealthyWait("rollouts of 0.05 to 40 s", "rollouts", "idle", 40, in_all_s=150),
    HealthyWait("step of 120 s after 200 quick ones, computing", "all", "compute", 120, busy=True),
    HealthyWait("step of 120 s after 200 quick ones, idle", "all", "idle", 120, kills=1),
    HealthyWait("in-loop validation of 6 s on all in .item()", "all", "item", 6),
    HealthyWait("new communicator at step 1000, rank 1 20 s late", "communicator", "matmul", 20, in_all_s=60),
    HealthyWait("group timeout of 20 s, 45 s of computing", "all", "compute", 45, busy=True, args=("--timeout", "20")),
    HealthyWait("barrier of 70 s in a new group, computing", "group", "compute", 70, busy=True),
    HealthyWait("barrier of 70 s in a new group, idle", "group", "idle", 70),
    HealthyWait("pdb for 75 s", "rank0", "pdb", 75),
    HealthyWait("code.interact for 75 s", "rank0", "console", 75),
    HealthyWait("py-spy for 30 s", "nowhere", "idle", 30, harm="py-spy"),
    HealthyWait("gdb for 70 s", "nowhere", "idle", 70, harm="gdb"),
    HealthyWait("suspended for 30 s", "nowhere", "idle", 30, harm="suspend"),
    HealthyWait("SIGSTOP for 2 s", "nowhere", "idle", 2, harm="stop"),
    HealthyWait("1 % of a processor for 40 s", "nowhere", "idle", 40, harm="throttle"),
    HealthyWait("thrashing in swap", "nowhere", "idle", 30, harm="swap"),
    HealthyWait("stdout blocked for 90 s", "all", "print", 0, in_all_s=120, harm="stdout"),
    # What other scripts do.
    HealthyWait("tokenizer in a child of rank 0, others in a barrier", "barrier", "child-computes", 40, busy=True),
    HealthyWait("idle child of rank 0, 40 s", "rank0", "child", 40),
    HealthyWait("data prepared by rank 0, others wait in the store", "store", "matmul", 40, busy=True),
    HealthyWait("cache filled under a file lock, idle", "lock", "idle", 40),
    HealthyWait("20 micro-steps of 1 s in no_sync", "accumulation", "idle", 60, in_all_s=60),
    HealthyWait("thread computes, main thread waits", "rank0", "thread", 40, busy=True),
    HealthyWait("GIL held by a call that computes for 20 s", "rank0", "gil", 20, busy=True),
    HealthyWait("GIL held by a call that sleeps for 10 s", "rank0", "gil-idle", 10),
    HealthyWait("slow file server through a pipe, 40 s", "rank0", "pipe", 40),
    HealthyWait("retries with backoff for 50 s", "rank0", "backoff", 50),
    HealthyWait("asyncio for 40 s on all", "all", "asyncio", 40),
    HealthyWait("checkpoint to a slow disk, 40 s, others in a barrier", "barrier", "fsync", 40),
    HealthyWait("checkpoint uploaded by rank 0, others wait in the store", "store", "send", 45),
    HealthyWait("evaluation of 50 s on rank 0 only, 30 ms of CPU in 100", "rank0", "trickle", 50),
    HealthyWait("a request of 40 s, then a child of 40 s", "rank0", "two", 80),
    HealthyWait("upload by a thread, main thread joins it", "rank0", "thread-sends", 45),
    HealthyWait("shuffling in one call of native code on all, 15 s", "all", "gil", 15, busy=True),
    HealthyWait("DataLoader workers idle for 25 s a batch", "slow-items", "idle", 25, in_all_s=75),
    HealthyWait(
        "uneven inputs: rank 1 is done, rank 0 takes 20 s a step", "join", "matmul", 20, in_all_s=60, busy=True
    ),
    HealthyWait("uneven inputs: rank 1 is done, rank 0 waits 20 s a step", "join", "idle", 20, in_all_s=60),
    HealthyWait("monitored_barrier of 45 s, idle", "monitored", "idle", 45),
    HealthyWait("metrics gathered as objects after 40 s on rank 0", "objects", "ask", 40),
    HealthyWait("pool of processes computes, rank 0 waits", "barrier", "pool", 30, busy=True),
    HealthyWait("pause of 55 s on all", "all", "idle", 55),
    HealthyWait(
        "pair of ranks waits 30 s for one of its own, third rank in another collective", "pair", "idle", 30, 0, 3
    ),
    HealthyWait("thread of rank 1 saves for 30 s and then reduces in a group of its own", "async-save", "idle", 30),
    HealthyWait("thread of rank 1 saves for 75 s and then reduces in a group of its own", "async-save", "idle", 75),
    HealthyWait("torch.compile in the first step", "first", "inductor", 30, busy=True, harm="inductor"),
    # Ranks that legitimately differ.
    HealthyWait("unequal all_to_all, rank 1 20 s late", "all-to-all", "idle", 20, workers=3),
    HealthyWait("scatter, rank 1 20 s late", "scatter", "idle", 20, workers=3),
    HealthyWait("gather, rank 1 20 s late", "gather", "idle", 20, workers=3),
    HealthyWait("uneven all_gather by broadcasts, rank 1 20 s late", "uneven", "idle", 20, workers=3),
    HealthyWait("gather as the last act, last rank 25 s late", "last-gather", "idle", 25, workers=3),
    HealthyWait("receive from a process outside of the job after 90 s", "engine", "idle", 90),
    HealthyWait("rank 0 meets a process outside of the job that starts 75 s late", "slow-engine", "idle", 75, kills=1),
    HealthyWait("collective in an exit handler after 25 s", "exit-barrier", "idle", 25),
    HealthyWait("a model per rank, one barrier, 70 s apart", "own-models", "probe", 70),
    HealthyWait("linear probe of 70 s on rank 0", "rank0", "probe", 70),
    HealthyWait("local SGD, rank 1 slower by 65 s", "local-sgd", "probe", 65, in_all_s=130),
    HealthyWait("learner of six functions for 80 s, actors wait", "barrier", "learner", 80),
    HealthyWait("monitored_barrier(600 s), rank 1 80 s late", "monitored-late", "idle", 80),
    # What a kill would cost.
    HealthyWait("--max-restarts 0, idle for 100 s", "rank0", "idle", 100, flags=("--max-restarts", "0")),
    HealthyWait("90 s of sleep after a restart", "start-again", "idle", 90, faults=1),
    HealthyWait("idle child of rank 0, 80 s", "rank0", "child", 80, kills=1),
    HealthyWait("lock of another job's cache, 80 s", "all", "foreign-lock", 80, kills=1),
    HealthyWait("pauses of 70 s, twice", "pauses", "idle", 70, kills=1, in_all_s=140),
    HealthyWait("retry after 65 s", "rank0", "idle", 65, kills=1),
    # What counts as moving.
    HealthyWait("pool of threads that asks a server for 80 s", "rank0", "asking-pool", 80),
    HealthyWait("upload of 30 kB/s for 80 s", "rank0", "drip", 80),
    HealthyWait("judge that answers 1 kB each 1.5 s, for 80 s", "rank0", "judge", 80),
    HealthyWait("all_reduce at 2 Mbit/s for 80 s", "slow-link", "idle", 80),
    HealthyWait("input() for 75 s", "rank0", "input", 75),
    HealthyWait("dlopen of 25 s under the GIL", "rank0", "dlopen", 25, harm="cc"),
    HealthyWait("SIGSTOP of all ranks for 30 s", "nowhere", "idle", 30, harm="stop-all"),
)
SCRIPT_KINDS = ("session", "run", "plain")
"""With a session, with its training within session.run(), and with no word of elasticd."""
BY_NAME = {wait.name: wait for wait in HEALTHY}
QUICK = [wait for wait in HEALTHY if wait.wait_s <= QUICK_S and not wait.busy]


@dataclass(slots=True)
class HealthyOutcome:
    """One run. `killed`: the sentence of every verdict. `restarts`: rounds after the first. `code` None: no end."""

    name: str
    script: str
    allowed: int
    killed: list[str] = field(default_factory=list)
    reported: int = 0
    suspected: int = 0
    faults: int = 0
    restarts: int = 0
    code: int | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of all processes of the job that were waited for by their parents."""
    wrong: str = ""

    @property
    def lost(self) -> bool:
        return self.code != 0

    @property
    def ok(self) -> bool:
        return not self.lost and not self.wrong and max(len(self.killed), self.restarts - self.faults) <= self.allowed


def observe(wait: HealthyWait, script: str, folder: Path, flags: Sequence[str] = ()) -> HealthyOutcome:
    """Runs the job to its end, or until it has taken far too long."""
    outcome = HealthyOutcome(wait.name, script, wait.kills if script != "plain" else 0, faults=wait.faults)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        env = {"SLOW_SERVER": str(stack.enter_context(harms.slow_server()))}
        if wait.harm == "quota":
            env["QUOTA"] = str(stack.enter_context(harms.quota(0.04)))
        if wait.harm == "stdout":
            stack.enter_context(_blocked_output(folder, after_s=wait.wait_s))
        job = _start(wait, script, folder, flags, env)
        stack.callback(job.end)
        try:
            if (harm := _HARMS.get(wait.harm)) is not None:
                _trains(job, WAIT_AT)
                harm(job, wait.seconds)
                _trains(job, max(job.steps())[1] + 20)
                (job.work / "enough").touch()
            until(lambda: _ended(job.pid), wait.name, AROUND_S + (2 + wait.kills) * wait.wait_s)
            outcome.cpu_s = _cpu_s(job.pid)
            outcome.code = job.wait()
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            outcome.wrong = str(error).splitlines()[0]
        outcome.wall_s = time.monotonic() - began
        outcome.killed = [str(event["reason"]) for event in job.events("hang_detected", action="restart")]
        outcome.reported = len(job.events("hang_detected", action="report"))
        outcome.suspected = len(job.events("hang_suspected"))
        outcome.restarts = len({event["round"] for event in job.events("group_started")}) - 1
    return outcome


def _start(wait: HealthyWait, script: str, folder: Path, flags: Sequence[str], env: dict[str, str]) -> Job:
    logs = [] if wait.harm == "stdout" else ["--log-dir", str(folder / "log")]  # or the output would go to files
    flags = [
        *flags,
        *wait.flags,
        *logs,
        *(["--checkpoint-dir", str(folder / "checkpoints")] if script != "plain" else []),
    ]
    args = [wait.place, wait.use, f"{wait.seconds:g}", *wait.args, *([f"--{script}"] if script != "plain" else [])]
    return Job(folder, SCRIPT, *args, workers=str(wait.workers), flags=flags, env=env)


def _trains(job: Job, step: int) -> None:
    until(lambda: step <= max((done for _, done in job.steps()), default=0), f"step {step}", AROUND_S)


def _ended(pid: int) -> bool:
    """It stays a zombie, so that its processor time can be read."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _cpu_s(pid: int) -> float:
    """proc(5): utime, stime, cutime and cstime in clock ticks."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _blocked_output(folder: Path, after_s: float) -> Iterator[None]:
    """The job's standard output is a pipe that nobody reads for so long."""
    folder.mkdir(parents=True)
    os.mkfifo(folder / "out")
    reader = os.open(folder / "out", os.O_RDONLY | os.O_NONBLOCK)
    over = threading.Event()

    def read() -> None:
        over.wait(after_s)
        while not over.wait(0.01):
            with contextlib.suppress(BlockingIOError):
                while os.read(reader, 1 << 16):
                    pass

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.close(reader)
        (folder / "out").unlink()


def _throttle(job: Job, seconds: float) -> None:
    with harms.quota(0.01) as group:
        harms.enter(group, [job.pid, *descendants(job.pid)])
        time.sleep(seconds)


_HARMS: dict[str, Callable[[Job, float], None]] = {
    "stop": lambda job, seconds: harms.stop([job.worker(1)], seconds),
    "stop-all": lambda job, seconds: harms.stop([job.worker(0), job.worker(1)], seconds),
    "suspend": harms.suspend,
    "py-spy": lambda job, seconds: harms.profile(job.worker(1), seconds),
    "gdb": lambda job, seconds: harms.debug(job.worker(1), seconds),
    "throttle": _throttle,
}


def _no_swap() -> str:
    swap = len(Path("/proc/swaps").read_text().splitlines()) > 1
    return "" if swap else "this machine has no swap"


_MISSING: dict[str, Callable[[], str]] = {
    "quota": harms.no_quota,
    "throttle": harms.no_quota,
    "swap": _no_swap,
    "inductor": lambda: "" if shutil.which("g++") else "g++ is not installed",
    "cc": lambda: "" if shutil.which("cc") else "no C compiler is installed",
    "gdb": lambda: "" if shutil.which("gdb") else "gdb is not installed",
}
