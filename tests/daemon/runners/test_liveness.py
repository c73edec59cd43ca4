"""A job of another user: links in its folder are not followed, and what the agent relies on is out of its reach."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from elasticd_agent.system.files import replace_file
from elasticd_daemon.job_dir import JobFiles, job_files
from elasticd_daemon.runners import liveness as alive
from elasticd_daemon.runners import manager
from elasticd_daemon.runners.manager import RunnerManager
from elasticd_daemon.runners.spawn import Account
from elasticd_daemon.runners.spec import (
    MAX_EXIT_BYTES,
    RunnerExit,
    RunnerSpec,
    StoreSecrets,
    read_exit,
    read_spec,
    write_exit,
)
from tests.daemon.health.test_directories import DeadMount, needs_root
from tests.daemon.node import until


def made(state: Path, job: str, number: int = 1) -> JobFiles:
    files = job_files(state, job, number)
    files.root.mkdir(parents=True)
    files.agent_folder.mkdir(parents=True)
    return files


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_lock_that_is_a_link_is_refused(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    link(precious, tmp_path / "lock")
    with pytest.raises(OSError, match=r"symbolic links|another name"):
        alive.take_lock(tmp_path / "lock")
    assert precious.read_text() == "mine"


def test_no_write_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    files = made(tmp_path, "j")
    (files.agent_folder / ".runner-spec.json.new").symlink_to(precious)
    replace_file(files.runner_spec, b"{}")
    assert precious.read_text() == "mine"
    assert files.runner_spec.read_bytes() == b"{}"


@pytest.mark.parametrize("name", ["exit.spare", "exit.json"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.parent.parent / "precious")])
def test_nothing_in_the_way_of_an_exit_keeps_it_from_the_agent(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    """Else its runner would be started again for ever."""
    files = made(tmp_path, "j")
    precious = files.root.parent / "precious"
    precious.write_text("mine")
    make(files.root / name)
    write_exit(files, RunnerExit("j", 1, 0, "succeeded", "done"))
    last = read_exit(files)
    assert last is not None and last.outcome == "succeeded"
    assert precious.read_text() == "mine"


def test_lock_owner(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    fd = alive.take_lock(path)
    assert fd is not None
    assert alive.is_locked(path)
    assert alive.lock_owner(path) == alive.ProcessIdentity.of(os.getpid())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"1 2 boot", 0)  # a job's user could name another user's process, which the agent signals
    alive.write_stop_reason(path, "the node\nis drained " + "x" * 3000)
    assert alive.read_stop_reason(fd).startswith("the node is drained xxx")
    alive.write_stop_reason(path, "")
    assert alive.read_stop_reason(fd) == ""
    os.close(fd)
    assert not alive.is_locked(path)


def test_lock_lasts_as_long_as_any_copy_of_its_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    fd = alive.take_lock(path)
    assert fd is not None
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=[fd]
    ) as keeper:
        os.close(fd)
        assert alive.is_locked(path)
        assert alive.processes_with_lock(path, os.getuid())[0] == [keeper.pid]
        assert alive.take_lock(path) is None
    assert not alive.is_locked(path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "endless"])
def test_special_files_do_not_block(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """The deciding thread looks at these; the job's user could have it wait, or read, for ever."""
    files = made(tmp_path, "j")
    for path in (files.lock, files.runner_exit, files.runner_spec):
        make(path)
    assert not alive.is_locked(files.lock)
    assert alive.lock_owner(files.lock) is None
    assert read_exit(files) is None
    with pytest.raises(OSError, match=r"not a plain file|symbolic links"):
        read_spec(files)


def test_exit_too_large_for_the_store_is_ignored(tmp_path: Path) -> None:
    files = made(tmp_path, "j")
    write_exit(files, RunnerExit("j", 1, 1, "failed", "." * MAX_EXIT_BYTES))
    assert read_exit(files) is None
    write_exit(files, RunnerExit("j", 1, 1, "failed", "short"))
    last = read_exit(files)
    assert last is not None and last.reason == "short"
    write_exit(files, RunnerExit("j", 1, 2, "refused", "." * (MAX_EXIT_BYTES // 2)))
    last = read_exit(files)
    assert last is not None and len(last.reason) == 2000, "a card of three such would be too large for etcd"


ORDER = RunnerSpec("mine", 1, "n1", (0,), "{}")


HOLDS = """
import sys
from pathlib import Path
from elasticd_daemon.runners import liveness as alive
Path("/proc/self/comm").write_text("elasticd-job")
lock = alive.take_lock(Path(sys.argv[1]))
print("has it", flush=True)
sys.stdin.read()
"""


def test_runner_is_alive_without_a_free_file_descriptor(tmp_path: Path) -> None:
    """A runner that counts as dead is killed after a while, with all its processes."""
    files, lines, before = made(tmp_path, "mine", 1), list[str](), resource.getrlimit(resource.RLIMIT_NOFILE)
    replace_file(files.runner_spec, ORDER.to_json())
    with (
        closing(RunnerManager(tmp_path, lambda: None, lines.append)) as runners,
        subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(files.lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as runner,
    ):
        assert runner.stdout.readline() == "has it\n"
        assert runners.adopt() == []
        (known,) = runners.alive()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            assert runners.poll(time.monotonic()) == []
            assert runners.alive() == (known,)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        runner.communicate()
        assert [over.key for over in runners.poll(time.monotonic())] == [("mine", 1)]


@needs_root
def test_dead_file_system_does_not_delay_the_search_for_a_locks_owner(tmp_path: Path) -> None:
    """The main loop searches, and a job's user may have its descriptors anywhere."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("there is no /dev/fuse")
    (tmp_path / "dead").mkdir()
    found: list[tuple[list[int], bool]] = []
    with closing(DeadMount(tmp_path / "dead")) as dead:
        there = os.open(dead.path, os.O_PATH)
        lock = alive.take_lock(tmp_path / "lock")
        assert lock is not None
        search = threading.Thread(
            target=lambda: found.append(alive.processes_with_lock(tmp_path / "lock", os.getuid())), daemon=True
        )
        search.start()
        search.join(60)
        assert found == [([os.getpid()], True)]
        os.close(there)
        os.close(lock)


@needs_root
def test_only_the_job_users_lock_keepers_are_killed(open_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "REMNANT_GRACE_S", 0.0)
    monkeypatch.setattr(manager, "IDENTITY_GRACE_S", 0.0)
    files, lines = theirs(open_state), list[str]()
    setuid = open_state / "sleep"
    shutil.copy("/bin/sleep", setuid)
    setuid.chmod(0o4755)
    fd = alive.take_lock(files.lock)
    assert fd is not None
    with closing(RunnerManager(open_state, lambda: None, lines.append)) as runners, ExitStack() as stack:
        by = {
            name: stack.enter_context(subprocess.Popen([program, "60"], pass_fds=[fd], user=user))
            for name, program, user in (
                ("root", "sleep", 0),
                ("user", "sleep", 65534),
                ("setuid", str(setuid), 65534),
                ("other", "sleep", 1),
            )
        }
        os.truncate(files.lock, 0)
        os.close(fd)
        try:
            status = Path(f"/proc/{by['setuid'].pid}/status")  # Popen may be back a moment before exec has set it
            until(lambda: status.read_text().split("Uid:\t")[1].startswith("65534\t0\t"), "the user to be root")
            assert runners.adopt() == []
            assert [runners.poll(time.monotonic()) for _ in range(2)] == [[], []]
            assert [by[name].wait(60) for name in ("user", "setuid")] == [-signal.SIGKILL] * 2
            assert [by[name].poll() for name in ("root", "other")] == [None] * 2
        finally:
            for process in by.values():
                process.kill()


def test_silent_runner_with_damaged_files_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its slots were given to other jobs, and nothing could cancel it."""
    monkeypatch.setattr(manager, "SPEC_REQUEST_TIMEOUT_S", 0.1)
    monkeypatch.setattr(manager, "IDENTITY_GRACE_S", 0.0)
    files, lines = made(tmp_path, "mine"), list[str]()
    files.runner_spec.write_text("{")
    with (
        closing(RunnerManager(tmp_path, lambda: None, lines.append)) as runners,
        subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(files.lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as runner,
    ):
        assert runner.stdout.readline() == "has it\n"
        os.truncate(files.lock, 20)
        assert runners.adopt() == []
        assert "may use any slot" in lines[0]
        assert runners.request_stop("mine", 1, "cancelled", 5.0)
        ended = list(runners.poll(time.monotonic()))  # it may take effect at once
        runner.wait(60)
        ended += runners.poll(time.monotonic())
        assert [end.key for end in ended] == [("mine", 1)]


def test_spec_in_another_jobs_folder_is_ignored(tmp_path: Path) -> None:
    files, lines = made(tmp_path, "yours", 7), list[str]()
    replace_file(files.runner_spec, ORDER.to_json())
    write_exit(files, RunnerExit("mine", 1, 0, "succeeded", "done"))
    with closing(RunnerManager(tmp_path, lambda: None, lines.append)) as runners:
        assert runners.adopt() == []
    assert lines == [f"{files.runner_spec}: it is of job mine number 1; ignored"]


IN_A_SOCKET = """
import array, socket, sys
here, there = socket.socketpair()
here.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [int(sys.argv[1])]))])
__import__("os").close(int(sys.argv[1]))
print("sent", flush=True)
sys.stdin.read()
"""
PYTHON = "/usr/bin/python3"
"""Others than root may execute it."""
TRIES = """
import os, sys
record, root, fd = sys.argv[1:]
def refused(*do):
    try:
        do[0](*do[1:])
    except OSError as error:
        return type(error).__name__
print(*(refused(*do) for do in [
    (os.link, record + "/lock", root + "/lock2"), (os.link, f"/proc/self/fd/{fd}", root + "/lock3"),
    (os.listdir, record), (open, record + "/runner-spec.json"), (open, record + "/lock"), (os.unlink, record + "/lock"),
    (os.rename, record, record + ".old"), (open, f"/proc/self/fd/{fd}", "r+"), (os.pwrite, int(fd), b"1 1 x", 0),
]))
"""


@pytest.fixture
def open_state() -> Iterator[Path]:
    """A state directory that its jobs' users may pass through, which pytest's are not."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o711)
        yield Path(place)


def theirs(state: Path) -> JobFiles:
    """The folders of a run of nobody's, as the agent makes them."""
    with closing(RunnerManager(state, lambda: None, lambda line: None)) as runners:
        runners.refuse(ORDER, Account.of("nobody"), "")
    files = job_files(state, ORDER.job, ORDER.number)
    files.refusal.unlink()
    return files


@needs_root
def test_jobs_user_cannot_touch_what_the_agent_relies_on(open_state: Path) -> None:
    files = theirs(open_state)
    fd = alive.take_lock(files.lock)
    assert fd is not None
    done = subprocess.run(
        [PYTHON, "-c", TRIES, str(files.agent_folder), str(files.root), str(fd)],
        pass_fds=[fd], user=65534, group=65534, extra_groups=[], capture_output=True, text=True,
    )  # fmt: skip
    os.close(fd)
    refusals = done.stdout.split()
    assert len(refusals) == 9 and "None" not in refusals, (done.stdout, done.stderr)
    assert sorted(os.listdir(files.root)) == []


@needs_root
@pytest.mark.parametrize(("user", "program"), [(65534, IN_A_SOCKET), (1, "print('sent', flush=True); input()")])
def test_lock_out_of_reach_keeps_no_slots(
    open_state: Path, monkeypatch: pytest.MonkeyPatch, user: int, program: str
) -> None:
    """In a socket no process has its descriptor, and another user's process cannot be killed for it."""
    monkeypatch.setattr(manager, "REMNANT_GRACE_S", 0.0)
    monkeypatch.setattr(manager, "IDENTITY_GRACE_S", 0.0)
    files, lines = theirs(open_state), list[str]()
    fd = alive.take_lock(files.lock)
    assert fd is not None
    with (
        closing(RunnerManager(open_state, lambda: None, lines.append)) as runners,
        subprocess.Popen(
            [PYTHON, "-c", program, str(fd)],
            pass_fds=[fd], user=user, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as keeper,
    ):  # fmt: skip
        assert keeper.stdout.readline() == "sent\n"
        os.truncate(files.lock, 0)
        os.close(fd)
        assert alive.is_locked(files.lock)
        assert runners.adopt() == []
        ended = [end for _ in range(5) for end in runners.poll(time.monotonic())]
        assert [end.key for end in ended] == [("mine", 1)]
        assert lines[-1] == "job mine: no process of its user has its lock any more; its slots are free"
        fd = alive.take_lock(files.lock)
        assert fd is not None, "the next runner of this run needs it"
        os.close(fd)
        keeper.communicate("\n")


def test_runner_that_names_itself_before_its_agent_names_the_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine. A runner that is never asked leaves as an orphan, and no signal reaches it by its keeper."""
    with ExitStack() as stack:
        keeper, runner = (stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(2))
        stack.callback(runner.kill)
        stack.callback(keeper.kill)

        def spawn(files: JobFiles, *_: object) -> subprocess.Popen[bytes]:
            alive.write_owner(files.lock, runner.pid)
            return keeper

        monkeypatch.setattr(manager, "spawn", spawn)
        with closing(RunnerManager(tmp_path, lambda: None, print)) as runners:
            runners.start(RunnerSpec("j", 1, "n1", (0,), "{}"), Account.of(None), StoreSecrets())
            assert alive.lock_owner(job_files(tmp_path, "j", 1).lock).pid == runner.pid


def test_runner_that_leaves_already_is_not_asked_again_by_the_next_agent(tmp_path: Path) -> None:
    """A second SIGTERM is one to kill."""
    files = made(tmp_path, "j")
    replace_file(files.runner_spec, RunnerSpec("j", 1, "n1", (0,), "{}").to_json())
    lock = alive.take_lock(files.lock)
    with subprocess.Popen(["sleep", "60"]) as runner, closing(RunnerManager(tmp_path, lambda: None, print)) as runners:
        alive.write_owner(files.lock, runner.pid)
        alive.write_stop_reason(files.lock, "drained: fan 3")
        assert runners.adopt() == []
        assert [(one.state, one.why) for one in runners.alive()] == [("leaving", "drained: fan 3")]
        assert not runners.request_stop("j", 1, "drained: fan 3", 60.0)
        with pytest.raises(subprocess.TimeoutExpired):
            runner.wait(0.3)
        runner.kill()
    os.close(lock)


@needs_root
@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_runner_log_is_opened_as_the_jobs_user(open_state: Path, link: Callable[[Path, Path], None]) -> None:
    """A file of root's that this user cannot write, with its only name in the user's folder: it stays as it is."""
    files = theirs(open_state)
    secret = open_state / "secret"
    replace_file(secret, b"a secret")
    link(secret, files.runner_log)
    if link is os.link:
        secret.unlink()
    program = (
        "import sys; from pathlib import Path; from elasticd_daemon.job_dir import JobFiles;"
        "from elasticd_daemon.runners import main, spawn; spawn.become(spawn.Account.of('nobody'));"
        "main.redirect_output_to_log(JobFiles(Path(sys.argv[1]))); print('something')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(files.root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the job runs without this log" in done.stderr
    assert files.runner_log.read_bytes() == b"a secret" and files.runner_log.stat().st_uid == 0
