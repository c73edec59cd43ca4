"""`elasticd submit`, `jobs`, `status`, `logs` and the others on the command line, against agents that run jobs."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.cli.main import main
from elasticd_daemon.config.job_file import from_json
from elasticd_daemon.records import RunnerStatus
from elasticd_daemon.scheduler.job_queue import read_view
from tests.daemon.conftest import MakeNode
from tests.daemon.node import COLD, AgentNode, toml, until
from tests.daemon.served import JOB, Served
from tests.faults.job import REPOSITORY

ENVIRON = {key: value for key, value in os.environ.items() if not key.startswith("ELASTICD_")}


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "elasticd_agent", *argv]


def address(of: Served | AgentNode | str) -> str:
    return of if isinstance(of, str) else f"unix:{of.socket}"


def environ(of: Served | AgentNode | str) -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "agents")])
    mark = {key: value for key, value in os.environ.items() if key.startswith("ELASTICD_TEST")}
    return {**ENVIRON, **mark, "PYTHONPATH": path, "TZ": "UTC", "ELASTICD_AGENT": address(of)}


@dataclass(frozen=True, slots=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def elasticd(*argv: str, of: Served | AgentNode | str = "") -> Done:
    """The command in this process, which takes a tenth of the time that a new one does."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        patch.setenv("ELASTICD_AGENT", address(of))
        code = main(argv)
    out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    return Done(code, out, err)


def asker(node: AgentNode) -> Callable[..., str]:
    """`elasticd VERB …` on this node; it must work, and says nothing on stderr unless it is to."""

    def ask(*argv: str, code: int = 0, err: str = "") -> str:
        done = elasticd(*argv, of=node)
        assert (done.returncode, done.stderr) == (code, err) or (
            done.returncode == code and err and err in done.stderr
        ), f"{argv}: {done.returncode}\n{done.stdout}{done.stderr}{node.diagnostics()}"
        return done.stdout

    return ask


def written(node: AgentNode, name: str, script: str, *args: str, **how: Any) -> Path:
    """A job file."""
    path = node.root / f"{name}.toml"
    path.write_text(
        "".join(f"{key} = {toml(value)}\n" for key, value in node.job_table(name, script, *args, **how).items())
    )
    return path


def table(text: str) -> list[dict[str, str]]:
    """The rows of an aligned table, by their columns' names."""
    head, *lines = text.splitlines()
    names = head.split()
    starts = [head.index(name) for name in names]
    ends = [*starts[1:], None]
    return [{n: line[a:b].strip() for n, a, b in zip(names, starts, ends, strict=True)} for line in lines]


@pytest.mark.system
def test_follow_ends_with_the_traceback_of_the_rank_that_failed(node: MakeNode, tmp_path: Path) -> None:
    fails = "if os.environ['RANK'] == '1':\n    raise ValueError('no shape')"
    (tmp_path / "shape.py").write_text(f"import os, time\nprint('hello', flush=True)\n{fails}\ntime.sleep(60)\n")
    ask, options = asker(node().start()), ["--id", "shape", "--follow", "--workers", "2"]
    end = "\nValueError: no shape\nelasticd submit: shape: failed: 3 restarts without progress "
    assert ask("submit", *options, "--", str(tmp_path / "shape.py"), code=1, err=end).startswith("shape\nhello\n")


def test_job_from_submit_to_cancel(node: MakeNode, tmp_path: Path) -> None:
    """And one that is followed, and fails."""
    n1 = node()
    n1.start()
    ask = asker(n1)
    assert ask("jobs") == "no jobs; elasticd submit FILE submits one\n"
    path = written(n1, "llama", "resume.py", "--steps", "100000", workers=2, checkpoint_dir=str(n1.work / "ck"))
    n1.until(lambda: table(ask("nodes"))[0]["STATE"] == "ready", "the node to be ready")
    assert ask("submit", str(path)) == "llama\n"
    ask("submit", str(path), code=1, err="elasticd submit: job 'llama' has not ended")
    n1.until(lambda: ask("queue") == "no job is pending\n", "the job to be placed")
    n1.wait_for_step(30)
    n1.until(lambda: table(ask("jobs"))[0]["STATE"] == "running", "its state to be known")
    (row,) = table(ask("jobs"))
    assert (row["JOB"], row["NODES"], row["SLOTS"]) == ("llama", "n1", "2")
    reported = lambda: json.loads(ask("status", "llama", "--json"))["progress"]  # noqa: E731
    n1.until(lambda: (reported()["step"] or 0) >= 30, "the step to be known")
    n1.until(lambda: reported()["checkpoint"], "a checkpoint to be known")
    assert 0 < reported()["goodput"] <= 1
    page = ask("status", "llama")
    assert page.startswith("llama: running\n")
    facts = {line.split()[0] for line in page.partition("\n\n")[0].splitlines()[1:]}
    assert {"reason", "nodes", "round", "step", "checkpoint", "goodput", "lost"} <= facts
    (row,) = table(ask("nodes"))
    assert (row["NODE"], row["STATE"], row["USED"], row["JOBS"]) == ("n1", "ready", "2/2", "llama")
    assert "what 2 ranks did" in ask("dump", "llama")
    assert json.loads(ask("explain", "llama", "--json"))["nodes"][0]["document"]["kind"] == "dump"

    (row,) = table(ask("drain", "n1", "--reason", "fan 3", "--wait"))
    assert (row["STATE"], row["JOBS"], "fan 3" in row["REASON"]) == ("drained", "-", True)
    (row,) = table(ask("jobs"))
    assert (row["STATE"], "n1 is drained: fan 3" in row["REASON"]) == ("pending", True)
    resumes = r"n1 leaves: drained: fan 3; the next run resumes from step \d+"
    assert re.fullmatch(resumes, n1.job_events("llama", "job_ended")[-1]["reason"])
    assert n1.job_events("llama", "stop_requested")[-1]["reason"] == "n1 leaves within 60 s: drained: fan 3"
    reached = n1.steps()[-1][1]
    assert ask("uncordon", "n1") == "n1 takes work again\n"
    n1.wait_for_step(reached + 10)
    steps = [step for _, step in n1.steps()]
    assert steps == list(range(1, len(steps) + 1)), "a drain loses no step"

    follows = subprocess.Popen(
        command("logs", "llama", "-f", "--stream", "elasticd"),
        env=environ(n1), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        cancelled = ask("cancel", "llama")
        assert "cancelled by" in cancelled
        out, _ = follows.communicate(timeout=60)
    finally:
        follows.kill()
        follows.communicate()
    assert (follows.returncode, "first step" in out) == (0, True), "it ends with the job"
    (row,) = table(ask("jobs"))
    assert row["STATE"] == "cancelled"
    assert ask("status", "llama").startswith("llama: cancelled, ")
    n1.until(lambda: len(n1.job_events("llama", "job_ended")) == 2, "the job's end here")
    assert n1.job_events("llama", "job_ended")[-1]["reason"].startswith("n1 leaves: the job was cancelled by ")

    (tmp_path / "hello.py").write_text("print('hello', flush=True)\nundefined\n")
    options = ["--id", "greeting", "--follow", "--workers", "1"]
    why = "greeting: failed: an error in the script, not restarted: rank 0 failed by itself before the first step: "
    out = ask("submit", *options, "--", str(tmp_path / "hello.py"), COLD, code=1, err=why)
    assert out.startswith("greeting\nhello\n")
    assert n1.drain() == 0
    n1.assert_gone()


@pytest.mark.system
def test_logs_of_another_node(nodes: MakeNode, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    token.chmod(0o600)
    work = tmp_path / "n1-0"
    n1 = nodes("n1", http={"port": 0, "token_file": token}, slots=1, root=work)
    n2 = nodes("n2", http={"port": 0, "token_file": token}, slots=1)
    n1.start()
    n2.start()
    ask, other = asker(n1), asker(n2)
    assert ask("submit", str(written(n1, "chat", "chatty.py", COLD, nodes="2", workers=1))) == "chat\n"
    rounds = lambda: (json.loads(ask("status", "chat", "--json"))["progress"] or {}).get("rounds")  # noqa: E731
    until(rounds, lambda: f"a round\n{n1.diagnostics()}{n2.diagnostics()}")
    answer = lambda rank: elasticd("logs", "chat", "--rank", rank, of=n1)  # noqa: E731
    for rank in "01":
        until(
            lambda rank=rank: "line 3\n" in answer(rank).stdout,
            lambda: f"its lines\n{n1.diagnostics()}{n2.diagnostics()}",
        )
        for one in (ask, other):
            out = one("logs", "chat", "--rank", rank, err=f"rank {rank} complains\n")
            assert out.startswith(f"rank {rank} of 2 is here\nrank {rank} line 1\n")
    assert "round 1" in ask("logs", "chat", "--node", "n2", "--stream", "elasticd")
    rows = {row["NODE"]: row for row in table(ask("nodes"))}
    assert {name: (row["STATE"], row["JOBS"]) for name, row in rows.items()} == {
        "n1": ("ready", "chat"),
        "n2": ("ready", "chat"),
    }
    taken = {row["node"]: row for row in json.loads(ask("dump", "chat", "--json"))["nodes"]}
    assert taken.keys() == {"n1", "n2"}
    assert sorted(rank["rank"] for row in taken.values() for rank in row["document"]["ranks"]) == [0, 1]
    assert ask("explain", "chat").count("NODE n") == 2
    address = json.loads(ask("nodes", "--json"))["nodes"][1]["address"]
    done = elasticd("jobs", "--agent", f"http://{address}", "--token-file", str(token))
    assert (done.returncode, table(done.stdout)[0]["JOB"]) == (0, "chat")
    done = elasticd("jobs", "--agent", f"http://{address}")
    assert (done.returncode, "a token is needed: --token-file FILE" in done.stderr) == (1, True)

    away = subprocess.Popen(
        command("logs", "chat", "-f", "--rank", "1"), env=environ(n1),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert away.stdout.readline() == "rank 1 of 2 is here\n"
        (n1.work / "go").touch()
        out, _ = away.communicate(timeout=30)
    finally:
        away.kill()
        away.communicate()
    assert (away.returncode, out.splitlines()[-1]) == (0, "rank 1 is done")
    until(lambda: table(ask("jobs"))[0]["STATE"] == "succeeded", lambda: f"the end\n{n1.diagnostics()}")
    assert ask("logs", "chat", "--rank", "1", "--tail", "1", err="complains") == "rank 1 is done\n"
    for one in (n1, n2):
        assert one.drain() == 0
        one.assert_gone()


# --- who reads ------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "it")
    made.announce(RunnerStatus("llama", 1, (0,), "running"))
    made.place("llama", made.submit(), "n1")
    made.event("round_published", 1.0, 1, world_size=1, nodes=["n1"])
    made.log(1, 0, "stdout", "line\n" * 100_000)
    yield made
    made.close()


def started(served: Served, *argv: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*argv), env=environ(served), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def test_broken_pipe_is_silent(served: Served) -> None:
    with started(served, "logs", "llama") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert (process.wait(30), process.stderr.read()) == (0, "")


def test_ctrl_c_ends_following_with_130(served: Served) -> None:
    with started(served, "logs", "llama", "-f") as process:
        assert process.stdout is not None and process.stderr is not None
        for _ in range(100_000):
            assert process.stdout.readline() == "line\n"
        process.send_signal(signal.SIGINT)
        assert (process.wait(30), process.stderr.read()) == (130, "")


def test_drain_wait_and_its_timeout(served: Served) -> None:
    done = elasticd("drain", "n1", "--wait", "--timeout", "0.1", of=served)
    assert (done.returncode, done.stderr) == (
        1,
        "elasticd drain: n1 is being drained, but llama is still there after 0.1 s\n",
    )
    served.announce()
    served.place("llama", 1)
    assert elasticd("drain", "n1", "--wait", "--timeout", "0.1", of=served).returncode == 0


@pytest.mark.parametrize(
    "argv",
    ["jobs", "nodes", "status llama", "cancel llama", "cordon n1", "drain n1", "explain llama", "submit {file} --id b"],
)
def test_json_prints_the_agents_answer(served: Served, argv: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(JOB)
    done = elasticd(*argv.replace("{file}", str(tmp_path / "job.toml")).split(), "--json", of=served)
    assert isinstance(json.loads(done.stdout), dict)
    assert done.returncode == (1 if "explain" in argv else 0), "of this job there is nothing to explain"


def test_job_file_on_standard_input(served: Served) -> None:
    with started(served, "submit", "-", "--id", "piped", stdin=subprocess.PIPE) as process:
        out, err = process.communicate(JOB.decode(), timeout=30)
    assert (process.returncode, out, err) == (0, "piped\n", "")


def test_job_whose_answer_is_lost_is_submitted_once(served: Served) -> None:
    """An agent that is upgraded cuts its connections."""

    def relay() -> None:
        for is_cut in (True, False):
            with listener.accept()[0] as caller, socket.socket(socket.AF_UNIX) as agent:
                agent.connect(str(served.socket))
                data = b""
                while not data.endswith(JOB):
                    data += caller.recv(1 << 16)
                agent.sendall(data)
                answer = b"".join(iter(lambda: agent.recv(1 << 16), b""))
                if not is_cut:
                    caller.sendall(answer)

    (served.root / "job.toml").write_bytes(JOB)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=relay, daemon=True)
        thread.start()
        done = elasticd("submit", str(served.root / "job.toml"), of=f"http://127.0.0.1:{listener.getsockname()[1]}")
    (submitted,) = [each.job for each in read_view(served.store).submissions if each.job != "llama"]
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{submitted}\n", "")


def test_command_without_a_file(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "submit --workers 2:4 --checkpoint-dir state --priority high --node-label a --node-label b=1"
    words += " --env A=1 --env B=x=y --module -- pkg.train --id 7"
    assert re.fullmatch(r"train-[0-9a-f]{4}\n", elasticd(*words.split(), of=served).stdout)
    submitted = max(read_view(served.store).submissions, key=lambda one: one.number)
    assert (submitted.priority, submitted.labels, submitted.min_slots, submitted.max_slots) == (
        "high",
        ("a", "b=1"),
        2,
        4,
    )
    job = from_json(submitted.spec)
    assert (job.command, job.workdir) == (("pkg.train", "--id", "7"), tmp_path)
    assert (job.module, job.no_python, dict(job.env)) == (True, False, {"A": "1", "B": "x=y"})
    assert job.checkpoint_dir == tmp_path / "state"


@pytest.mark.parametrize("argv", ["nodes", "jobs", "status llama", "status", "cancel llama", "submit -- t.py"])
def test_commands_need_no_other_package(served: Served, argv: str) -> None:
    """`pip install --no-deps elasticd` is a client."""
    code = "import sys; sys.path[:0] = sys.argv[1:3]; from elasticd_agent.cli.main import main; "
    code += "sys.exit(main(sys.argv[3:]))"
    paths = [str(REPOSITORY), str(REPOSITORY / "agents")]
    agent = ["--agent", f"unix:{served.socket}"]
    verb, *rest = argv.split()
    command = [sys.executable, "-I", "-S", "-c", code, *paths, verb, *agent, *rest]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_command_with_missing_packages_names_one() -> None:
    code = "import sys; sys.path[:0] = sys.argv[1:]; from elasticd_agent.cli.main import main; "
    code += "sys.exit(main(['config', 'check', 'job.toml']))"
    command = [sys.executable, "-I", "-S", "-c", code, str(REPOSITORY), str(REPOSITORY / "agents")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    why = "elasticd config: error: the package 'msgspec' is missing, which this command needs: pip install elasticd"
    assert (done.returncode, done.stderr.startswith(why), done.stderr.count("\n")) == (2, True, 1)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ("submit", "a job file is missing; write: elasticd submit [options] -- train.py"),
        ("submit --workers 2 job.toml", "--workers is for a command; write"),
        ("submit job.toml -- train.py", "give a job file, or -- and a command, not both"),
        ("submit --", "a job file is missing"),
        ("submit --env A -- train.py", "argument --env: 'A' is not NAME=VALUE"),
        (
            "submit -- python train.py 3",
            "the command begins with a script, not with 'python'; write: elasticd submit -- ",
        ),
        (
            "submit -- /v/bin/python3.12 -m a.b 3",
            "the command begins with a script, not with '/v/bin/python3.12'; write: "
            "elasticd submit --module -- a.b 3\n",
        ),
        (
            "submit -- python -u train.py",
            "the command begins with a script, not with 'python'; write: elasticd submit "
            "--no-python -- python -u train.py\n",
        ),
        (
            "submit -- ls -l",
            "'ls' is a program, not a script of this directory; write: elasticd submit --no-python -- ls -l",
        ),
    ],
)
def test_submit_needs_a_file_or_a_command(argv: str, why: str) -> None:
    done = elasticd(*argv.split(), of="unix:/nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"elasticd submit: error: {why}")


def test_a_script_may_have_the_name_of_a_program(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ls").write_text("")
    done = elasticd("submit", "--", "ls", of=served)
    assert (done.returncode, done.stderr) == (0, "")


def test_invalid_job_file_is_named_in_one_line(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("command = 7")
    done = elasticd("submit", str(path), of=served)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"elasticd submit: error: {path}: command")


def test_names_that_are_not_utf8_are_nobodys(served: Served) -> None:
    served.announce()
    for argv in (("status", "caf\udce9"), ("drain", "caf\udce9"), ("cancel", "caf\udce9")):
        done = elasticd(*argv, of=served)
        assert (done.returncode, done.stdout) == (1, ""), argv
        assert r"'caf\\udce9'; there " in done.stderr, argv
    done = elasticd("submit", "--id", "caf\udce9", "--no-python", "--", "./a", of=served)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    done = elasticd("cordon", "n1", "--reason", "caf\udce9", of=served)
    assert done.returncode == 0, done
    assert r"caf\udce9" in done.stdout


# --- without an agent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code", "answer"),
    [
        (["jobs"], 1, "no agent answers at {dir}/none.sock: No such file or directory; is `elasticd agent` running"),
        (["cancel"], 2, "error: the following arguments are required: JOB"),
        (["logs", "j", "--rank", "x"], 2, "error: argument --rank: invalid int value: 'x'"),
        (["submit", "{dir}/no.toml"], 2, "error: {dir}/no.toml: cannot be read: No such file or directory"),
        (["jobs", "--agent", "ftp://x"], 2, "error: --agent ftp://x: give unix:/run/elasticd/agent.sock"),
        (["jobs", "--agent", "http://x/y"], 2, "error: --agent http://x/y: give"),
        (["jobs", "--agent", "unix:x"], 2, "error: --agent unix:x: give an absolute path"),
        (["jobs", "--agent", "http://127.0.0.1:1"], 1, "no agent answers at http://127.0.0.1:1: Connection refused"),
        (["jobs", "--agent", "http://h", "--token-file", "{dir}/no"], 2, "error: --token-file: '{dir}/no' cannot be"),
        (
            ["jobs", "--agent", "https://h", "--ca", "{dir}/no"],
            2,
            "error: --ca {dir}/no: not a readable CA certificate",
        ),
        (["dump", "j"], 1, "no agent answers at"),
        (["explain", "j", "--node", "n"], 1, "no agent answers at"),
        (["explain", "./j"], 2, "error: j does not exist"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(argv: list[str], code: int, answer: str, tmp_path: Path) -> None:
    words = [word.replace("{dir}", str(tmp_path)) for word in argv]
    done = elasticd(*words, of=f"unix:{tmp_path}/none.sock")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"elasticd {argv[0]}: {answer.replace('{dir}', str(tmp_path))}"), done.stderr
    assert done.stderr.count("\n") == 1


def test_existing_directory_is_explained_locally(tmp_path: Path) -> None:
    evidence = REPOSITORY / "tests" / "cli" / "explain"
    done = subprocess.run(
        command("explain", "stopped"), cwd=evidence, env=environ(f"unix:{tmp_path}/none.sock"), capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (evidence / "stopped.txt").read_text()
