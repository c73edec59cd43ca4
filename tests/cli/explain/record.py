"""Records the evidence beside this file from real jobs: `python -m tests.cli.explain.record [NAME ...]`.

Each recording is a log directory as `elasticd run --log-dir D --event-log D/events.jsonl` leaves it, without the
workers' logs and with this machine's paths replaced. Pages change with every recording: look at them, commit both.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.faults.job import REPOSITORY, Job
from tests.hangs.situations import BY_NAME, SCRIPTS, SESSION

HERE = Path(__file__).parent
FLAGS = ("--hang-floor", "1s", "--stopped-after", "1s", "--hang-factor", "2", "--rdzv-id", "llama")
STEP = 30

NAMES = {
    "stopped": "stopped of 4",
    "skipped": "skips a collective",
    "loader": "dead-locked DataLoader worker",
    "nodes": "stopped of 4",
    "dumped": "stopped",
}
"""A folder's name here -> the situation's in tests/hangs/situations.py.

`nodes` has two nodes with one log directory, and in `dumped` nothing goes wrong.
"""


def record(name: str) -> None:
    situation = BY_NAME[NAMES[name]]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as jobs:
        work = Path(directory) / "job"
        script = written(work)
        flags = [*FLAGS, "--log-dir", str(work / "log"), "--checkpoint-dir", str(work / "checkpoints"), "--tee", "3"]
        flags += situation.flags("3s")
        faults = [] if name == "dumped" else situation.faults(STEP, round=1)

        def start(*more: str, workers: int = situation.workers) -> Job:
            job = Job(work, script, *situation.args, workers=str(workers), flags=[*flags, *more], faults=faults)
            jobs.callback(job.end)
            return job

        if name == "nodes":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                endpoint = f"127.0.0.1:{free.getsockname()[1]}"
            meet = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--node-id"]
            start(*meet, "node-b", workers=2)
            job = start(*meet, "node-a", workers=2)
        else:
            job = start()
        if name == "dumped":
            job.step(STEP)
            subprocess.run([sys.executable, "-m", "elasticd_agent", "dump", "--pid", str(job.pid)], check=True)
        else:
            job.event("first_step", round=2)
        jobs.close()
        keep(work, HERE / name)


def written(work: Path) -> Path:
    """The toy and its modules, in `work`; it says something now and then, as training scripts do."""
    work.mkdir()
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, work)
    text = (SCRIPTS / SESSION).read_text()
    told = text.replace("mishaps.finished(", 'print(f"step {step} done", flush=True)\n        mishaps.finished(')
    (work / "train.py").write_text(told)
    return work / "train.py"


def keep(work: Path, kept: Path) -> None:
    shutil.rmtree(kept, ignore_errors=True)
    for folder in ("evidence", "dump"):
        if (work / "log" / "round-1" / folder).exists():
            shutil.copytree(work / "log" / "round-1" / folder, kept / "round-1" / folder)
    shutil.copy(work / "events.jsonl", kept)
    for path in [path for path in kept.rglob("*") if path.is_file()]:
        if path.name.endswith(".flight.json"):  # its end is in the record
            path.unlink()
            continue
        path.chmod(0o644)
        path.write_text(elsewhere(path.read_text(), work))
        path.rename(path.with_name(elsewhere(path.name, work)))


def elsewhere(text: str, work: Path) -> str:
    """The text as another machine would have written it."""
    packages = sysconfig.get_paths()["purelib"]
    for here, there in (
        (packages, "/venv/lib/python3/site-packages"),
        (str(Path(packages).parents[2]), "/venv"),
        (sysconfig.get_paths()["stdlib"], "/usr/lib/python3.11"),
        (str(Path(sysconfig.get_paths()["stdlib"]).parents[1]), "/usr"),
        (str(work), "/job"),
        (str(REPOSITORY / "tests" / "hangs" / "scripts"), "/job"),
        (str(REPOSITORY / "agents"), "/venv/lib/python3/site-packages"),
        (str(REPOSITORY), "/venv/lib/python3/site-packages"),
    ):
        text = text.replace(here, there)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node-a", text)


if __name__ == "__main__":
    for one in sys.argv[1:] or NAMES:
        record(one)
        print(one)
