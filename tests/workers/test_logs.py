"""Worker logs with real processes and files: kept, bounded, shown, and never in a worker's way."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from elasticd.errors import UsageError
from elasticd_agent.model.job import EntrypointMode, JobSpec, Streams
from elasticd_agent.system.nonblocking_writer import NonBlockingWriter
from elasticd_agent.workers.log_tail import LogTailer, MatchingLinesFile, TailedFile
from elasticd_agent.workers.logs import LOCK_FILE, JobLogs, LogDirectory, WorkerFiles, highest_round
from tests.library.conftest import wait_for

DEADLINE = 20.0
OUT = {0: Streams.OUT, 1: Streams.OUT}


def spec(**given: Any) -> JobSpec:
    return JobSpec(
        python=sys.executable, mode=EntrypointMode.SCRIPT, entrypoint="t.py", args=(), cwd=Path("/"), job_id="j",
        run="r", max_workers=2, **given,
    )  # fmt: skip


class Sink:
    """A console: a pipe that a thread reads, unless told not to."""

    def __init__(self) -> None:
        reader, self.fd = os.pipe()
        self.outlet = NonBlockingWriter(self.fd)
        self.data = bytearray()
        self.reading = threading.Event()
        self.reading.set()
        self.thread = threading.Thread(target=self.read, args=(reader,))
        self.thread.start()

    def read(self, reader: int) -> None:
        with open(reader, "rb", buffering=0) as file:
            while self.reading.wait() and (data := file.read(1 << 16)):
                self.data += data

    def close(self) -> None:
        self.reading.set()
        assert self.outlet.close(DEADLINE)
        os.close(self.fd)
        self.thread.join(DEADLINE)


@pytest.fixture
def out() -> Iterator[Sink]:
    sink = Sink()
    yield sink
    sink.close()


err = out


def run(files: WorkerFiles, script: str) -> int:
    """A worker as the launcher starts it: its streams opened for appending."""

    def opened(path: str | None) -> IO[bytes] | None:
        return None if path is None else open(path, "ab")

    stdout, stderr = opened(files.stdout), opened(files.stderr)
    try:
        return subprocess.run(["sh", "-c", script], stdout=stdout, stderr=stderr, timeout=DEADLINE).returncode
    finally:
        for file in (stdout, stderr):
            if file is not None:
                file.close()


def test_files_by_round_and_rank_private_and_shown_as_usual(tmp_path: Path, out: Sink, err: Sink) -> None:
    base = tmp_path / "with space ünd so"
    logs = JobLogs(spec(log_dir=base), tmp_path, out.outlet, err.outlet, print)
    files = logs.open_worker_files(7, 1, 3)
    assert run(files, r"echo hello; printf 'caf\351 \377'; echo oops >&2") == 0
    logs.group_ended(7)
    logs.close(DEADLINE)
    rank_dir = base / "round-7" / "rank-3"
    assert (rank_dir / "stdout.log").read_bytes() == b"hello\ncaf\xe9 \xff"
    assert (rank_dir / "stderr.log").read_bytes() == b"oops\n"
    assert files.error_file == str(rank_dir / "error.json")
    for path in (base, base / "round-7", rank_dir, *rank_dir.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert out.outlet.flush(DEADLINE)
    assert err.outlet.flush(DEADLINE)
    wait_for(lambda: bytes(out.data) == b"hello\ncaf\xe9 \xff", "the output")
    wait_for(lambda: bytes(err.data) == b"oops\n", "the output")


def test_tee_prefixes_lines_as_torchrun_does(tmp_path: Path, out: Sink, err: Sink) -> None:
    logs = JobLogs(spec(log_dir=tmp_path, tee=OUT), tmp_path, out.outlet, err.outlet, print)
    for local_rank in range(2):
        files = logs.open_worker_files(1, local_rank, local_rank)
        assert files.stderr is None, "not asked for: inherited"
        assert run(files, r"echo a; echo; printf '\377\r\n'; printf ' 0%%\r50%%\rno end'") == 0
    logs.group_ended(1)
    logs.close(DEADLINE)
    lines = (b"a", b"", b"\xff", b" 0%", b"50%", b"no end")
    expected = {prefix + line for prefix in (b"[default0]:", b"[default1]:") for line in lines}
    wait_for(lambda: len(out.data.splitlines()) >= len(expected), "the output")
    assert set(bytes(out.data).split(b"\n")) == expected | {b""}


def test_lines_arrive_while_the_worker_runs(tmp_path: Path, out: Sink, err: Sink) -> None:
    logs = JobLogs(
        spec(log_dir=tmp_path, tee=OUT, role="trainer"), tmp_path, out.outlet, err.outlet, print, "${rank}> "
    )
    files = logs.open_worker_files(1, 0, 4)
    assert files.stdout is not None
    with open(files.stdout, "ab", buffering=0) as file:
        file.write(b"half a l")
        file.write(b"ine\n")
        wait_for(lambda: bytes(out.data) == b"4> half a line\n", "the output")
    logs.close(DEADLINE)


def test_second_process_of_a_slot_in_one_round_is_shown_once(tmp_path: Path, out: Sink, err: Sink) -> None:
    """As where the first one did not come to its entry (`session.run`)."""
    logs = JobLogs(spec(log_dir=tmp_path / "logs"), tmp_path, out.outlet, err.outlet, print)
    for name in ("first", "second"):
        assert run(logs.open_worker_files(7, 1, 3), f"echo {name}") == 0
    logs.close(DEADLINE)
    assert out.outlet.flush(DEADLINE)
    wait_for(lambda: len(out.data) >= len(b"first\nsecond\n"), "the output")
    assert bytes(out.data) == b"first\nsecond\n"


def test_filters_pick_lines_into_a_file_of_their_own(tmp_path: Path, out: Sink, err: Sink) -> None:
    wanted = spec(log_dir=tmp_path, tee=OUT, duplicate_stdout_filters=("apple", "ürange"))
    logs = JobLogs(wanted, tmp_path, out.outlet, err.outlet, print)
    assert run(logs.open_worker_files(1, 0, 0), "echo an apple; echo a pear; echo ürange") == 0
    assert run(logs.open_worker_files(1, 1, 1), "echo apples") == 0
    logs.group_ended(1)
    logs.close(DEADLINE)
    picked = (tmp_path / "round-1" / "filtered_stdout.log").read_text().splitlines()
    assert sorted(picked) == ["[default0]:an apple", "[default0]:ürange", "[default1]:apples"]


def test_restart_and_later_job_never_overwrite(tmp_path: Path, out: Sink, err: Sink) -> None:
    base = tmp_path / "logs"
    assert highest_round(base) == 0
    for number in (1, 2):
        logs = JobLogs(spec(log_dir=base), tmp_path, out.outlet, err.outlet, print)
        assert logs.highest_round() == number - 1
        assert run(logs.open_worker_files(number, 0, 0), f"echo run {number}") == 0
        logs.close(DEADLINE)
    (base / "round-007").mkdir()
    (base / "round-x").mkdir()
    assert highest_round(base) == 2
    assert [(base / f"round-{n}" / "rank-0" / "stdout.log").read_text() for n in (1, 2)] == ["run 1\n", "run 2\n"]


def test_old_rounds_go_beyond_the_number_kept(tmp_path: Path, out: Sink, err: Sink) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    logs = JobLogs(spec(log_dir=tmp_path), tmp_path, out.outlet, err.outlet, print, keep_rounds=3)
    for number in range(1, 13):
        logs.open_worker_files(number, 0, 0)
        logs.group_ended(number)
    logs.close(DEADLINE)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".elasticd.lock") == [
        "notes.txt", "round-10", "round-11", "round-12",
    ]  # fmt: skip


def test_100_mb_are_shown_and_kept_bounded(tmp_path: Path, out: Sink, err: Sink) -> None:
    limit = 8 << 20
    logs = JobLogs(spec(log_dir=tmp_path, tee=OUT), tmp_path, out.outlet, err.outlet, print, limit=limit)
    files = logs.open_worker_files(1, 0, 0)
    rank_dir = Path(files.error_file).parent
    # After each MB it waits until the file is within its bound: one that grew for ever would stop it.
    script = f"""
import os, sys, time
for _ in range(100):
    sys.stdout.write(("x" * 99 + "\\n") * 10486)
    while os.fstat(1).st_size > 3 * {limit}:
        time.sleep(0.01)
"""
    with open(files.stdout or "", "ab") as file:
        subprocess.run([sys.executable, "-c", script], stdout=file, timeout=100, check=True)
    logs.group_ended(1)
    logs.close(DEADLINE)
    assert sum(path.stat().st_size for path in rank_dir.iterdir()) <= 3 * limit
    assert out.outlet.flush(DEADLINE)
    whole = b"[default0]:" + b"x" * 99
    odd = [text for text in bytes(out.data).split(b"\n")[:-1] if text != whole]
    assert len(odd) < 40, "only at a truncation may a line be torn or missing, and then it is said"
    assert all(text.startswith(b"[default0]:x") or b"not shown here" in text for text in odd)


def test_stopped_console_loses_no_lines(tmp_path: Path, out: Sink, err: Sink) -> None:
    limit = 1 << 20
    out.reading.clear()
    logs = JobLogs(spec(log_dir=tmp_path, tee=OUT), tmp_path, out.outlet, err.outlet, print, limit=limit)
    files = logs.open_worker_files(1, 0, 0)
    path = Path(files.stdout or "")
    lines = [b"%09d\n" % i for i in range(150_000)]
    with open(path, "ab", buffering=0) as file:
        file.write(b"".join(lines))
        time.sleep(0.3)
        assert path.stat().st_size == 1_500_000, "above the limit but the console may still come back"
        for _ in range(4):
            file.write(b"y" * limit + b"\n")
            wait_for(lambda: path.stat().st_size < 2 * limit, "the output")
    out.reading.set()
    logs.group_ended(1)
    logs.close(DEADLINE)
    assert out.outlet.flush(DEADLINE)
    wait_for(lambda: out.data.endswith(b"y\n"), "the output")
    assert b"bytes of rank 0's stdout are not shown here; see " in out.data
    assert path.with_name("stdout.log.1").stat().st_size <= limit


def test_a_console_that_went_away_changes_nothing_for_the_files(tmp_path: Path, err: Sink) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    outlet = NonBlockingWriter(writer)
    os.close(writer)
    logs = JobLogs(spec(log_dir=tmp_path, tee=OUT), tmp_path, outlet, err.outlet, print)
    files = logs.open_worker_files(1, 0, 0)
    assert run(files, "seq 1 200000") == 0
    logs.group_ended(1)
    logs.close(DEADLINE)
    assert Path(files.stdout or "").read_bytes().endswith(b"\n200000\n")
    wait_for(lambda: outlet.broken, "the end of the console")
    outlet.close()


def test_the_last_round_is_shown_before_the_next(tmp_path: Path, out: Sink) -> None:
    tail = LogTailer([out.outlet], interval_s=0.01)
    out.reading.clear()
    for number in (1, 2):
        path = tmp_path / str(number)
        tail.follow(TailedFile(path, number, "x", out.outlet, b"%d:" % number))
        path.write_bytes(b"line\n" * 400_000)
        tail.finish_round(number, within=DEADLINE)
    out.reading.set()
    assert tail.close(DEADLINE)
    assert out.outlet.flush(DEADLINE)
    wait_for(lambda: len(out.data) == 800_000 * 7, "the output")
    assert bytes(out.data).rindex(b"1:line") < bytes(out.data).index(b"2:line")


def test_file_that_grows_fast_after_truncation(tmp_path: Path, out: Sink) -> None:
    path = tmp_path / "log"
    followed = TailedFile(path, 1, "x", out.outlet, limit=10_000)
    for letter in (b"a", b"b", b"c"):
        with open(path, "ab") as file:
            file.write(letter * 30_000 + b"\n")
        wait_for(
            lambda: not followed.poll(show=True) and followed.is_shown() and path.stat().st_size == 0, "the output"
        )
    followed.close()
    wait_for(lambda: len(out.data) == 3 * 30_001, "the output")


def test_a_disk_that_is_full_keeps_the_bound_not_the_copy(tmp_path: Path, out: Sink) -> None:
    """RLIMIT_FSIZE makes writing the copy fail as a full disk does."""
    path = tmp_path / "log"
    followed = TailedFile(path, 1, "x", out.outlet, limit=10_000)
    path.write_bytes(b"x\n" * 10_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        while followed.poll(show=True) or not followed.is_shown():
            pass
        followed.poll(show=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert path.stat().st_size == 0
    assert not path.with_name("log.1").exists()
    followed.close()


def test_a_filtered_file_is_bounded_too(tmp_path: Path, out: Sink) -> None:
    picked = MatchingLinesFile(tmp_path / "filtered", (b"x",))
    followed = TailedFile(tmp_path / "log", 1, "x", out.outlet, b"p:", picked, limit=100_000)
    for _ in range(20):
        with open(tmp_path / "log", "ab") as file:
            file.write(b"x" * 9 + b"\n" + b"y\n" * 5000)
            file.write((b"x" * 9 + b"\n") * 5000)
        wait_for(lambda: not followed.poll(show=True) and followed.is_shown(), "the output")
    followed.close()
    assert picked.path.stat().st_size <= 300_000
    assert picked.path.with_name("filtered.1").stat().st_size <= 300_000
    assert set(picked.path.read_bytes().splitlines()) == {b"p:" + b"x" * 9}


def test_log_directory_that_fails_later(tmp_path: Path, out: Sink, err: Sink) -> None:
    said: list[str] = []
    base = tmp_path / "logs"
    logs = JobLogs(spec(log_dir=base), tmp_path, out.outlet, err.outlet, said.append)
    (base / "round-1").write_text("in the way")
    assert logs.open_worker_files(1, 0, 0) == WorkerFiles(None, None, str(tmp_path / "round-1" / "error-0.json"))
    assert "rank 0's output goes to the console" in said[0]
    logs.close(DEADLINE)


def test_without_files_only_the_error_file_is_set(tmp_path: Path, out: Sink, err: Sink) -> None:
    logs = JobLogs(spec(), tmp_path, out.outlet, err.outlet, print)
    assert logs.open_worker_files(1, 0, 0) == WorkerFiles(None, None, str(tmp_path / "round-1" / "error-0.json"))
    assert logs.highest_round() == 0
    logs.group_ended(1)
    logs.close(DEADLINE)


def test_tee_without_a_log_dir(tmp_path: Path, out: Sink, err: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said: list[str] = []
    logs = JobLogs(spec(tee=OUT), tmp_path, out.outlet, err.outlet, said.append)
    files = logs.open_worker_files(1, 0, 0)
    logs.close(DEADLINE)
    made = Path(files.stdout or "").parents[2]
    assert made.parent == tmp_path
    assert str(made) in said[0]


def test_log_directory_is_shared_within_a_run_only(tmp_path: Path) -> None:
    first = LogDirectory(tmp_path, "job one", "r1")
    with pytest.raises(UsageError, match=r"--log-dir .*: job job one run r1 pid \d+ is writing") as raised:
        LogDirectory(tmp_path, "job two", "r1")
    assert "\n" not in str(raised.value)
    with pytest.raises(UsageError):
        LogDirectory(tmp_path, "job one", "r2")
    LogDirectory(tmp_path, "job one", "r1").close()
    first.close()
    first.close()
    LogDirectory(tmp_path, "job two", "r1").close()


def test_the_lock_ends_with_its_holder_however_it_ends(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from elasticd_agent.workers.logs import LogDirectory\n"
        "held = LogDirectory(Path(sys.argv[1]), 'a', 'r'); print('held', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError):
            LogDirectory(tmp_path, "b", "r")
        holder.kill()
    LogDirectory(tmp_path, "b", "r").close()


@pytest.mark.parametrize("name", ["file", "file/below", "\0"])
def test_a_log_directory_that_cannot_be_is_a_usage_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--log-dir"):
        LogDirectory(tmp_path / name, "j", "r")


def test_the_lock_is_not_inherited_by_workers(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path, "a", "r")
    for process, has_lock in (("self", False), (str(os.getpid()), True)):
        listing = subprocess.run(["ls", "-l", f"/proc/{process}/fd"], close_fds=False, stdout=subprocess.PIPE)
        assert (LOCK_FILE.encode() in listing.stdout) is has_lock
    directory.close()
