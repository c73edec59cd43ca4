"""The heartbeat file: the agent reads what the worker wrote, whatever happens to either of them in between."""

from __future__ import annotations

import errno
import os
import signal
import stat
import struct
import subprocess
import sys
import time
import timeit
from pathlib import Path
from typing import Any

import pytest

from elasticd.errors import WireError
from elasticd.heartbeat import record as heartbeat
from elasticd.heartbeat.exit_report import ExitReport
from elasticd.heartbeat.optimizer_hook import install_optimizer_hook
from elasticd.heartbeat.record import HeartbeatReader, HeartbeatWriter, Phase, StepSource


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "beat"
    heartbeat.create(path)
    return path


def read(path: Path) -> heartbeat.Heartbeat:
    with HeartbeatReader(path) as reader:
        return reader.read()


def test_new_file_is_private_whole_and_empty(path: Path) -> None:
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == heartbeat.FILE_BYTES
    assert status.st_blocks * 512 >= heartbeat.FILE_BYTES, "a hole would be SIGBUS when the disk is full"
    assert read(path) == heartbeat.Heartbeat()
    with pytest.raises(FileExistsError):
        heartbeat.create(path)


@pytest.mark.parametrize("written", [None, 4096])
def test_full_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int | None) -> None:
    """/dev/shm is full, and not the disk that the reader thinks of first."""

    def write(fd: int, content: bytes) -> int:
        if written is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match=r"No space left on device: '/.*/beat'$"):
        heartbeat.create(tmp_path / "beat")


def test_reader_gets_what_writer_wrote(path: Path) -> None:
    before = time.monotonic_ns()
    writer = HeartbeatWriter(path)
    started = read(path)
    assert started.phase is Phase.STARTING
    assert before <= started.started_ns <= time.monotonic_ns()
    writer.step(41)
    writer.step(42)
    first = read(path)
    assert (first.step, first.phase, first.source) == (42, Phase.STEP, StepSource.SESSION)
    assert started.started_ns <= first.first_step_ns < first.progress_ns
    writer.set_phase(Phase.BARRIER, "äll together")
    waiting = read(path)
    assert (waiting.step, waiting.phase, waiting.barrier) == (42, Phase.BARRIER, "äll together")
    assert waiting.progress_ns > first.progress_ns
    assert (waiting.barrier_s, waiting.pid) == (0.0, os.getpid())
    writer.set_phase(Phase.BARRIER, "x" * 100, 30.5)
    assert (read(path).barrier, read(path).barrier_s) == ("x" * 64, 30.5)
    writer.set_phase(Phase.STEP)
    assert read(path).barrier_s == 0.0


def test_layout_matches_docstring(path: Path) -> None:
    writer = HeartbeatWriter(path)
    writer.step(-7, StepSource.HOOK)
    writer.set_phase(Phase.BARRIER, "gate")
    writer.write_exit_report(ExitReport("exit"))
    raw = path.read_bytes()
    assert struct.unpack_from("<8sII", raw) == (b"ELASTICD", 1, 5)
    seen = read(path)
    assert struct.unpack_from("<qQQQII", raw, 72) == (
        *(-7, seen.progress_ns, seen.first_step_ns, seen.started_ns),
        *(Phase.EXIT, StepSource.HOOK),
    )
    length = struct.unpack_from("<I", raw, 256)[0]
    assert raw[260 : 260 + length].startswith(b'{"kind": "exit"')
    words = {
        192: "collectives",
        200: "alive_ticks",
        208: "collectives_per_step",
        216: "wait_ticks",
        232: "collectives_at_step",
        248: "moved_ticks",
    }
    for at, name in words.items():
        overwrite(path, at, struct.pack("<q", 12345 + at))
        assert getattr(read(path), name) == 12345 + at
    overwrite(path, 224, struct.pack("<Q", 1800_000))
    assert read(path).collective_timeout_s == 1800
    writer.set_wait("save()", 3, 2)
    assert struct.unpack_from("<iI24s", path.read_bytes(), 32) == (3, 2, b"save()".ljust(24, b"\0"))


@pytest.mark.parametrize("minor", [3, heartbeat.MINOR])
def test_wait_of_session_call_is_no_progress(path: Path, minor: int) -> None:
    """An agent of layout 1.3 leaves the words zero in the file that it creates, and skips them."""
    if minor == 3:
        overwrite(path, 12, struct.pack("<I", minor))
        overwrite(path, 32, bytes(32))
    assert (read(path).wait_call, read(path).wait_rank, read(path).wait_count) == ("", -1, 0)
    writer = HeartbeatWriter(path)
    writer.step(7)
    before = read(path)
    writer.set_wait("barrier('äll together now and for ever')", 1, 3)
    seen = read(path)
    assert seen.wait_call == "barrier('äll togeth…)"
    assert (seen.wait_rank, seen.wait_count) == (1, 3)
    assert (seen.step, seen.progress_ns, seen.phase) == (before.step, before.progress_ns, before.phase)
    writer.set_wait()
    assert read(path) == before


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_collectives_per_step_known_after_two_steps(path: Path) -> None:
    writer = HeartbeatWriter(path)

    def counts() -> tuple[int, int]:
        seen = read(path)
        return seen.collectives_per_step, seen.collectives_at_step

    writer.step(1)
    assert counts() == (-1, -1), "there is no group"
    writer.step(2, issued=7)
    assert counts() == (-1, 7)
    writer.step(3, issued=10)
    assert counts() == (3, 10)
    writer.step(4, issued=10)
    assert counts() == (0, 10)
    writer.step(5, issued=2)
    assert counts() == (-1, 2), "another group counts anew"
    writer.step(6, issued=4)
    assert counts() == (2, 4)
    writer.step(60, StepSource.HOOK, issued=5)
    assert counts() == (-1, 5), "the steps of another source end elsewhere"


# Layout 1.0, as its writers and readers have it.
HEADER_1_0 = struct.Struct("<8sIIQ40x QqQQQII64s16x qQ48x I")


def test_reader_1_0_reads_current_writer(path: Path) -> None:
    writer = HeartbeatWriter(path)
    writer.step(3, issued=10)
    writer.step(4, issued=12)
    writer.set_phase(Phase.BARRIER, "gate")
    seen = read(path)
    fields = HEADER_1_0.unpack_from(path.read_bytes())
    assert fields[3:5] == (0, 6), "no request; written three times"
    assert fields[5:9] == (4, seen.progress_ns, seen.first_step_ns, seen.started_ns)
    assert (*fields[9:11], fields[11].rstrip(b"\0")) == (Phase.BARRIER, StepSource.SESSION, b"gate")
    assert fields[14] == 0, "no exit report"


def test_current_reader_of_1_0_file_reads_unknown(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(
        HEADER_1_0.pack(b"ELASTICD", 1, 0, 0, 2, 42, 9, 8, 7, 1, 2, b"", 0, 0, 0).ljust(heartbeat.FILE_BYTES, b"\0")
    )
    seen = read(path)
    assert (seen.step, seen.progress_ns, seen.phase, seen.source) == (42, 9, Phase.STEP, StepSource.SESSION)
    assert (seen.collectives, seen.collectives_per_step, seen.collectives_at_step, seen.collective_timeout_s) == (
        -1,
        -1,
        -1,
        0.0,
    )
    writer = HeartbeatWriter(path)  # a worker of today whose agent is of 1.0
    writer.step(43, issued=5)
    assert HEADER_1_0.unpack_from(path.read_bytes())[5] == 43


def test_hook_resets_counts_when_1_0_session_counts(path: Path) -> None:
    hooks: list[Any] = []
    install_optimizer_hook(HeartbeatWriter(path), hooks.append)
    optimizer = object()
    for _ in range(2):
        hooks[0](optimizer, (), {})
    assert (read(path).step, read(path).source) == (2, StepSource.HOOK)
    overwrite(path, 208, struct.pack("<q", 5))  # as if a group had issued so many
    overwrite(path, 72, struct.pack("<q", 100))
    overwrite(path, 108, struct.pack("<I", StepSource.SESSION))
    hooks[0](optimizer, (), {})
    assert (read(path).step, read(path).collectives_per_step) == (100, -1)


def test_writer_1_0_leaves_new_words_unknown(path: Path) -> None:
    overwrite(path, 64, struct.pack("<QqQQ", 2, 42, 9, 8))
    overwrite(path, 104, struct.pack("<II", 1, 2))
    assert read(path) == heartbeat.Heartbeat(42, 9, 8, 0, Phase.STEP, StepSource.SESSION)


def test_request_reaches_worker(path: Path) -> None:
    writer = HeartbeatWriter(path)
    assert writer.request == 0
    with HeartbeatReader(path) as reader:
        reader.write_request(heartbeat.STOP)
        assert writer.request == heartbeat.STOP
        assert reader.read().request == heartbeat.STOP
        reader.write_request(0)
    assert writer.request == 0


def test_two_writers_in_one_process(path: Path) -> None:
    hook, session = HeartbeatWriter(path), HeartbeatWriter(path)
    started = read(path).started_ns
    hook.step(3, StepSource.HOOK)
    assert read(path).source == StepSource.HOOK
    session.step(100)
    hook.make_step_hook(lambda: 0)(4)
    assert (read(path).step, read(path).source, read(path).started_ns) == (100, StepSource.SESSION, started)


def test_optimizer_step_before_session_step_is_not_counted(path: Path) -> None:
    """A look between the two took the process's first step for one beyond all that the job had made."""
    hook, session = HeartbeatWriter(path), HeartbeatWriter(path)
    session.use_session()
    count = hook.make_step_hook(lambda: 0)
    count(1)
    assert (read(path).step, read(path).first_step_ns, read(path).source) == (0, 0, StepSource.SESSION)
    session.step(110)
    count(2)
    assert (read(path).step, read(path).source) == (110, StepSource.SESSION)


def test_session_without_steps_leaves_count_to_optimizer(path: Path) -> None:
    hook, session = HeartbeatWriter(path), HeartbeatWriter(path)
    session.use_session()
    count = hook.make_step_hook(lambda: 0)
    for step in range(1, 8):
        count(step)
    assert (read(path).step, read(path).source) == (7, StepSource.HOOK)
    HeartbeatWriter(path).use_session()
    count(8)
    assert (read(path).step, read(path).source) == (8, StepSource.HOOK), "it has begun, and goes on"


def test_writer_keeps_no_descriptor(path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    writer = HeartbeatWriter(path)
    assert set(os.listdir("/proc/self/fd")) == before
    path.unlink()
    writer.step(1)


def test_forked_child_writes_private_copy(path: Path) -> None:
    writer = HeartbeatWriter(path)
    writer.step(5)
    if (pid := os.fork()) == 0:
        writer.step(99)
        writer.write_exit_report(ExitReport("exit"))
        os._exit(0)
    os.waitpid(pid, 0)
    assert read(path).step == 5
    assert read(path).exit_report is None


def test_hook_leaves_the_steps_of_a_session_alone_after_a_change_of_files(path: Path, tmp_path: Path) -> None:
    """Between its first step there and the session's, a reader would add up the steps of both rounds."""
    heartbeat.create(tmp_path / "next")
    launchers, session = HeartbeatWriter(path), HeartbeatWriter(path)
    session.use_session()
    hook = launchers.make_step_hook(lambda: -1)
    for count in range(1, 11):
        hook(count)
        session.step(100 + count)
    session.switch_file(tmp_path / "next")
    session.use_session()
    hook(11)
    assert (read(tmp_path / "next").source, read(tmp_path / "next").step) == (StepSource.SESSION, 0)
    for count in range(12, 16):
        hook(count)
    assert read(tmp_path / "next").source == StepSource.HOOK, "its step() is not called"


def test_hook_step_equals_step(path: Path, tmp_path: Path) -> None:
    """Whatever happens between two steps: another phase, another group, one that cannot count."""
    heartbeat.create(tmp_path / "other")
    issued, one, other = 0, HeartbeatWriter(path), HeartbeatWriter(tmp_path / "other")
    step = one.make_step_hook(lambda: issued)
    counts = [0, 2, 4, 8, 1, 3, -1, 7, 9]
    for count, issued in enumerate(counts, 1):
        step(count)
        other.step(count, StepSource.HOOK, issued)
        for writer in (one, other):
            if count in (3, 6):
                writer.set_phase(Phase.EVAL)
            writer.tick(-1 if count == 4 else issued, 1000)
        found, expected = read(path), read(tmp_path / "other")
        same = ("step", "phase", "source", "collectives_per_step", "collectives_at_step", "collectives", "wait_ticks")
        assert [getattr(found, name) for name in same] == [getattr(expected, name) for name in same], count
        assert found.first_step_ns and found.progress_ns >= found.first_step_ns
    one.step(100)
    step(101)
    assert (read(path).step, read(path).source) == (100, StepSource.SESSION)


GARBAGE = {
    "empty": b"",
    "short": b"ELASTICD" + b"\0" * 100,
    "another file": b"\x7fELF".ljust(heartbeat.FILE_BYTES, b"\1"),
    "another major": struct.pack("<8sII", b"ELASTICD", 2, 0).ljust(heartbeat.FILE_BYTES, b"\0"),
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused_by_reader_and_writer(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(content)
    with pytest.raises(WireError, match="beat file"):
        HeartbeatReader(path)
    with pytest.raises(WireError, match="beat file"):
        HeartbeatWriter(path)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (104, b"\x63\0\0\0"),
        (108, b"\x63\0\0\0"),
        (256, b"\xff\xff\xff\0"),
        (256, b"\x04\0\0\0nope"),
        (256, b"\2\0\0\0{}"),
        (256, struct.pack("<I", 15_000) + b"[" * 15_000),
    ],
)
def test_garbage_written_later_raises_wire_error(path: Path, at: int, value: bytes) -> None:
    with HeartbeatReader(path) as reader:
        overwrite(path, at, value)
        with pytest.raises(WireError, match="beat file"):
            reader.read()


def test_newer_minor_with_unknown_phase(path: Path) -> None:
    overwrite(path, 12, struct.pack("<I", heartbeat.MINOR + 1))
    overwrite(path, 104, struct.pack("<I", 77))
    assert read(path).phase is Phase.STEP


def test_truncated_file_raises_wire_error(path: Path) -> None:
    with HeartbeatReader(path) as reader:
        os.truncate(path, 100)
        with pytest.raises(WireError, match="100 bytes"):
            reader.read()


WRITE_FOREVER = """
import sys, time
from elasticd.heartbeat.record import HeartbeatWriter, StepSource
writer = HeartbeatWriter(sys.argv[1])
for n in range(1 << 60):
    writer.step(n, StepSource.HOOK if n % 2 else StepSource.SESSION)
    time.sleep(1e-5)
"""


def test_reader_never_sees_half_a_step(path: Path) -> None:
    """A reader never sees half a step, and a stopped writer does not block it."""
    with subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(path)], env=python_path()) as process:
        try:
            deadline = time.monotonic() + 60
            with HeartbeatReader(path) as reader:
                while reader.read().step == 0:
                    assert time.monotonic() < deadline
                seen = [reader.read() for _ in range(10_000)]
                while {each.source for each in seen} != {StepSource.HOOK, StepSource.SESSION}:
                    assert time.monotonic() < deadline
                    seen.append(reader.read())
                assert all(each.source == (StepSource.HOOK if each.step % 2 else StepSource.SESSION) for each in seen)
                for _ in range(50):
                    process.send_signal(signal.SIGSTOP)
                    start = time.monotonic()
                    assert reader.read().step > 0
                    assert time.monotonic() - start < 30
                    process.send_signal(signal.SIGCONT)
        finally:
            process.kill()


def test_step_costs_less_than_a_microsecond(path: Path) -> None:
    """Or, on a slow machine, less than 30 calls of an empty function."""
    writer = HeartbeatWriter(path)
    best, empty = (
        min(timeit.repeat(call, number=1000, repeat=200)) / 1000 for call in (lambda: writer.step(7), lambda: None)
    )
    assert best < max(1e-6, 30 * empty), f"{best * 1e9:.0f} ns, an empty call {empty * 1e9:.0f} ns"


# --- exit report ---


def python_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def die(path: Path, script: str) -> tuple[int, str, ExitReport | None]:
    prefix = (
        "from elasticd.heartbeat import exit_report, record\n"
        f"exit_report.install_exit_report(record.HeartbeatWriter({str(path)!r}))\n"
    )
    command = [sys.executable, "-c", prefix + script]
    done = subprocess.run(command, env=python_path(), capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr, read(path).exit_report


def test_exit_report_of_unhandled_exception(path: Path) -> None:
    code, err, report = die(path, "class Mine(ValueError): pass\ndef deep():\n    raise Mine('no: such thing')\ndeep()")
    assert code == 1
    assert (report.kind, report.type, report.message, report.code) == (
        "exception",
        "__main__.Mine",
        "no: such thing",
        None,
    )
    assert report.bases == ("ValueError", "Exception", "BaseException")
    assert report.traceback.replace("__main__.", "") == err.replace("__main__.", "")  # Python 3.10 prints no module
    assert read(path).phase is Phase.EXIT


def test_exit_report_of_syntax_and_unprintable_errors(path: Path, tmp_path: Path) -> None:
    _, _, report = die(path, "class Bad(Exception):\n    def __str__(self): return 1 / 0\nraise Bad()")
    assert report.type == "__main__.Bad"
    assert report.message in ("<exception str() failed>", "<unprintable Bad object>")  # from Python 3.11 on; 3.10
    (tmp_path / "broken.py").write_text("def (:\n")
    other = tmp_path / "beat2"
    heartbeat.create(other)
    _, _, report = die(other, f"import runpy; runpy.run_path({str(tmp_path / 'broken.py')!r})")
    assert report.type == "SyntaxError"


def test_exit_report_names_the_exception_before_a_wait_in_vain(path: Path) -> None:
    """As of `finally: session.save()`, to which no other rank comes."""
    script = "from elasticd.errors import MissedCall\n"
    script += "try: raise ValueError('a: fault')\nfinally: raise MissedCall('rank 0 has not called save()')"
    _, err, report = die(path, script)
    assert (report.type, report.message, report.bases[0]) == ("ValueError", "a: fault", "Exception")
    assert report.traceback == err


@pytest.mark.parametrize(
    "script", ["pass", "import sys; sys.exit(3)", "import argparse; argparse.ArgumentParser().error('x')"]
)
def test_exit_report_of_orderly_end_has_no_code(path: Path, script: str) -> None:
    _, _, report = die(path, script)
    assert report == ExitReport("exit")


@pytest.mark.parametrize(
    "script", ["import os; os._exit(3)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_no_exit_report_without_python_exit(path: Path, script: str) -> None:
    code, _, report = die(path, script)
    assert code in (3, -9)
    assert report is None


def test_exit_report_keeps_end_of_long_traceback(path: Path) -> None:
    _, err, report = die(path, "def f(n):\n    n and f(n - 1)\n    raise ValueError('é' * 10000 + str(n))\nf(300)")
    assert report.message.startswith("é" * 100)
    assert err.endswith(report.traceback)
    assert len(report.traceback.encode()) > 4000


def test_exit_report_runs_after_other_exit_handlers(path: Path) -> None:
    """The exit report is written after every other exit handler, and changes nothing."""
    script = "import atexit, sys\natexit.register(print, 'bye', file=sys.stderr)\n"
    script += "assert sys.excepthook is sys.__excepthook__\n1 / 0"
    code, err, report = die(path, script)
    assert code == 1
    assert err.endswith("ZeroDivisionError: division by zero\nbye\n")
    assert report.type == "ZeroDivisionError"


def test_groups_are_read_until_progress(path: Path) -> None:
    writer = HeartbeatWriter(path)
    assert read(path).groups == ()
    writer.write_groups(((7, 500, 400), (0xFFFFFFFF, 3, 3)))
    assert read(path).groups == ((7, 500, 400), (0xFFFFFFFF, 3, 3))
    assert struct.unpack_from("<Qqq", path.read_bytes(), 16192) == (7, 500, 400)
    writer.write_groups(tuple((number, 1, 0) for number in range(1, 1 + heartbeat.MAX_GROUPS)))
    assert len(read(path).groups) == heartbeat.MAX_GROUPS
    overwrite(path, 16176, struct.pack("<Q", 3))
    assert read(path).groups == (), "they are being written"
    writer.write_groups(((7, 500, 400),))
    assert read(path).groups == ((7, 500, 400),), "a writer that was killed in between is no hindrance"
    writer.step(5)
    assert read(path).groups == (), "what the devices waited in before says nothing now"


def test_exit_report_of_1_3_overwrites_groups(path: Path) -> None:
    writer = HeartbeatWriter(path)
    writer.write_groups(((7, 500, 400),))
    report = b'{"kind": "exit", "type": "", "message": "' + 15900 * b"x" + b'", "traceback": "", "code": 1}'
    overwrite(path, 260, report)
    overwrite(path, 256, struct.pack("<I", len(report)))
    seen = read(path)
    assert seen.groups == ()
    assert seen.exit_report.message == 15900 * "x"
