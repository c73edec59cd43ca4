"""A job that runs as another user: access to its own files, the agent's access to it, and none to the store."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select

import pytest

from elasticd_agent.system.bounded_io import run_within
from elasticd_agent.system.files import replace_file
from elasticd_agent.system.processes.process import children
from elasticd_daemon.job_dir import JobFiles, job_files
from elasticd_daemon.runners import spawn as spawning
from elasticd_daemon.runners.spec import RunnerSpec, StoreSecrets, read_exit
from tests.daemon.conftest import MakeNode
from tests.daemon.node import COLD, AgentNode, lives, until
from tests.etcd import EtcdServers

SOMEBODY = pwd.getpwnam("nobody")


def somebodys_folders(state: Path, number: int = 1) -> JobFiles:
    """Of a run whose spec has no command."""
    files = job_files(state, "job", number)
    for folder in (files.root, files.agent_folder):
        folder.mkdir(parents=True)
    os.chown(files.root, SOMEBODY.pw_uid, SOMEBODY.pw_gid)
    replace_file(files.runner_spec, RunnerSpec("job", number, "n1", (0,), "{}").to_json())
    return files


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that others may pass through, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="elasticd-users-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


def asks_as_somebody(program: str, *args: str, python: str = "/usr/bin/python3") -> str:
    try:
        done = _as_somebody([python, "-c", program, *args])
    except OSError as error:
        return str(error)
    return done.stdout + done.stderr


def _as_somebody(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, user=SOMEBODY.pw_uid, group=SOMEBODY.pw_gid, capture_output=True, text=True, timeout=30, cwd="/"
    )


WORKS = "import sys; print('works', sys.version_info[:2])"


def use_anyones_python(monkeypatch: pytest.MonkeyPatch) -> None:
    python = next((p for p in (sys.executable, "/usr/bin/python3") if "works" in asks_as_somebody(WORKS, python=p)), "")
    if not python:
        pytest.skip("no Python on this machine that others than root may execute")
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


def usable_by_others(node: AgentNode) -> None:
    """Where the environment's interpreter lies in somebody's home, the machine's own does as well."""
    for python in (sys.executable, "/usr/bin/python3"):
        if "works" in asks_as_somebody(WORKS, python=python):
            node.python = python
            node.path += [path for path in sys.path if path.endswith("site-packages")]
            return
    pytest.skip("no Python on this machine that others than root may execute")


def theirs(node: AgentNode, **how: object) -> None:
    node.job("one", "plain.py", COLD, "sleep", workers=1, user="nobody", **how)
    os.chown(node.work, SOMEBODY.pw_uid, SOMEBODY.pw_gid)


@pytest.mark.system
def test_job_of_another_user_cannot_read_the_stores_credentials(
    node: MakeNode, etcd: EtcdServers, open_place: Path
) -> None:
    etcd.ask_for_passwords("elasticd", "a-secret-word", "/elasticd/v1/")
    secret = open_place / "password"
    secret.write_text("a-secret-word\n")
    secret.chmod(0o600)
    store = {
        "backend": "etcd",
        "endpoints": [f"127.0.0.1:{etcd.port}"],
        "user": "elasticd",
        "password_file": str(secret),
    }
    n1 = node("n1", root=open_place / "n1", store=store, local_addr="127.0.0.1")
    usable_by_others(n1)
    theirs(n1)
    n1.start()
    until(lambda: (n1.work / "ready-0").exists(), n1.diagnostics)
    runner, (worker,) = n1.runner("one"), n1.workers("one")
    for pid in (runner, worker):
        assert f"Uid:\t{SOMEBODY.pw_uid}\t" in Path(f"/proc/{pid}/status").read_text()
    assert n1.files("one").root.stat().st_uid == SOMEBODY.pw_uid
    found = subprocess.run(["grep", "-rl", "a-secret-word", str(n1.root), "/dev/shm"], capture_output=True, text=True)
    assert found.stdout == ""
    for pid in n1.processes():
        for name in ("environ", "cmdline"):
            assert b"a-secret-word" not in Path(f"/proc/{pid}/{name}").read_bytes()
    look = "import sys; open(f'/proc/{sys.argv[1]}/mem', 'rb'); print('it can look')"
    assert "Permission denied" in asks_as_somebody(look, str(runner))
    look = "import os, sys; print(os.listdir(f'/proc/{sys.argv[1]}/fd'))"
    assert "Permission denied" in asks_as_somebody(look, str(runner))
    n1.kill()
    n1.start()
    n1.wait_for_log(f"adopted its runner (pid {runner})")
    assert n1.request_as_agent("one", "status")["phase"] == "running"
    os.kill(runner, signal.SIGKILL)
    until(lambda: not lives(worker), n1.diagnostics)
    until(lambda: n1.runner("one") != runner, n1.diagnostics)
    assert n1.drain() == 0
    n1.assert_gone()


@pytest.mark.system
def test_directory_that_systemd_has_closed_is_opened_for_the_jobs_that_run(node: MakeNode, open_place: Path) -> None:
    """StateDirectoryMode= counts at each start of the unit, also after a crash of the agent."""
    n1 = node("n1", root=open_place / "n1")
    usable_by_others(n1)
    theirs(n1)
    n1.start()
    until(lambda: (n1.work / "ready-0").exists(), n1.diagnostics)
    runner, (worker,) = n1.runner("one"), n1.workers("one")
    n1.kill()
    n1.state.chmod(0o700)
    n1.start()
    n1.wait_for_log(f"adopted its runner (pid {runner})")
    os.kill(worker, signal.SIGKILL)
    until(lambda: (n1.files("one").logs / "round-2").exists(), n1.diagnostics)
    assert n1.runner("one") == runner
    assert n1.drain() == 0
    assert n1.wait_for_exit("one").outcome == "left"
    n1.assert_gone()


def test_job_that_this_node_cannot_run_is_refused_once(node: MakeNode) -> None:
    n1 = node()
    n1.job("one", "/no/such/script.py", workers=1)
    n1.start()
    assert n1.event("runner_ended", name="one")["outcome"] == "refused"
    sentence = n1.wait_for_exit("one").reason
    assert "/no/such/script.py" in sentence
    n1.kill()
    n1.start()
    agent = n1.unix()
    until(lambda: f"n1 refused it: {sentence}" in agent.get("/v1/jobs/one").body.decode(), n1.diagnostics)
    assert len(n1.events("runner_started")) == 1
    assert n1.drain() == 0


def test_directory_that_blocks_the_interpreter_is_named(open_place: Path, tmp_path: Path) -> None:
    """A common case: the environment is open to all, and its interpreter is a link into a home directory."""
    home, env = open_place / "home", open_place / "env"
    for place in (home, env):
        place.mkdir()
        place.chmod(0o755)
    (home / "python").write_text("#!/bin/sh\n")
    (home / "python").chmod(0o755)
    (env / "python").symlink_to(home / "python")
    nobody = spawning.Account.of("nobody") if os.geteuid() == 0 else None
    if nobody is None:
        pytest.skip("only root may run jobs as somebody else")
    assert spawning.blocked_directory_phrase(nobody, env / "python") == ", or cannot reach it", "modes do not show it"
    home.chmod(0o700)
    assert spawning.blocked_directory_phrase(nobody, env / "python") == (
        f", because {home} (mode 0700) is closed to it; install in an open directory"
    )
    env.chmod(0o750)
    assert f"{env} (mode 0750) is closed" in spawning.blocked_directory_phrase(nobody, env / "python")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run jobs as somebody else")
def test_interpreter_that_the_user_may_not_execute(open_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner reports it, as it does for anything else that this node cannot run."""
    shut = open_place / "shut"
    shut.mkdir(0o700)
    (shut / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(shut / "python"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    files = somebodys_folders(open_place)
    with open(files.lock, "w") as lock:
        runner = spawning.spawn(files, lock.fileno(), spawning.Account.of("nobody"), StoreSecrets())
    assert runner.wait(30) == 2
    last = read_exit(files)
    why = f"user 'nobody' may not execute {shut}/python, because {shut} (mode 0700) is closed to it"
    assert (last.outcome, last.reason) == ("refused", f"{why}; install in an open directory")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run jobs as somebody else")
def test_directory_above_the_jobs_that_is_closed_to_the_user(open_place: Path) -> None:
    """The runner could neither begin its work nor write its exit: it would be started again and again."""
    shut = open_place / "shut"
    shut.mkdir(0o700)
    files = somebodys_folders(shut / "state")
    with open(files.lock, "w") as lock:
        runner = spawning.spawn(files, lock.fileno(), spawning.Account.of("nobody"), StoreSecrets())
    assert runner.wait(30) == 2
    last = read_exit(files)
    why = f"user 'nobody' may not enter {files.root}, because {shut} (mode 0700) is closed to it"
    assert (last.outcome, last.reason) == ("refused", f"{why}; open it, or move state_dir")


STOPS = """
import os, signal, sys, time
def parent(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]
print("looking", flush=True)
until = time.monotonic() + 100
while time.monotonic() < until:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if sys.argv[1] in (parent(pid), parent(parent(pid))) and int(pid) != os.getpid():
                os.kill(int(pid), signal.SIGSTOP)
                print(pid, flush=True)
        except OSError:
            pass
"""


@contextmanager
def stops_our_children() -> Iterator[subprocess.Popen[str]]:
    """A process of the job's user stops every child of ours, and its child, that is its own, and prints its pid."""
    command = ["/usr/bin/python3", "-I", "-c", STOPS, str(os.getpid())]
    attack = subprocess.Popen(command, user=SOMEBODY.pw_uid, group=SOMEBODY.pw_gid, stdout=subprocess.PIPE, text=True)
    try:
        assert attack.stdout.readline() == "looking\n"
        yield attack
    finally:
        attack.kill()
        attack.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run jobs as somebody else")
def test_jobs_user_cannot_delay_the_agent_that_starts_it(open_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_anyones_python(monkeypatch)
    account = spawning.Account.of("nobody")
    with stops_our_children() as attack:
        for number in itertools.count(1):  # until one has not ended before it was seen
            files = somebodys_folders(open_place, number)
            with open(files.lock, "w") as lock:
                runner = run_within(60, lambda: spawning.spawn(files, lock.fileno(), account, StoreSecrets()))  # noqa: B023
            try:
                until(lambda: runner.poll() is not None or select([attack.stdout], [], [], 0)[0], "a process to stop")  # noqa: B023
                if runner.returncode is None:
                    stopped = int(attack.stdout.readline())
                    assert stopped != runner.pid, "the runner can be stopped as itself, its keeper cannot"
                    break
            finally:
                runner.kill()
                runner.wait(30)
        until(lambda: not lives(stopped), "the runner to end with its keeper")


ATTACK = """
import os, time
print("looking", flush=True)
until = time.monotonic() + 20
while time.monotonic() < until:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if "memfd:elasticd" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                    print("found", open(f"/proc/{pid}/fd/{fd}").read(), flush=True)
        except OSError:
            pass
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run jobs as somebody else")
def test_jobs_user_cannot_read_secrets_as_the_runner_starts(open_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of the same user looks at every file that the runner has open, from its first moment on."""
    use_anyones_python(monkeypatch)
    attack = subprocess.Popen(
        ["/usr/bin/python3", "-c", ATTACK],
        user=SOMEBODY.pw_uid,
        group=SOMEBODY.pw_gid,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert attack.stdout.readline() == "looking\n"
        for number in range(1, 6):
            files = somebodys_folders(open_place, number)
            with open(files.lock, "w") as lock:
                runner = spawning.spawn(
                    files, lock.fileno(), spawning.Account.of("nobody"), StoreSecrets("a-secret-word")
                )
            assert runner.wait(30) != 0, "its spec has no command"
            assert files.runner_log.stat().st_uid == SOMEBODY.pw_uid, "it has read its secrets, and became that user"
    finally:
        attack.kill()
        found, _ = attack.communicate()
    assert "a-secret-word" not in found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run jobs as somebody else")
def test_jobs_user_runs_no_code_in_the_runner(open_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner is root's until it has read its secrets: no module of that user's site directory is imported."""
    python = next((p for p in ("/usr/bin/python3", sys.executable) if "works" in asks_as_somebody(WORKS, python=p)), "")
    if not python:
        pytest.skip("no Python on this machine that others than root may execute")
    version = subprocess.check_output([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True)
    site = open_place / "home" / ".local" / "lib" / f"python{version.strip()}" / "site-packages"
    site.mkdir(parents=True)
    (site / "usercustomize.py").write_text(f"open({str(open_place / 'ran')!r}, 'w')\n")
    (site / "evil.pth").write_text(f"import os; open({str(open_place / 'ran')!r}, 'w')\n")
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    home = str(open_place / "home")
    subprocess.run([python, "-c", ""], env={"HOME": home}, check=True)
    assert (open_place / "ran").exists(), "an interpreter with that home runs them"
    (open_place / "ran").unlink()
    files = job_files(open_place, "job", 1)
    for folder in (files.root, files.agent_folder):
        folder.mkdir(parents=True)
    replace_file(files.runner_spec, RunnerSpec("job", 1, "n1", (0,), "{}").to_json())
    account = spawning.Account("nobody", SOMEBODY.pw_uid, SOMEBODY.pw_gid, home, "/bin/sh")
    with open(files.lock, "w") as lock:
        assert spawning.spawn(files, lock.fileno(), account, StoreSecrets()).wait(30) != 0, "its spec has no command"
    assert not (open_place / "ran").exists()


BECOMES = """
import sys
from pathlib import Path
from contextlib import closing
from elasticd.errors import UsageError
from elasticd_daemon.runners.manager import RunnerManager
from elasticd_daemon.runners.spawn import Account
from elasticd_daemon.runners.spec import RunnerSpec, StoreSecrets, read_exit
with closing(RunnerManager(Path(sys.argv[1]), lambda: None, print)) as runners:
    try:
        runners.start(RunnerSpec("job", 1, "n1", (0,), "{}"), Account.of("nobody"), StoreSecrets())
    except UsageError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run jobs as somebody else")
@pytest.mark.parametrize("capability", ["setuid", "setgid", "chown"])
def test_missing_capability_is_named(open_place: Path, capability: str) -> None:
    """Also an agent with User=root under systemd 257."""
    less = ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}"]
    done = subprocess.run(
        [*less, sys.executable, "-c", BECOMES, str(open_place)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.startswith("UsageError this agent may not become user 'nobody'"), done.stderr
    assert not job_files(open_place, "job", 1).runner_log.exists()


def test_secrets_pass_through_memory() -> None:
    fd = StoreSecrets("word", "ca", None, "key").to_fd()
    program = (
        "import sys; from elasticd_daemon.runners.spec import StoreSecrets as S; print(S.from_fd(int(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(fd)], pass_fds=[fd], capture_output=True, text=True)
    os.close(fd)
    assert "password='word'" in done.stdout, done.stderr
    assert "ca='ca', cert=None, key='key'" in done.stdout


STAYS = """
import ctypes, os, time
ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG: the owner's end does not end it
if os.fork() == 0:
    os.setsid()
    open(os.path.join(os.environ["WORK"], "stayed"), "w").write(str(os.getpid()))
open(os.path.join(os.environ["WORK"], "ready"), "w").close()
time.sleep(600)
"""
TAKES_THE_SLOT = """
import ctypes, fcntl, os, signal, sys
runner, unlock = int(sys.argv[1]), sys.argv[2] == "unlock"
libc = ctypes.CDLL(None, use_errno=True)
owner = int(open(f"/proc/{runner}/task/{runner}/children").read().split()[0])
os.kill(owner, signal.SIGSTOP)
if unlock:
    pidfd = os.pidfd_open(owner)
    for number in range(3, 40):
        fd = libc.syscall(438, pidfd, number, 0)  # pidfd_getfd
        if fd >= 0:
            try:
                fcntl.flock(fd, fcntl.LOCK_UN)
                print("unlocked")
            except OSError:
                pass
else:
    os.kill(owner, signal.SIGKILL)
os.kill(runner, signal.SIGKILL)
"""


@pytest.mark.system
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run jobs as somebody else")
@pytest.mark.parametrize(
    ("how", "agent"), [("unlock", ""), ("unlock", "killed"), ("kill", "killed"), ("kill", "replaced by itself")]
)
def test_slot_is_free_when_no_process_of_the_job_is_left(
    node: MakeNode, open_place: Path, how: str, agent: str
) -> None:
    """Its user can kill runner and owner at once, unlock what they hold, and have a worker outlive both."""
    n1 = node("n1", root=open_place / "n1", slots=1)
    usable_by_others(n1)
    script = n1.work / "stays.py"
    script.write_text(STAYS)
    n1.job("one", str(script), workers=1, user="nobody", max_restarts=0)
    os.chown(n1.work, SOMEBODY.pw_uid, SOMEBODY.pw_gid)
    n1.start()
    until(lambda: (n1.work / "ready").exists() and (n1.work / "stayed").exists(), n1.diagnostics)
    until(lambda: (n1.work / "stayed").read_text(), n1.diagnostics)
    stayed, (worker,), runner = int((n1.work / "stayed").read_text()), n1.workers("one"), n1.runner("one")
    if agent == "killed":
        n1.signal(signal.SIGSTOP)
    elif agent:
        n1.upgrade()
    said = asks_as_somebody(TAKES_THE_SLOT, str(runner), how, python=n1.python)
    assert ("unlocked" in said) == (how == "unlock"), said
    until(lambda: not lives(runner), n1.diagnostics)
    if agent == "killed":
        n1.kill()
        n1.start()
    until(lambda: len(n1.events("runner_started")) > 1, n1.diagnostics, 90)
    assert not lives(stayed) and not lives(worker), n1.diagnostics()
    assert [pid for pid in children(n1.pid) if not lives(pid)] == [], "the keeper is reaped"
    assert n1.drain() == 0
    n1.assert_gone()
