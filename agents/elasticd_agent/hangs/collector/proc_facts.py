"""/proc's facts of one process, its threads and its tree: fields of RankEvidence, as JSON.

Nothing is read that takes a lock of the process, and no descriptor's target is opened. What cannot be read is left out.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any

from elasticd_agent.system.processes import procfs

MAX_THREADS = 256
MAX_FDS = 256
MAX_PROCESSES = 64
_STATUS_FIELDS = (
    "FDSize",
    "VmPeak",
    "VmRSS",
    "VmSwap",
    "SigPnd",
    "ShdPnd",
    "SigBlk",
    "SigIgn",
    "SigCgt",
    "Cpus_allowed_list",
)
_SWITCH_FIELDS = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")

# From asm/unistd.h: the calls a stuck process is usually found in. The first argument of those in _FD_SYSCALLS is a
# descriptor.
_SYSCALL_NAMES = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll", 8: "lseek",
        16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 23: "select", 26: "msync",
        35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg",
        61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 77: "ftruncate", 82: "rename",
        87: "unlink", 202: "futex", 217: "getdents64", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid",
        257: "openat", 262: "newfstatat", 263: "unlinkat", 264: "renameat", 270: "pselect6", 271: "ppoll",
        281: "epoll_pwait", 288: "accept4", 316: "renameat2", 332: "statx",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 35: "unlinkat", 38: "renameat", 46: "ftruncate",
        56: "openat", 57: "close", 61: "getdents64", 62: "lseek", 63: "read", 64: "write", 65: "readv", 66: "writev",
        67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 80: "fstat", 82: "fsync",
        83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept",
        203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 227: "msync", 242: "accept4",
        260: "wait4", 276: "renameat2", 291: "statx",
    },
}  # fmt: skip
_FD_SYSCALLS = (
    "read", "write", "ioctl", "pread64", "pwrite64", "readv", "writev", "connect", "accept", "accept4", "sendto",
    "recvfrom", "sendmsg", "recvmsg", "fcntl", "flock", "fsync", "fdatasync", "fstat", "lseek", "ftruncate",
    "getdents64", "epoll_wait", "epoll_pwait",
)  # fmt: skip
_FILE_SYSCALLS = (
    "open", "openat", "stat", "lstat", "newfstatat", "statx", "rename", "renameat", "renameat2", "unlink", "unlinkat",
    "msync", "close",
)  # fmt: skip
"""Calls on files, whatever their first argument is. The descriptor that is being closed has no target any more: a file
may be uploaded then."""


def process_facts(pid: int) -> dict[str, Any]:
    """The fields of RankEvidence that are from /proc; {} if the process has ended."""
    stat = procfs.stat(pid)
    if stat is None:
        return {}
    everyone = procfs.scan()
    tree = [
        everyone[member] for member in procfs.trees([pid], everyone.values()).get(pid, (pid,)) if member in everyone
    ]
    fds = procfs.fd_targets(pid, MAX_FDS)
    call = syscall(pid, fds)
    known = dict(_read_pairs(f"/proc/{pid}/status"))
    proc: dict[str, Any] = {
        "comm": stat.comm,
        "syscall": call,
        "cpu_s": round(stat.cpu_s, 2),
        "tree_cpu_s": round(sum(member.cpu_s for member in tree), 2),
        "io": {name: int(value) for name, value in _read_pairs(f"/proc/{pid}/io") if value.isdecimal()},
        "status": {name: known[name] for name in _STATUS_FIELDS if name in known},
        "switches": {name: int(known[name]) for name in _SWITCH_FIELDS if known.get(name, "").isdecimal()},
        "cgroup": _read_text(f"/proc/{pid}/cgroup").split(),
        "threads": [_thread_facts(pid, tid) for tid in procfs.tids(pid)[:MAX_THREADS]],
        "fds": fds,
    }
    return {
        "pid": pid,
        "state": stat.state,
        "wchan": wchan(pid),
        "call": _describe_syscall(call),
        "kernel": _read_text(f"/proc/{pid}/stack").splitlines(),
        "tree": [_tree_process_facts(member) for member in tree[:MAX_PROCESSES]],
        "proc": {name: value for name, value in proc.items() if value not in ("", [], {}, None)},
    }


def _describe_syscall(call: Mapping[str, Any]) -> str:
    """ "read of /job/data.bin" """
    name = call.get("name") or (f"system call {call['number']}" if call else "")
    return f"{name} of {call['target']}" if call.get("target") else name


def wchan(pid: int) -> str:
    """The kernel function the process sleeps in; "" for none, or without the right to know."""
    function = _read_text(f"/proc/{pid}/wchan")
    return "" if function == "0" else function


def syscall(pid: int, fds: dict[str, str]) -> dict[str, Any]:
    """The system call the main thread is in, with what its descriptor points to."""
    return _parse_syscall(_read_text(f"/proc/{pid}/syscall"), fds)


def _parse_syscall(text: str, fds: Mapping[str, str]) -> dict[str, Any]:
    fields = text.split()
    if len(fields) < 2 or not fields[0].isdecimal():
        return {}
    number = int(fields[0])
    name = _SYSCALL_NAMES.get(platform.machine(), {}).get(number, "")
    call: dict[str, Any] = {"number": number, "name": name, "arguments": fields[1:7]}
    if name in _FD_SYSCALLS:
        fd = str(int(fields[1], 16))
        call |= {"fd": int(fd), "target": fds.get(fd, "")}
    return call


def may_wait_for_file(pid: int, tid: str) -> bool:
    """True if the thread is blocked in the kernel, sleeps outside of any system call, where it waits for a page, or is
    in a system call on a file: a program that serves a file system (FUSE) is waited for in an ordinary sleep."""
    at = f"/proc/{pid}/task/{tid}"
    state = _read_text(f"{at}/stat").rpartition(")")[2].strip()[:1]
    text = _read_text(f"{at}/syscall")
    if state == "D" or text.startswith("-1 "):
        return True
    call = _parse_syscall(text, {})
    target = procfs.fd_target(pid, call["fd"]) if "fd" in call else ""
    return call.get("name") in _FILE_SYSCALLS or (target.startswith("/") and not target.startswith("/dev/"))


def is_in_output_write(facts: dict[str, Any]) -> bool:
    """True if the main thread is in a write to standard output or error, and that is a pipe or a terminal."""
    call = facts.get("proc", {}).get("syscall", {})
    # A named pipe's target is a path like that of a file, which may be on a file system that hangs.
    unread = "pipe" in facts.get("wchan", "") or str(call.get("target", "")).startswith(
        ("pipe:", "/dev/pts/", "/dev/tty")
    )
    return call.get("name") in ("write", "writev") and call.get("fd") in (1, 2) and unread


def is_in_input_read(facts: dict[str, Any], source: str) -> bool:
    """True if the main thread reads its standard input; of readline's call /proc only shows that it is that one."""
    call = facts.get("proc", {}).get("syscall", {})
    if call.get("name") in ("read", "readv"):
        return bool(call.get("fd") == 0)
    return call.get("name") in ("select", "pselect6") and call.get("arguments", [""])[0] == "0x1" and "input(" in source


def living_thread(pid: int) -> int:
    """A living thread of the process, the main one if that lives; 0 if the process only waits to be reaped."""
    states = (
        (tid, _read_text(f"/proc/{pid}/task/{tid}/stat").rpartition(")")[2].strip()[:1]) for tid in procfs.tids(pid)
    )
    return next((tid for tid, state in states if state not in ("Z", "X", "")), 0)


def runnable_time_ns(pid: int) -> dict[int, int]:
    """The time for which the main thread, and autograd's ("pt_autograd_0"), ran or waited for a processor, by thread.

    /proc/PID/task/TID/schedstat: run, wait, slices. -1 without that file, or where the kernel does not count.
    """
    times_ns = {}
    for tid in procfs.tids(pid):
        if tid == pid or _read_text(f"/proc/{pid}/task/{tid}/comm").startswith("pt_autograd"):
            fields = _read_text(f"/proc/{pid}/task/{tid}/schedstat").split()
            times_ns[tid] = int(fields[0]) + int(fields[1]) if len(fields) == 3 and fields[2] != "0" else -1
    return times_ns


def _thread_facts(pid: int, tid: int) -> dict[str, Any]:
    at = f"/proc/{pid}/task/{tid}"
    fields = _read_text(f"{at}/stat").rpartition(")")
    comm = fields[0].partition("(")[2]
    facts = {"tid": tid, "comm": comm, "state": fields[2].strip()[:1], "wchan": _read_text(f"{at}/wchan")}
    return {name: value for name, value in facts.items() if value not in ("", "0")}


def _tree_process_facts(one: procfs.Stat) -> dict[str, Any]:
    facts = {"pid": one.pid, "parent": one.parent, "comm": one.comm, "state": one.state, "wchan": wchan(one.pid)}
    return facts | {"threads": one.threads, "cpu_s": round(one.cpu_s, 2)}


def _read_pairs(path: str) -> Iterator[tuple[str, str]]:
    for line in _read_text(path).splitlines():
        name, _, value = line.partition(":")
        yield name, value.strip()


def _read_text(path: str) -> str:
    return procfs.read(path, 1 << 16).decode("utf-8", "replace").strip()
