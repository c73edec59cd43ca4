"""Every way in which a job ends, beside every kind of child that a worker may have: nothing is left, in bounded time.

docs/endings.md has ENDINGS as a table.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGSTOP, SIGTERM, SIGUSR1

import pytest

from elasticd.sigterm import TOGETHER_S
from elasticd_agent.job.run import remove_stale_directories
from tests.etcd import free_ports
from tests.faults.conftest import StartJob
from tests.faults.containers import as_process_1, memory_limit
from tests.faults.job import PATIENCE_S, REPOSITORY, SCRIPTS, Job, comm_of, until
from tests.faults.test_checkpoints import unfinished

pytestmark = pytest.mark.timeout(8 * PATIENCE_S)

SHM = Path("/dev/shm")
CHILDREN = {"saves": 1, "compiles": 2, "loads": 2, "daemon": 1, "shell": 2, "fifo": 2}
WITHIN_S = 30.0
"""Three times what the page promises, after the time that workers have to stop: the machine may be crowded."""
DEAF = ("children.py", "deaf")
PATIENT = ("--shutdown-timeout", "600")


def pids_within(run: Job) -> dict[int, int]:
    """Every process of the job, by its pid in its own namespace."""
    found = {}
    for pid in run.processes():
        with contextlib.suppress(OSError):
            found[int(Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1])] = pid
    return found


def agent(run: Job) -> int:
    return pids_within(run).get(1, run.pid)


# --- what is there when the job ends


def children(run: Job, but: str = "") -> None:
    """Every kind of them, each where it should be."""
    run.file("ready-1", 4 * PATIENCE_S)  # torch is imported three times

    def missing() -> list[str] | Counter[str]:
        there, said = pids_within(run), [line.split() for line in run.file("children").splitlines()]
        wanted = Counter({kind: count for kind, count in CHILDREN.items() if kind != but})
        if missing := wanted - Counter(kind for kind, _ in said):
            return missing
        return [
            f"{kind} {pid}"
            for kind, pid in said
            if int(pid) not in there or (kind == "fifo" and comm_of(there[int(pid)]) != "cat")
        ]

    until(lambda: not missing(), lambda: f"children: {missing()}")


def a_daemon(run: Job) -> None:
    run.file("family")


def template(run: Job) -> None:
    """It imports torch."""
    run.helper("templ")
    assert not run.events("group_started")


def imports(run: Job) -> None:
    run.file("importing")


def lonely(run: Job) -> None:
    until(lambda: "1 of at least 2 nodes present" in run.err, "the wait for nodes")


def writer(run: Job) -> None:
    """It is stopped in the middle of a checkpoint."""
    run.step(5)
    names = until(lambda: unfinished(run.work / "checkpoints"), "a checkpoint being written")
    os.kill(run.helper("writer"), SIGSTOP)
    assert names & unfinished(run.work / "checkpoints"), "it was too fast"


# --- how it ends


def to_agent(signum: int) -> Callable[[Job], None]:
    return lambda run: os.kill(agent(run), signum)


def nothing(run: Job) -> None:
    """The script ends by itself."""


def agent_and_owner_killed(run: Job) -> None:
    owner = run.helper("owner")
    os.kill(owner, SIGSTOP)  # it cannot clean up between the two
    run.process.kill()
    os.kill(owner, SIGKILL)


def agent_killed(run: Job) -> None:
    """The next job starts before the owner has ended this one: the directory in memory is still in use."""
    owner = run.helper("owner")
    os.kill(owner, SIGSTOP)
    run.process.kill()
    run.process.wait()
    remove_stale_directories(SHM)
    assert run.memory()
    os.kill(owner, SIGCONT)


def ctrl_c(run: Job) -> None:
    os.killpg(run.pid, SIGINT)


def ctrl_c_and_on(run: Job) -> None:
    ctrl_c(run)
    run.event("stop_requested")
    os.kill(run.helper("writer"), SIGCONT)


def twice(once: Callable[[Job], None]) -> Callable[[Job], None]:
    def fire(run: Job) -> None:
        once(run)
        run.event("stop_requested", grace_seconds=600.0)
        time.sleep(2 * TOGETHER_S)
        once(run)

    return fire


def error(run: Job) -> None:
    (run.work / "error").touch()
    run.event("worker_exited", exit_code=1)


def to_everybody(*signals: int) -> Callable[[Job], None]:
    def fire(run: Job) -> None:
        everybody = list(run.processes())
        for signum in signals:
            for pid in everybody:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)

    return fire


def pod_deleted(run: Job) -> None:
    to_agent(SIGTERM)(run)
    run.event("stop_requested", grace_seconds=600.0)
    children(run)
    to_agent(SIGKILL)(run)


def out_of_memory(run: Job) -> None:
    with memory_limit(64) as group:
        (group / "cgroup.procs").write_text(str(run.worker(0)))
        (run.work / "hungry").touch()
        run.event("worker_exited", signal=int(SIGKILL))
        until(lambda: not (group / "cgroup.procs").read_text(), "an empty control group")
        (counts,) = (group / name for name in ("memory.oom_control", "memory.events") if (group / name).exists())
        assert re.search(r"^oom_kill [1-9]", counts.read_text(), re.M)


def worker_or_owner(name: str) -> Callable[[Job], None]:
    """The job goes on: nothing of the old group is left when the new one starts, which is then stopped."""

    def fire(run: Job) -> None:
        old = run.processes().keys() - {run.pid, run.helper("owner"), run.helper("templ")}
        os.kill(run.worker(0) if name == "worker" else run.helper("owner"), SIGKILL)
        run.event("group_started", round=2)
        assert not old & run.processes().keys()
        assert not shared(run)
        run.file("ready-2")
        assert len(run.file("family").split()) == 2, "a daemon in each round"
        run.process.terminate()

    return fire


@dataclass(frozen=True)
class Ending:
    """One row: `fire` ends a job that `begun` has waited for."""

    name: str
    code: int  #: of `elasticd run`; -n: it was killed by signal n, in a shell 128 + n
    fire: Callable[[Job], None]
    begun: Callable[[Job], None] = children
    script: Sequence[str] = ("children.py",)
    flags: Sequence[str] = ("--shutdown-timeout", "1")
    prefix: Callable[[], list[str]] = lambda: ["setsid"]
    left: Sequence[str] = ()  #: what files in /dev/shm begin with
    quick: bool = False


COLD = "${local_rank}"
ENDINGS = (
    Ending("success, and a daemon is left", 0, nothing, a_daemon, ("plain.py", COLD, "daemon"), quick=True),
    Ending("success, and a daemon ignores SIGTERM", 0, nothing, a_daemon, ("plain.py", COLD, "deaf daemon")),
    Ending("SIGTERM", 128 + SIGTERM, to_agent(SIGTERM)),
    Ending("Ctrl-C in its terminal", 128 + SIGINT, ctrl_c),
    Ending("SIGHUP", 128 + SIGHUP, to_agent(SIGHUP)),
    Ending("SIGUSR1, named in `--signals-to-handle`", 128 + SIGUSR1, to_agent(SIGUSR1),
           flags=("--signals-to-handle", "SIGUSR1")),
    Ending("SIGQUIT", 128 + SIGQUIT, to_agent(SIGQUIT)),
    Ending("SIGTERM twice, and nothing heeds it", 128 + SIGTERM, twice(to_agent(SIGTERM)), script=DEAF, flags=PATIENT),
    Ending("Ctrl-C twice, and nothing heeds it", 128 + SIGINT, twice(ctrl_c), script=DEAF, flags=PATIENT),
    Ending("SIGTERM, and the worker is a shell that waits for the script", 128 + SIGTERM, to_agent(SIGTERM),
           script=("sh", "-c", f"{sys.executable} {SCRIPTS / 'children.py'}; true"),
           flags=("--shutdown-timeout", "1", "--no-python")),
    Ending("an error of the script, with `--max-restarts 0`", 1, error, partial(children, but="saves"),
           ("children.py", "fails"), ("--max-restarts", "0")),
    Ending("a worker is killed for lack of memory, with `--max-restarts 0`", 1, out_of_memory,
           flags=("--max-restarts", "0")),
    Ending("`kill -9` of a worker, then SIGTERM", 128 + SIGTERM, worker_or_owner("worker"), quick=True),
    Ending("`kill -9` of the owner, then SIGTERM", 128 + SIGTERM, worker_or_owner("owner")),
    Ending("`kill -9` of the agent", -SIGKILL, agent_killed),
    Ending("`kill -9` of agent and owner at once, without children", -SIGKILL, agent_and_owner_killed, imports,
           ("importing.py", COLD)),
    Ending("SIGTERM to process 1 of a container", 128 + SIGTERM, to_agent(SIGTERM), prefix=as_process_1),
    Ending("a pod is deleted, and nothing heeds SIGTERM", -SIGKILL, pod_deleted,
           script=DEAF, flags=PATIENT, prefix=as_process_1),
    Ending("`scancel`: SIGTERM to every process", 128 + SIGTERM, to_everybody(SIGCONT, SIGTERM), left=["torch_"]),
    Ending("SIGKILL to every process at once", -SIGKILL, to_everybody(SIGKILL), left=["psm_", "sem.", "torch_"]),
    Ending("`kill -9` of the agent while torch is imported", -SIGKILL, to_agent(SIGKILL), template, ("train.py", "9"),
           quick=True),
    Ending("Ctrl-C while torch is imported", 128 + SIGINT, ctrl_c, template, ("train.py", "9"), quick=True),
    Ending("Ctrl-C while the script imports", 128 + SIGINT, ctrl_c, imports, ("importing.py", COLD),
           quick=True),
    Ending("Ctrl-C while nodes are waited for", 128 + SIGINT, ctrl_c, lonely, ("plain.py", COLD, "sleep"),
           ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:PORT", "--rdzv-id", "lonely"),
           quick=True),
    Ending("Ctrl-C while a checkpoint is written", 128 + SIGINT, ctrl_c_and_on, writer,
           ("resume.py", "--steps", "100000", "--every", "5", "--ballast", str(1 << 26)),
           ("--checkpoint-dir", "checkpoints")),
)  # fmt: skip


def shared(run: Job) -> set[str]:
    """Files in /dev/shm that the worker and its children have made there."""
    pids = {line.split()[1] for line in run.file("children").splitlines()} if (run.work / "children").exists() else ()
    named = set((run.work / "shared").read_text().split()) if (run.work / "shared").exists() else set()
    return {
        name for name in os.listdir(SHM) if name in named or name.startswith(tuple(f"torch_{pid}_" for pid in pids))
    }


@pytest.mark.parametrize(
    "ending",
    [pytest.param(one, id=one.name, marks=[] if one.quick else pytest.mark.system) for one in ENDINGS],
)
def test_nothing_is_left(job: StartJob, ending: Ending) -> None:
    with tempfile.TemporaryDirectory(prefix="e-") as short:  # multiprocessing has its sockets there
        check_ending(job, Path(short), ending)


def check_ending(job: StartJob, temporary: Path, ending: Ending) -> None:
    flags = [flag.replace("PORT", str(free_ports(1)[0])) for flag in ending.flags]
    run = job(*ending.script, workers="1", flags=flags, prefix=ending.prefix(), env={"TMPDIR": str(temporary)})
    ending.begun(run)
    ending.fire(run)
    started = time.monotonic()
    code = run.process.wait(WITHIN_S)
    # unshare fails after the SIGKILL of its child, which it wants to end by as well.
    assert code == ending.code or "unshare: sigprocmask unblock failed" in run.err, run.report()
    until(lambda: not run.processes(), lambda: f"the end of {run.processes()}", WITHIN_S - time.monotonic() + started)
    remove_stale_directories(SHM)  # as the next job does: where all were killed, nobody else is left to do it
    run.assert_gone()
    left = shared(run)
    for name in left:
        (SHM / name).unlink()
    assert {re.split("(?<=[_.])", name)[0] for name in left} == set(ending.left)
    # Python leaves a directory "pymp-" of each process that was killed, without memory, as under torchrun. A pod has
    # a temporary directory of its own. Evidence goes here where the log directory does not answer within a second.
    kept = (
        "pymp-",
        "torchinductor_",
        "elasticd-evidence-",
        *["torch-shm-dir-"] * bool(ending.left or ending.fire is pod_deleted),
    )
    assert [one.name for one in temporary.iterdir() if not one.name.startswith(kept)] == []
    assert not (run.work / "checkpoints").exists() or not unfinished(run.work / "checkpoints")


def test_page_has_every_ending() -> None:
    rows = re.findall(r"^\| (.+) \| (\d+) \| (.+) \|$", (REPOSITORY / "docs" / "endings.md").read_text(), re.M)
    codes = {one.name: str(one.code if one.code >= 0 else 128 - one.code) for one in ENDINGS}
    left = {one.name: ", ".join(f"`{start}…`" for start in one.left) or "–" for one in ENDINGS}
    assert rows == [(name, codes[name], left[name]) for name in codes]


INTERRUPTS_ITSELF = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "elasticd_agent.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
from elasticd_agent.__main__ import main
sys.meta_path.insert(0, Finder())
main()
"""


@pytest.mark.parametrize(("prefix", "code"), [(list, -SIGINT), (as_process_1, 128 + SIGINT)])
def test_ctrl_c_while_elasticd_is_imported(prefix: Callable[[], list[str]], code: int) -> None:
    """For the first third of a second. The kernel drops what process 1 of a container has no handler for."""
    command = [*prefix(), sys.executable, "-c", INTERRUPTS_ITSELF, "--help"]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")
