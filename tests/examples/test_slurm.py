"""The batch script against stand-ins for Slurm: what it asks of srun, when it goes back into the queue, and when not.

`slurm` in PATH is one small program under the names srun, scancel and scontrol. Agents are real in the last test only;
before, a script plays them: it does what the test says in its `plays` file.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.examples.launching import REPOSITORY, Ran
from tests.faults.job import comm_of, descendants

BATCH = REPOSITORY / "examples" / "slurm.sbatch"
EXAMPLE = REPOSITORY / "examples" / "plain_with_elasticd.py"
JOB = "4711"

# As the real ones: srun ends with the highest code of its tasks; scancel --signal reaches tasks, not the batch shell,
# and without cgroups every process that came of a task; scontrol requeue ends the batch shell, too.
SLURM = f"""\
#!{sys.executable} -I
import os, signal, subprocess, sys, time
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
with open(os.environ["TOLD"], "a") as told:
    print(name, *arguments, file=told)
pids = os.environ["TOLD"] + ".pids"
if name == "srun":
    given = {{"kill-on-bad-exit": "1", "wait": "5"}}  # KillOnBadExit and WaitTime of this cluster's slurm.conf
    while arguments[0].startswith("--"):
        option, _, value = arguments.pop(0)[2:].partition("=")
        given[option] = value
    ran = []
    for n, gpus in enumerate(os.environ["GPUS"].split()):
        own = {{"SLURM_NODEID": str(n), **({{"SLURM_GPUS_ON_NODE": gpus}} if gpus != "none" else {{}})}}
        ran.append(subprocess.Popen(arguments, env={{**os.environ, **own}}))
    with open(pids + ".new", "w") as file:
        print(*(process.pid for process in ran), file=file)
    os.rename(pids + ".new", pids)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ended_at = 0.0
    while None in (codes := [process.poll() for process in ran]):
        ended_at = ended_at or time.monotonic() * any(code is not None for code in codes)
        is_bad = given["kill-on-bad-exit"] != "0" and any(codes)
        if is_bad or (given["wait"] != "0" and ended_at and time.monotonic() > ended_at + int(given["wait"])):
            [process.kill() for process in ran]
        time.sleep(0.02)
    sys.exit(max(code if code >= 0 else 128 - code for code in codes))
if name == "scancel":
    tree = [int(pid) for pid in open(pids).read().split()]
    for pid in tree:
        try:
            tree += [int(child) for child in open(f"/proc/{{pid}}/task/{{pid}}/children").read().split()]
            os.kill(pid, signal.Signals["SIG" + arguments[0].partition("=")[2]])
        except (FileNotFoundError, ProcessLookupError):
            pass
if arguments[:2] == ["show", "hostnames"]:
    print("localhost", "node2", sep="\\n")
if arguments[:1] == ["requeue"]:
    os.kill(os.getppid(), signal.SIGKILL)
"""
PLAYED = r"""\
#!/bin/bash
echo "node$SLURM_NODEID played $*" >> "$TOLD"
read -ra plays < "$TOLD.plays"
code=${plays[$SLURM_NODEID]:-${plays[0]}}
case $code in
    0) outcome=succeeded ;;
    1) outcome=failed ;;
    *) outcome=stopped ;;
esac
if [ "$code" != 137 ]; then echo "{\"kind\": \"job_ended\", \"outcome\": \"$outcome\"}" > "$5"; fi
trap 'exit 143' TERM
if [ "$code" = trains ]; then touch "$TOLD.trains"; while :; do sleep 0.01; done; fi
exit "$code"
"""
# Two agents on one machine need names of their own, which two nodes have.
REAL = f"""\
#!/bin/bash
shift
exec {sys.executable} -m elasticd_agent run --node-id "node$SLURM_NODEID" "$@"
"""

Submit = Callable[..., Ran]


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """Every call of a stand-in, one line each."""
    path = tmp_path / "told"
    path.touch()
    return path


@pytest.fixture
def submit(tmp_path: Path, told: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submit]:
    started: list[Ran] = []
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"slurm": SLURM, "played": PLAYED, "real": REAL}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    for name in ("srun", "scancel", "scontrol"):
        (commands / name).symlink_to("slurm")

    def run(*arguments: str, plays: str = "", elasticd: str = "played", restarts: int = 0, **more: str) -> Ran:
        Path(f"{told}.plays").write_text(plays)
        folder = tmp_path / f"run{len(started)}"
        folder.mkdir()
        for name in list(os.environ):
            if name.startswith("SLURM_"):
                monkeypatch.delenv(name)
        environment = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "TOLD": str(told),
            "ELASTICD": elasticd,
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "GPUS": "none none",
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
            **more,
        }
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            started.append(Ran(["bash", str(BATCH), *arguments], folder))
        return started[-1]

    yield run
    for ran in started:
        ran.end()


def requeued(told: Path) -> bool:
    return f"scontrol requeue {JOB}" in told.read_text().splitlines()


def test_slurm_agents_meet_on_first_node(submit: Submit, told: Path, tmp_path: Path) -> None:
    ran = submit("train.py", "--text", "two words", plays="0", SLURM_NTASKS_PER_NODE="4", SLURM_NTASKS="8")
    assert ran.wait() == 0
    lines = told.read_text().splitlines()
    srun = next(line for line in lines if line.startswith("srun "))
    assert srun.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill --wait=0 ")
    folder = tmp_path / f"checkpoints-{JOB}"
    rest = f"--nnodes 1:2 --rdzv-id {JOB} --rdzv-backend c10d --rdzv-endpoint localhost:24711 --checkpoint-dir {folder}"
    rest += " --shutdown-timeout 90 train.py --text two words"
    assert sorted(line for line in lines if " played " in line) == [
        f"node{n} played run --nproc-per-node auto --event-log {folder}/events-{JOB}-0-{n}.jsonl {rest}" for n in (0, 1)
    ]


def test_slurm_agents_meet_in_etcd(submit: Submit, told: Path, tmp_path: Path) -> None:
    folder = tmp_path / "of two words"
    more = {"RDZV_ENDPOINT": "etcd-1:2379,etcd-2:2379", "MIN_NODES": "2", "CHECKPOINTS": str(folder), "GPUS": "8 7"}
    assert submit("train.py", plays="0", **more).wait() == 0
    played = told.read_text()
    assert "node0 played run --nproc-per-node 8 " in played
    assert "node1 played run --nproc-per-node 7 " in played
    assert f"--nnodes 2:2 --rdzv-id {JOB} --rdzv-backend etcd --rdzv-endpoint etcd-1:2379,etcd-2:2379 " in played
    assert f" --checkpoint-dir {folder} " in played


def test_outside_slurm_prints_usage(submit: Submit) -> None:
    ran = submit("train.py", SLURM_JOB_ID="")
    assert ran.wait() != 0
    assert "this is a batch script: sbatch --nodes=2 slurm.sbatch train.py" in ran.output


@pytest.mark.parametrize(
    ("plays", "restarts", "again"),
    [
        ("0", 0, False),
        ("1", 0, False),  # training failed: it would fail again
        ("2", 0, False),  # a wrong flag stays wrong
        ("75", 0, True),
        ("75", 19, True),
        ("75", 20, False),
        ("137", 3, True),  # somebody killed the agents
        ("0 137", 0, False),  # one of them, and training has ended
        ("1 137", 0, False),
    ],
)
def test_requeue_exit_codes(submit: Submit, told: Path, plays: str, restarts: int, again: bool) -> None:
    ran = submit("train.py", plays=plays, restarts=restarts)
    code = ran.wait()
    assert requeued(told) is again
    assert code == (-signal.SIGKILL if again else int(plays.split()[0]))


def test_preemption_requeues(submit: Submit, told: Path) -> None:
    """However often it was requeued: being pre-empted is nobody's failure."""
    ran = submit("train.py", plays="trains", restarts=99)
    ran.until(lambda: Path(f"{told}.trains").exists() and Path(f"{told}.pids").exists())
    ran.process.send_signal(signal.SIGUSR1)
    ran.wait()
    calls = told.read_text().splitlines()
    assert f"scancel --signal=TERM {JOB}" in calls
    assert calls[-1] == f"scontrol requeue {JOB}"
    assert "exit code 143: back into the queue" in ran.output


def test_cancelled_job_is_not_requeued(submit: Submit, told: Path) -> None:
    ran = submit("train.py", plays="trains")
    ran.until(lambda: Path(f"{told}.trains").exists() and Path(f"{told}.pids").exists())
    # scancel reaches the shell and the tasks.
    ran.process.send_signal(signal.SIGTERM)
    for pid in Path(f"{told}.pids").read_text().split():
        os.kill(int(pid), signal.SIGTERM)
    assert ran.wait() == 143
    assert not requeued(told)


@pytest.mark.system
def test_real_job_is_preempted_and_continues(submit: Submit, told: Path, tmp_path: Path) -> None:
    train = [str(EXAMPLE), "--epochs", "1000", "--save-every", "1000000"]
    job = {"elasticd": "real", "GPUS": "1 1"}
    first = submit(*train, **job)
    first.until(lambda: "epoch 1 " in first.output)
    first.process.send_signal(signal.SIGUSR1)
    first.wait()
    assert requeued(told)
    seen = [int(epoch) for epoch in re.findall(r"epoch (\d+) error", first.output)]

    train[2] = str(max(seen) + 4)
    second = submit(*train, restarts=1, **job)
    assert second.wait() == 0, second.output
    # Nobody had saved before the signal: it is the checkpoint made for it that the second run goes on from. The epoch
    # that was being trained is the next to end, unless all of it was trained but the line not printed yet.
    ended = [int(epoch) for epoch in re.findall(r"epoch (\d+) error", second.output)]
    assert ended[0] in (max(seen) + 1, max(seen) + 2)


@pytest.mark.system
def test_real_job_that_loses_node_succeeds(submit: Submit, told: Path) -> None:
    ran = submit(str(EXAMPLE), "--epochs", "30", elasticd="real", GPUS="1 1")
    ran.until(lambda: "epoch 1 " in ran.output)
    agents = map(int, Path(f"{told}.pids").read_text().split())
    # Both are on the store's host here, and one of them serves it.
    (guest,) = [pid for pid in agents if "elasticd-c10d-h" not in map(comm_of, descendants(pid))]
    os.kill(guest, signal.SIGKILL)
    assert ran.wait() == 0, ran.output
    assert re.search(r"node\d is lost", ran.output)
    assert not requeued(told)
