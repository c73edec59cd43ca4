"""procfs: what processes are and use, seen from outside, and never by a file that can block."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path

import pytest

from elasticd_agent.hangs.collector import proc_facts
from elasticd_agent.system.processes import process_usage, procfs
from elasticd_agent.system.processes.process_usage import TreeUsage, UsageReader
from elasticd_agent.system.processes.procfs import Stat

Until = Callable[[Callable[[], object], float], object]

# A worker whose child burns CPU and writes; its parent ends at once, so that init or a subreaper has it.
ORPHANED = """
import os, sys
if os.fork() == 0:
    if os.fork() == 0:
        out = open(sys.argv[1], "wb", buffering=0)
        while True:
            out.write(b"x" * 4096)
            out.seek(0)
    os._exit(0)
os.wait()
print("ready", flush=True)
sys.stdin.read()
"""
# Waits to be told, then a child of its burns CPU.
FORKS = """
import os, sys
print("ready", flush=True)
sys.stdin.readline()
if os.fork() == 0:
    while True:
        pass
os.wait()
"""
IDLE = "import sys; print('ready', flush=True); sys.stdin.read()"
WITHOUT_ITS_MAIN_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1e6,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@contextmanager
def running(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A process in its own session; all of the session is killed at the end."""
    command = [sys.executable, "-I", "-S", "-c", code, *args]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def a(pid: int, parent: int, session: int, state: str = "S") -> Stat:
    return Stat(pid, "python", state, parent, session, 0.0, 1, 0)


def test_stat_line_with_any_name() -> None:
    numbers = " ".join(str(n) for n in range(4, 53))
    stat = procfs.parse_stat(f"42 (a ) S (b) R 1 2 3 {numbers}\n".encode())
    assert (stat.pid, stat.comm, stat.state, stat.parent, stat.session) == (42, "a ) S (b", "R", 1, 3)
    assert stat.cpu_s == pytest.approx((11 + 12 + 13 + 14) * procfs.TICK_S)
    assert (stat.threads, stat.start_ticks) == (17, 19)


@pytest.mark.parametrize("line", [b"", b"42", b"42 (python", b"42 (python) R 1", b"(python) 42"])
def test_invalid_stat_lines(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 its words are nobody's business
        procfs.parse_stat(line)


def test_bytes_are_those_of_system_calls_and_of_disks() -> None:
    text = b"rchar: 1\nwchar: 20\nsyscr: 7\nsyscw: 7\nread_bytes: 300\nwrite_bytes: 4000\ncancelled_write_bytes: 7\n"
    assert process_usage.parse_io_bytes(text) == 4321
    assert process_usage.parse_io_bytes(b"") == 0


def test_tree_has_descendants_and_session() -> None:
    processes = [
        a(1, 0, 1), a(10, 1, 10), a(11, 10, 10), a(12, 11, 12), a(13, 1, 10), a(14, 13, 14),
        a(20, 1, 20), a(21, 20, 20),
    ]  # fmt: skip
    found = procfs.trees([10, 20, 99], processes)
    assert set(found) == {10, 20}
    assert sorted(found[10]) == [10, 11, 12, 13, 14]
    assert sorted(found[20]) == [20, 21]


def test_a_root_that_leads_no_session_has_only_its_descendants() -> None:
    assert procfs.trees([10], [a(5, 1, 5), a(10, 5, 5), a(11, 10, 5), a(12, 5, 5)]) == {10: (10, 11)}


def test_states(until: Until) -> None:
    with running(IDLE) as process:
        until(lambda: procfs.state(process.pid) == "S", 20)
        process.send_signal(signal.SIGSTOP)
        until(lambda: procfs.state(process.pid) == "T", 20)
        process.send_signal(signal.SIGCONT)
        until(lambda: procfs.state(process.pid) == "S", 20)
        process.kill()
        until(lambda: procfs.state(process.pid) == "Z", 20)
        assert procfs.state_or_exiting(process.pid) == "X", "it only has to be reaped"
        process.wait()
        assert procfs.state(process.pid) == procfs.state_or_exiting(process.pid) == ""


def test_zombie_with_a_live_thread(until: Until) -> None:
    with running(WITHOUT_ITS_MAIN_THREAD) as process:
        until(lambda: procfs.state(process.pid) == "Z", 20)
        assert procfs.state_or_exiting(process.pid) == "Z"
        process.kill()
        until(lambda: procfs.state_or_exiting(process.pid) == "X", 20)


def test_a_childs_work_counts_even_if_its_parent_has_ended(until: Until, tmp_path: Path) -> None:
    with running(ORPHANED, str(tmp_path / "out")) as busy, running(IDLE) as idle:
        until(lambda: procfs.state(idle.pid) == "S", 20)
        first = UsageReader().read([busy.pid, idle.pid])

        def grown() -> bool:
            now = UsageReader().read([busy.pid, idle.pid])
            more = now[busy.pid].cpu_s - first[busy.pid].cpu_s, now[busy.pid].io_bytes - first[busy.pid].io_bytes
            return more[0] >= 0.1 and more[1] > 1 << 20

        until(grown, 20)
        after = UsageReader().read([idle.pid])[idle.pid]
        assert after.cpu_s - first[idle.pid].cpu_s <= 2 * procfs.TICK_S
        assert after.io_bytes == first[idle.pid].io_bytes


def test_usage_reader_finds_new_processes(until: Until, tmp_path: Path) -> None:
    usages = UsageReader()
    with running(IDLE) as first, running(FORKS) as second:
        assert set(usages.read([first.pid])) == {first.pid}
        before = usages.read([first.pid, second.pid])[second.pid].cpu_s
        second.stdin.write("go on\n")
        second.stdin.flush()
        until(lambda: usages.read([first.pid, second.pid])[second.pid].cpu_s > before + 0.1, 20)
        usages.read([first.pid, second.pid])
        assert usages.read([first.pid, second.pid])[first.pid].cpu_s < 1
    assert usages.read([first.pid, second.pid]) == {}


def test_kernel_that_counts_no_run_times_does_not_say_that_nothing_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONFIG_SCHEDSTATS is off: the file is there, and has zeros."""
    read = procfs.read
    monkeypatch.setattr(procfs, "read", lambda path, *most: b"0 0 0\n" if "schedstat" in path else read(path, *most))
    assert UsageReader().read([os.getpid()])[os.getpid()].wait_s is None
    assert proc_facts.runnable_time_ns(os.getpid()) == {os.getpid(): -1}


def test_ended_processes_are_left_out() -> None:
    with running(IDLE) as process:
        assert isinstance(UsageReader().read([process.pid])[process.pid], TreeUsage)
    assert UsageReader().read([process.pid]) == {}


SPINS = """
import ctypes, sys, threading
def name(given):
    ctypes.CDLL(None).prctl(15, given.encode(), 0, 0, 0)
def spin():
    name(sys.argv[2])
    while True:
        pass
name(sys.argv[1])
threading.Thread(target=spin).start()
print("ready", flush=True)
"""


@pytest.mark.parametrize(
    ("process", "thread", "counts"),
    [
        ("python", "NCCL Progress 0", False),
        ("python", "NCCL GIN Progre", False),
        ("python", "pt_nccl_watchdg", False),
        ("python", "pt_autograd_0", True),
        ("python", "Thread-1 (read)", True),
        ("python", "cuda-EvtHandlr", False),
        ("python", "cuda00001400006", False),
        ("python", "cuda_prefetch", True),
        ("python", "NCCLog-reader", True),
        ("cuda_train", "cuda_train", True),
    ],
)
def test_polling_of_device_threads_is_no_work(process: str, thread: str, counts: bool, until: Until) -> None:
    """NCCL's proxy spins while a collective is outstanding, also in a hang; threads of the script work."""
    with running(SPINS, process, thread) as started:
        spun = f"/proc/{started.pid}/task/*/comm"
        until(lambda: [path for path in glob(spun) if Path(path).read_text() == f"{thread}\n"], 20)
        reader = UsageReader()
        first = reader.read([started.pid])[started.pid].cpu_s
        ran = procfs.stat(started.pid)
        assert ran is not None
        until(lambda: (now := procfs.stat(started.pid)) is not None and now.cpu_s > ran.cpu_s + 0.2, 20)
        used_s = reader.read([started.pid])[started.pid].cpu_s - first
        assert (used_s > 0.1) == counts, used_s


_ASKS = """
import socket, sys, threading
server = socket.create_server(("127.0.0.1", 0))
kept = []
def answer():
    while True:
        kept.append(server.accept()[0])
        kept[-1].sendall(bytes(1000))
threading.Thread(target=answer, daemon=True).start()
for line in sys.stdin:
    kept.clear()
    with socket.create_connection(server.getsockname()) as one:
        one.recv(1000, socket.MSG_WAITALL)
        print(server.getsockname()[1], flush=True)
        sys.stdin.readline()
"""


def test_bytes_of_connections_that_are_closed_count(until: Until) -> None:
    """Each request has one of its own. Those of the round's store are no work."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", _ASKS], stdin=pipe, stdout=pipe, text=True) as asks:
        assert asks.stdin is not None
        assert asks.stdout is not None
        reader, own, port, seen = UsageReader(), UsageReader(), 0, []
        reader.read([asks.pid])
        own.read([asks.pid])
        for _ in range(3):
            asks.stdin.write("\n")
            asks.stdin.flush()
            port = int(asks.stdout.readline())
            seen.append(reader.read([asks.pid])[asks.pid].tcp_moved_bytes)
            told = own.read([asks.pid], port)[asks.pid].tcp_moved_bytes
            asks.stdin.write("\n")
            asks.stdin.flush()
        asks.stdin.close()
    # TCP counts the end of a stream as a byte.
    assert [round(one, -2) for one in seen] == [2000, 4000, 6000], "sent and received"
    assert round(told, -2) == 3000, "only what its server has sent"


def test_time_without_a_processor_counts_for_working_threads_only(
    until: Callable[[Callable[[], object], float], object],
) -> None:
    """Two loops on one core starve each other; a process that sleeps waits for nothing."""
    core = str(min(os.sched_getaffinity(0)))
    codes = ["while True: pass", "while True: pass", "import time; time.sleep(1e6)"]
    pin = f"import os; os.sched_setaffinity(0, {{{core}}})\n"
    started = [subprocess.Popen([sys.executable, "-I", "-S", "-c", pin + code]) for code in codes]
    try:
        reader, pids = UsageReader(), [process.pid for process in started]

        def waited(pid: int) -> float:
            found = reader.read(pids).get(pid)
            return (found.wait_s or 0.0) if found is not None else 0.0

        until(lambda: procfs.state(pids[2]) == "S", 20)
        at_start, asleep = waited(pids[0]), waited(pids[2])
        until(lambda: waited(pids[0]) > at_start + 0.3, 20)
        assert waited(pids[2]) <= asleep + 0.1
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_process_whose_core_is_written_is_ending(tmp_path: Path) -> None:
    """All of its threads stand still meanwhile, as if one of them had the GIL."""
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("the kernel writes no cores here")
    script = "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (1 << 27, resource.RLIM_INFINITY))"
    script += "; memory = bytearray(os.urandom(1 << 20) * 100); os.abort()"
    seen = set[str]()
    for _ in range(10):  # whoever gets no processor meanwhile misses the moment
        with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path) as process:
            while process.poll() is None:
                seen |= {procfs.state(process.pid)} if procfs.state_or_exiting(process.pid) == "X" else set()
        for path in tmp_path.iterdir():
            path.unlink()
        assert process.returncode == -signal.SIGABRT
        if seen - {"Z", ""}:
            return
    pytest.fail("it ran until it had ended")
