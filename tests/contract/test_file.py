"""What a FileStore promises beyond the contract: it is still there after kill -9, damage, and a full disk."""

from __future__ import annotations

import base64
import errno
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.store.file import COMPACTION_SLACK_BYTES, MAX_DAMAGED_FILES, RESERVED_VERSIONS, FileStore
from elasticd_agent.store.memory import MemoryStore

Until = Callable[[Callable[[], object], float], object]


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory: thousands of fsyncs would take long elsewhere."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"elasticd-kept-{os.getpid()}-") as made:
        yield Path(made)


def values(store: MemoryStore) -> dict[str, bytes]:
    return {key: found.value for key, found in store.list("").items()}


def opened(path: Path) -> tuple[dict[str, bytes], list[str]]:
    """The records, and the sentences about damage."""
    messages: list[str] = []
    store = FileStore(path, log=messages.append)
    try:
        return values(store), messages
    finally:
        store.close()


def put(store: MemoryStore, key: str, value: bytes) -> None:
    found = store.read(key)
    assert store.compare_and_swap(key, None if found is None else found.version, value)


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
    assert lease is not None
    taken = store.read("taken")
    assert taken is not None
    assert lease.put("taken", b"2", taken.version) is not None
    versions = {key: found.version for key, found in store.list("").items()}
    store.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    again = FileStore(path)
    assert values(again) == {"a": b"\x00\xff", "ü/\n": "ä".encode()}
    assert {key: found.version for key, found in again.list("").items()} == {k: versions[k] for k in ("a", "ü/\n")}
    put(again, "n", b"new")
    found = again.read("n")
    assert found is not None
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


def test_file_cut_at_any_byte(folder: Path) -> None:
    """It holds what the store held at some moment."""
    path = folder / "kept"
    store = FileStore(path)
    header = path.stat().st_size
    moments = [values(store)]
    for step in range(6):
        put(store, f"k{step % 4}", str(step).encode() * 3)
        moments.append(values(store))
        if step == 3:
            store.delete("k1")
            moments.append(values(store))
    store.close()
    data = path.read_bytes()
    seen = 0
    for size in range(header, len(data) + 1):
        path.write_bytes(data[:size])
        now, messages = opened(path)
        assert not messages, "a line that was never finished was never confirmed: nothing is lost"
        seen = max(seen, moments.index(now))
        assert now == moments[seen], "what was confirmed later must not be there without what came before"
    assert moments[seen] == moments[-1]


def test_damaged_bytes(folder: Path) -> None:
    """The damage is reported once, and the other records are used."""
    path = folder / "kept"
    store = FileStore(path)
    whole = {f"k{n}": b"value %d" % n for n in range(5)}
    for key, value in whole.items():
        put(store, key, value)
    store.close()
    data = path.read_bytes()
    chance = random.Random(5)
    for at in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[at] ^= chance.randrange(1, 256)
        path.write_bytes(damaged)
        before = path.read_bytes()
        now, messages = opened(path)
        assert now.items() <= whole.items()
        assert len(now) >= 3, "one byte is in two lines at most"
        aside = sorted(folder.glob("kept.damaged-*"), key=lambda p: p.stat().st_mtime_ns)
        if messages:
            (sentence,) = messages
            assert "is damaged: " in sentence
            assert aside[-1].read_bytes() == before, "people may want to look at it"
        else:
            assert len(now) >= 4, "only the last line, unfinished, goes without saying"
        assert opened(path) == (now, []), "it is sound again"
    assert len(list(folder.glob("kept.damaged-*"))) <= MAX_DAMAGED_FILES


@pytest.mark.parametrize("garbage", [b"", b"\0" * 4096, b"garbage", b"\n\n\n", os.urandom(5000), b'{"a":1}\n' * 50])
def test_garbage_file(folder: Path, garbage: bytes) -> None:
    path = folder / "kept"
    path.write_bytes(garbage)
    now, messages = opened(path)
    assert now == {}
    assert len(messages) == bool(garbage)
    store = FileStore(path)
    put(store, "k", b"v")
    store.close()
    assert opened(path) == ({"k": b"v"}, [])


def test_file_of_another_version_or_process(folder: Path) -> None:
    """It is refused, and stays as it is."""
    path = folder / "kept"
    store = FileStore(path)
    with pytest.raises(StoreRefused, match="in use by another agent"):
        FileStore(path)
    store.close()
    line = b"elasticd journal 2"
    path.write_bytes(b"%08x %s\n" % (zlib.crc32(line), line))
    with pytest.raises(StoreRefused, match="written by another version of elasticd: elasticd journal 2"):
        FileStore(path)
    assert path.read_bytes().endswith(b"elasticd journal 2\n")
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreRefused, match="cannot be read"):
        FileStore(path)


def test_file_is_compacted(folder: Path) -> None:
    path = folder / "kept"
    store = FileStore(path)
    fds = len(os.listdir("/proc/self/fd"))
    for n in range(8000):
        put(store, f"k{n % 10}", b"%0100d" % n)
        if n % 10 == 3:
            store.delete("k3")
        assert path.stat().st_size < 2 * COMPACTION_SLACK_BYTES
    assert len(os.listdir("/proc/self/fd")) == fds
    last = values(store)
    store.close()
    assert opened(path) == (last, [])
    assert sorted(p.name for p in folder.iterdir()) == ["kept", "kept.lock"]


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
        assert process.stdout is not None
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


FULL = """
import base64, os, resource, shutil, sys
from pathlib import Path
from elasticd.errors import StoreUnavailable
from elasticd_agent.store.file import FileStore

path = Path(sys.argv[1])
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
store = FileStore(path)
fds = len(os.listdir("/proc/self/fd"))
confirmed, refused = {}, 0

def on_the_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    copy = path.with_name("copy")
    shutil.copyfile(path, copy)
    again = FileStore(copy)
    try:
        return {key: found.value for key, found in again.list("").items()}
    finally:
        again.close()

for n in range(400):
    # Every now and then there is room again, as if somebody had cleaned up.
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if n % 50 > 30 else 600 + 3 * n, most))
    key, value = f"k{n % 17}", b"%d" % n * (n % 40)
    was = store.read(key)
    try:
        assert store.compare_and_swap(key, was.version if was else None, value)
        confirmed[key] = value
    except StoreUnavailable as error:
        refused += 1
        assert "cannot be written: File too large" in str(error), error
        now = store.read(key)
        assert now == was, "nothing has changed"
    assert on_the_disk() == confirmed, "what was confirmed, and nothing else, is what a crash would leave"
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
assert {key: found.value for key, found in store.list("").items()} == confirmed
assert 20 < refused < 380, refused
assert len(os.listdir("/proc/self/fd")) <= fds
store.compare_and_swap("last", None, b"1")
store.close()
for key, value in confirmed.items():
    print(key, base64.b64encode(value).decode())
"""


def test_full_disk_is_an_outage(folder: Path) -> None:
    path = folder / "kept"
    run = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    confirmed = {key: base64.b64decode(value) for key, _, value in (x.partition(" ") for x in run.stdout.splitlines())}
    assert opened(path) == ({**confirmed, "last": b"1"}, [])


def test_unsynced_line_does_not_reappear(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "kept"
    store = FileStore(path)
    put(store, "k", b"before")

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", broken)
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            put(store, "k", b"after")
    shutil.copyfile(path, folder / "copy")
    assert opened(folder / "copy") == ({"k": b"before"}, [])
    assert values(store) == {"k": b"before"}
    put(store, "k", b"later")
    store.close()
    assert opened(path) == ({"k": b"later"}, [])


def test_versions_of_leased_keys_after_a_crash(folder: Path) -> None:
    """They are not used again."""
    store = FileStore(folder / "kept")
    lease = store.announce("n", b"0", 1e6)
    assert lease is not None
    version: int | None = 1
    for _ in range(2 * RESERVED_VERSIONS + 500):
        version = lease.put("n", b"1", version)
    assert version is not None
    shutil.copyfile(folder / "kept", folder / "copy")  # as a crash would leave it
    store.close()
    again = FileStore(folder / "copy")
    put(again, "n", b"new")
    found = again.read("n")
    again.close()
    assert found is not None
    assert found.version > version


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
    messages, value = run.stdout.splitlines()
    assert messages.endswith("cannot be written: File too large; nothing can be changed until that is repaired")
    assert value == "v"
    assert opened(path) == ({"k": b"v"}, [])
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
