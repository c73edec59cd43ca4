"""Names that are not UTF-8, and locales without UTF-8: what the kernel and other people write is read all the same."""

from __future__ import annotations

import ast
import ctypes
import mmap
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import elasticd
import elasticd_agent
import elasticd_daemon
from elasticd.checkpointing.memory import memory_limit, peer
from elasticd.checkpointing.state import in_place
from elasticd_agent.system.processes import cgroups
from elasticd_agent.workers.launcher import template

PACKAGES = [Path(package.__file__).parent for package in (elasticd, elasticd_agent, elasticd_daemon)]
NAME = "libopenblas caf\udce9\n.so"
_NOT_FILES = ("os", "self", "tarfile")


def in_locale_encoding(path: Path) -> Iterator[str]:
    """Calls that read or write text as the locale says, of which a user may have any."""
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call):
            continue
        named = {each.arg: each.value for each in call.keywords}
        method = call.func.attr if isinstance(call.func, ast.Attribute) else None
        name = method or getattr(call.func, "id", "")
        on_self = method == "open" and isinstance(call.func, ast.Attribute)
        if on_self and ast.unparse(call.func.value) in _NOT_FILES:  # type: ignore[attr-defined]
            continue
        first = 0 if on_self else 1
        mode = named.get("mode", call.args[first] if len(call.args) > first else ast.Constant("r"))
        is_text = name in ("read_text", "write_text") or named.keys() & {"text", "universal_newlines"}
        is_text = is_text or (name in ("open", "fdopen") and "b" not in str(getattr(mode, "value", "b")))
        if is_text and not named.keys() & {"encoding", "errors"}:
            yield f"{path.name}:{call.lineno}: {ast.unparse(call)[:80]}"


def test_no_text_is_read_in_the_locales_encoding() -> None:
    """A file of /proc needs `errors` besides: names of programs and paths are any bytes."""
    files = [path for package in PACKAGES for path in package.rglob("*.py")]
    assert [line for path in files for line in in_locale_encoding(path)] == []
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            is_read = "/proc" in line and (".read_text(" in line or " open(" in line)
            assert not is_read or "errors=" in line or 'b"' in line, f"{path}: {line}"


def test_mapped_file_is_found_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        offset_of = in_place.make_offset_lookup(file.fileno())
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert offset_of(address + 5000) == 5000
        assert offset_of(16) is None
        assert any(found.startswith(str(tmp_path)) for found in template.mapped_libraries("openblas"))


def test_process_is_known_whatever_its_name() -> None:
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        comm.write_bytes(b"caf\xe9 ) R 1")
        try:
            assert peer.is_running(ours)
        finally:
            comm.write_bytes(before.rstrip(b"\n"))


def test_control_group_is_found_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "caf\udce9" / "elasticd-agent"
    group.mkdir(parents=True)
    own = tmp_path / "cgroup"
    own.write_bytes(b"0::/caf\xe9/elasticd-agent\n")
    monkeypatch.setattr(memory_limit, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory_limit, "_OWN_CGROUPS_FILE", own)
    (group / "memory.events").write_text("oom_kill 3\n")
    assert memory_limit.oom_kills() == 3
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_bytes(own.read_bytes())
    (group / "cpu.stat").write_text("throttled_usec 5000000")
    assert cgroups.throttled_s([7], str(tmp_path), str(tmp_path)) == 5.0
