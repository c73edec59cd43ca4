"""What a FileStore promises beyond the contract: it is still there after kill -9, damage, and a full disk."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.store.file import FileStore
from elasticd_agent.store.memory import MemoryStore
from tests.contract.reading import put, values


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory: thousands of fsyncs would take long elsewhere."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"elasticd-kept-{os.getpid()}-") as made:
        yield Path(made)


def opened(path: Path) -> tuple[dict[str, bytes], list[str]]:
    """The records, and the sentences about damage."""
    messages: list[str] = []
    store = FileStore(path, log=messages.append)
    try:
        return values(store), messages
    finally:
        store.close()


def crashed(path: Path) -> Path:
    """A copy of the files as a crash of the machine would leave them now."""
    for end in ("", "-wal"):
        shutil.copyfile(f"{path}{end}", f"{path}.crashed{end}")
    return path.with_name(f"{path.name}.crashed")


def test_reopened_store_has_all_but_leased_keys(folder: Path) -> None:
    path = folder / "state" / "kept"
    store = FileStore(path)
    put(store, "a", b"1")
    put(store, "a", b"\x00\xff")
    put(store, "ü/\n", "ä".encode())
    put(store, "gone", b"1")
    store.delete("gone")
    put(store, "taken", b"1")
    lease = store.announce("n", b"leased", 3.0)
    taken = store.read("taken")
    assert lease.put("taken", b"2", taken.version) is not None
    versions = {key: found.version for key, found in store.list("").items()}
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
    after_a_crash = crashed(path)
    store.close()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    for left in (path, after_a_crash):
        again = FileStore(left)
        assert values(again) == {"a": b"\x00\xff", "ü/\n": "ä".encode()}
        assert {key: found.version for key, found in again.list("").items()} == {k: versions[k] for k in ("a", "ü/\n")}
        put(again, "n", b"new")
        found = again.read("n")
        assert found.version > max(versions.values()), "a leased key's version must not come again"
        again.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            again.compare_and_swap("x", None, b"")


OPERATION = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("abc"), st.binary(max_size=4)),
    st.tuples(st.just("delete"), st.sampled_from("abc"), st.none()),
    st.tuples(st.just("announce"), st.sampled_from("abc"), st.none()),
    st.tuples(st.just("hold"), st.sampled_from("abc"), st.binary(max_size=4)),
    st.tuples(st.just("withdraw"), st.none(), st.none()),
    st.tuples(st.just("reopen"), st.none(), st.none()),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(OPERATION, max_size=25))
def test_any_history_equals_a_memory_store(folder: Path, operations: list[tuple[str, str, bytes]]) -> None:
    path = folder / "kept"
    path.unlink(missing_ok=True)
    kept: FileStore = FileStore(path)
    memory = MemoryStore()
    leases: list[tuple[object, object]] = []
    for what, key, value in operations:
        if what == "reopen":
            kept.close()
            kept = FileStore(path)
            for _, lease in leases:
                lease.withdraw()  # type: ignore[attr-defined]
            leases.clear()
        elif what == "put":
            put(kept, key, value)
            put(memory, key, value)
        elif what == "delete":
            assert kept.delete(key) == memory.delete(key)
        elif what == "announce":
            both = kept.announce(key, b"leased", 9.0), memory.announce(key, b"leased", 9.0)
            assert (both[0] is None) == (both[1] is None)
            if both[0] is not None:
                leases.append(both)
        elif leases and what == "hold":
            for store, lease in zip((kept, memory), leases[-1], strict=True):
                found = store.read(key)
                lease.put(key, value, None if found is None else found.version)  # type: ignore[attr-defined]
        elif leases:
            for lease in leases.pop():
                lease.withdraw()  # type: ignore[attr-defined]
        assert values(kept) == values(memory)
    kept.close()


@pytest.mark.parametrize("garbage", [b"\0" * 4096, b"garbage", os.urandom(5000), b'{"a":1}\n' * 50])
def test_damaged_file(folder: Path, garbage: bytes) -> None:
    """The damage is reported once, the file is kept for people, and the store begins anew."""
    path = folder / "kept"
    path.write_bytes(garbage)
    now, (sentence,) = opened(path)
    assert now == {}
    assert "is damaged (" in sentence
    assert (folder / "kept.damaged").read_bytes() == garbage
    store = FileStore(path)
    put(store, "k", b"v")
    store.close()
    assert opened(path) == ({"k": b"v"}, [])


def test_file_of_another_process_or_none(folder: Path) -> None:
    path = folder / "kept"
    store = FileStore(path)
    put(store, "k", b"v")
    with pytest.raises(StoreRefused, match="in use by another agent"):
        FileStore(path)
    store.close()
    assert opened(path) == ({"k": b"v"}, [])
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreRefused, match="cannot be opened"):
        FileStore(path)


WRITES_FOR_EVER = """
import sys
from pathlib import Path
from elasticd_agent.store.file import FileStore
store = FileStore(Path(sys.argv[1]))
n = int(store.read("n").value) if store.read("n") else 0
while True:
    n += 1
    was = store.read("n")
    store.compare_and_swap("n", was.version if was else None, b"%d" % n)
    store.compare_and_swap(f"k{n}", None, b"x" * (n % 700))
    if n > 5:
        store.delete(f"k{n - 5}")
    print(n, flush=True)
"""


def test_killed_writer_loses_no_confirmed_record(folder: Path) -> None:
    path = folder / "kept"
    chance = random.Random(7)
    confirmed = 0
    for kills in range(6):
        process = subprocess.Popen([sys.executable, "-c", WRITES_FOR_EVER, str(path)], stdout=subprocess.PIPE)
        with process:
            for _ in range(chance.randrange(1, 400)):
                confirmed = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            confirmed = int((process.stdout.read().split(b"\n")[-2:-1] or [b"%d" % confirmed])[0])
        now, messages = opened(path)
        assert not messages
        n = int(now["n"])
        assert n in (confirmed, confirmed + 1)
        assert len(now[f"k{confirmed}"]) == confirmed % 700
        undeleted = [older for older in range(1, confirmed - 4) if f"k{older}" in now]
        assert len(undeleted) <= kills, "a deletion that was confirmed has come undone"


def test_full_disk_is_an_outage(folder: Path) -> None:
    """A change that was refused is not in the store, and none that was confirmed is lost."""
    path = folder / "kept"
    script = f"""
import resource
from pathlib import Path
from elasticd.errors import StoreUnavailable
from tests.contract.test_file import crashed, opened, put, values, FileStore
path = Path({str(path)!r})
store = FileStore(path)
refused = 0
for n in range(200):
    # Every now and then there is room again, as if somebody had cleaned up.
    room = resource.RLIM_INFINITY if n % 50 > 30 else 9000 + 400 * n
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    before = values(store)
    key, value = f"k{{n % 17}}", b"%d" % n * (n % 40)
    try:
        put(store, key, value)
        before[key] = value
    except StoreUnavailable as error:
        refused += 1
        assert "cannot be written: " in str(error), error
    assert values(store) == before
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert opened(crashed(path)) == (before, []), n
assert 20 < refused < 180, refused
store.close()
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_full_disk_at_the_start(folder: Path) -> None:
    """It is reported, and the file is read."""
    path = folder / "kept"
    store = FileStore(path)
    put(store, "k", b"v")
    store.close()
    script = (
        "import resource, sys; from pathlib import Path; from elasticd_agent.store.file import FileStore;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10));"
        "s = FileStore(Path(sys.argv[1]), log=print); print(s.read('k').value.decode()); s.close()"
    )
    run = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    message, value = run.stdout.splitlines()
    assert message.endswith("nothing can be changed until that is repaired")
    assert value == "v"
    assert opened(path) == ({"k": b"v"}, [])
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
