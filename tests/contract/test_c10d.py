"""The c10d store over torch's TCPStore: several clients at once, over time, and beside foreign records.

Long times pass by hand: the maintenance receives them. The TCPStore is always a real one.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import TypeVar

import pytest
from torch.distributed import TCPStore

from elasticd_agent.store import Versioned
from elasticd_agent.store.c10d.client_process import Operations, register_watch, remove
from elasticd_agent.store.c10d.server_process import DROP_UNWATCHED_AFTER_S, TOMBSTONE_S, TURN_S, HostMaintenance
from elasticd_agent.store.c10d.store import C10dStore
from elasticd_agent.store.c10d.tcp_store import (
    DIRECTORY_REGISTER,
    LEASE_REGISTER,
    WATCHED_PREFIX_REGISTER,
    Envelope,
    KeyState,
    TcpStoreConnection,
    change_counter_key,
    change_key,
    decode_entries,
    decode_envelope,
    index_key,
    lease_counter_key,
    lease_members_key,
    set_host_lookup,
    value_key,
)
from tests.contract.reading import found

W = TypeVar("W", bound=TcpStoreConnection)
Until = Callable[[Callable[[], object], float], object]
SOON_S = 60.0
PATIENT = {"timeout_s": 20.0, "start_timeout_s": SOON_S}


# --- several clients of one host, each with its own helper ----------------------------------------------------------


@pytest.fixture(scope="module")
def stores() -> Iterator[list[C10dStore]]:
    with ExitStack() as cleanup:
        made = [C10dStore("127.0.0.1", 0, serve=True, **PATIENT)]
        cleanup.callback(made[0].close)
        made.append(C10dStore("localhost", made[0].port, serve=False, **PATIENT))
        cleanup.callback(made[1].close)
        for store in made:
            assert store.read("nothing") is None
        yield made


def test_identical_creations_have_one_winner(stores: list[C10dStore]) -> None:
    """A TCPStore's own compare_set would tell all of them that they have won."""
    wins: list[str] = []

    def create(store: C10dStore, key: str) -> None:
        if store.compare_and_swap(key, None, b"same"):
            wins.append(key)

    keys = [f"create/{turn}" for turn in range(20)]
    for key in keys:
        threads = [threading.Thread(target=create, args=(store, key)) for store in stores * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)
    assert wins == keys


def test_foreign_bytes_are_a_value_of_version_0(stores: list[C10dStore]) -> None:
    """The one who reads it can tell that it is no record of ours; nothing of ours is hurt by it."""
    wire = TcpStoreConnection(TCPStore, "127.0.0.1", stores[0].port, 10.0)
    assert stores[0].compare_and_swap("strange/ours", None, b"ours")
    wire.append(index_key("strange/"), b"\xff\x00 no entry\n=theirs\n=\xff\n=theirs\n")
    wire.append(DIRECTORY_REGISTER, b"rubbish\n\n=\xfe\xff/\n")
    wire.append(LEASE_REGISTER, b"=\xb2 x\n=lease\n=lease \xb2\n=lease 10 20\n")
    wire.append(WATCHED_PREFIX_REGISTER, b"rubbish")
    for garbage in (b"\xff\xfe", b"elasticd1 here nonsense\n", b"elasticd2 here 7 0 -\nnewer", b"{}"):
        wire.set(value_key("strange/theirs"), garbage)
        assert stores[1].read("strange/theirs") == Versioned(garbage, 0)
        listed = stores[1].list("strange/")
        assert listed == {"strange/ours": found(stores[0], "strange/ours"), "strange/theirs": Versioned(garbage, 0)}
    assert not stores[1].compare_and_swap("strange/theirs", None, b"mine"), "nothing is overwritten unseen"
    assert stores[1].compare_and_swap("strange/theirs", 0, b"mine")
    assert found(stores[1], "strange/theirs").version > 0
    assert stores[1].announce("strange/n", b"", 60.0) is not None
    with pytest.raises(ValueError, match="line break"):
        stores[0].read("a\nb")


# --- what the host does as time goes by -----------------------------------------------------------------------------


class HostedStore:
    """A real TCPStore in this process, its maintenance, and the verbs; minutes pass in no time."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self._server.port
        self.wire = self.another_wire()
        self.verbs = Operations(self.wire)
        self.maintenance = HostMaintenance(self.wire)
        self.maintenance.initialize()
        self.maintenance.turn(self._now)

    def another_wire(self, kind: type[W] = TcpStoreConnection) -> W:  # type: ignore[assignment]
        return kind(TCPStore, "127.0.0.1", self.port, 10.0)

    def close(self) -> None:
        """torch closes what is not referred to any more."""
        vars(self).clear()

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TURN_S)):
            self._now += TURN_S
            self.maintenance.turn(self._now)

    def sleep_through(self, seconds: float) -> None:
        """The host's machine is suspended, or its process is stopped."""
        self._now += seconds
        self.maintenance.turn(self._now)


@pytest.fixture(scope="module")
def _what_torch_keeps() -> Iterator[None]:
    """Before a test looks at its descriptors: a process's first server opens a pipe for good."""
    set_host_lookup(b"files")
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield
    set_host_lookup(b"files dns")


@pytest.fixture
def place(_what_torch_keeps: None) -> Iterator[HostedStore]:
    with closing(HostedStore()) as made:
        yield made


VALUE = base64.b64encode(b"v").decode()


def test_lease_ends_after_its_time_awake(place: HostedStore) -> None:
    """Counted from its last renewal, and only while the host was awake."""
    lease, first, _ = place.verbs.announce("n/a", VALUE, 3.0) or ("", 0, 0)
    place.pass_time(2.8)
    assert place.verbs.renew(lease, first)
    place.pass_time(TURN_S)
    place.sleep_through(1000.0)
    assert place.verbs.read("n/a") is not None, "no client could renew while the host slept"
    place.pass_time(2.0)
    assert place.verbs.renew(lease, first)
    place.pass_time(2.8)
    assert place.verbs.read("n/a") is not None
    place.pass_time(0.6)
    assert place.verbs.read("n/a") is None
    assert not place.verbs.renew(lease, first)
    assert place.verbs.put(lease, first, "n/b", VALUE, None) is None
    place.pass_time(TOMBSTONE_S + 1)
    assert decode_entries(place.wire.read(LEASE_REGISTER)) == {}
    assert place.wire.read(lease_counter_key(lease)) is None
    assert place.wire.read(lease_members_key(lease)) is None
    assert not place.verbs.renew(lease, first)
    assert place.wire.read(lease_counter_key(lease)) is None, "what the late renewal made is gone again"


def test_key_put_under_an_ended_lease_is_removed(place: HostedStore) -> None:
    lease, *_ = place.verbs.announce("n/a", VALUE, 1.0) or ("", 0, 0)
    place.pass_time(1.6)
    late = Envelope(KeyState.PRESENT, 7, lease, b"late")
    place.wire.append(lease_members_key(lease), b"=n/late\n")
    assert place.wire.swap(value_key("n/late"), None, late.encode())
    place.pass_time(TOMBSTONE_S + 1)
    found = decode_envelope(place.wire.read(value_key("n/late")))
    assert found is None or found.state is not KeyState.PRESENT


def test_deleted_keys_leave_nothing(place: HostedStore) -> None:
    for number in range(3):
        assert place.verbs.compare_and_swap(f"done/{number}/a", None, VALUE)
        assert place.verbs.compare_and_swap(f"done/{number}/b", None, VALUE)
    assert place.verbs.delete("done/0/a") and place.verbs.delete("done/0/b") and place.verbs.delete("done/1/a")
    place.pass_time(2 * TOMBSTONE_S)
    assert list(place.verbs.list_below("")) == ["done/1/b", "done/2/a", "done/2/b"]
    assert list(decode_entries(place.wire.read(DIRECTORY_REGISTER))) == ["done/1/", "done/2/"]
    assert list(decode_entries(place.wire.read(index_key("done/1/")))) == ["b"]
    for key in (index_key("done/0/"), value_key("done/0/a"), value_key("done/1/a")):
        assert place.wire.read(key) is None
    assert place.verbs.compare_and_swap("done/0/a", None, VALUE)
    assert "done/0/a" in place.verbs.list_below("done/0/")


def test_indexed_name_without_key_is_removed(place: HostedStore) -> None:
    """As of a writer that was killed between the two."""
    place.wire.append(index_key("seen/"), b"=a\n")
    place.wire.append(DIRECTORY_REGISTER, b"=seen/\n")
    assert place.verbs.list_below("seen/") == {}
    assert place.verbs.compare_and_swap("other", None, VALUE)
    place.pass_time(2 * TOMBSTONE_S)
    assert place.wire.read(index_key("seen/")) is None


def test_renewal_is_one_request(place: HostedStore) -> None:
    """An agent makes one a second for as long as its job lasts."""
    lease, first, _ = place.verbs.announce("n/a", VALUE, 3.0) or ("", 0, 0)
    requests: list[str] = []

    class Counted:
        def __init__(self, *args: object, **options: object) -> None:
            self._store = TCPStore(*args, **options)  # type: ignore[arg-type]

        def __getattr__(self, name: str) -> object:
            requests.append(name)
            return getattr(self._store, name)

    verbs = Operations(TcpStoreConnection(Counted, "127.0.0.1", place.port, 10.0))
    requests.clear()
    assert verbs.renew(lease, first)
    assert requests == ["add"]


class ReadCounter(TcpStoreConnection):
    reads = 0

    def read(self, key: bytes) -> bytes | None:
        self.reads += 1
        return super().read(key)


def test_creation_waits_for_a_key_being_removed(place: HostedStore) -> None:
    assert place.verbs.compare_and_swap("k", None, VALUE)
    removing = Envelope(KeyState.REMOVING, 1, "", b"").encode()
    place.wire.set(value_key("k"), removing)
    wire = place.another_wire(ReadCounter)
    other = Operations(wire)
    other.deadline = time.monotonic() + SOON_S
    made: list[bool] = []
    creating = threading.Thread(target=lambda: made.append(other.compare_and_swap("k", None, VALUE)))
    creating.start()
    while wire.reads < 6:  # it has looked more than once
        time.sleep(0.001)
    assert place.wire.read(value_key("k")) == removing
    place.wire.delete(value_key("k"))
    creating.join(SOON_S)
    assert made == [True]
    assert list(place.verbs.list_below("k")) == ["k"]


class Interrupted(TcpStoreConnection):
    """A client that is slow at its worst moment: the rest of the world acts between two of its requests."""

    meanwhile: Callable[[], None]

    def add(self, key: bytes, amount: int) -> int:
        self.meanwhile()
        return super().add(key, amount)


@pytest.mark.parametrize("existed", [False, True])
def test_key_created_while_its_name_is_removed(place: HostedStore, existed: bool) -> None:
    """It is listed all the same: after a writer that was killed before it made the key, and after a deletion."""
    if existed:
        assert place.verbs.compare_and_swap("d/k", None, VALUE)
        assert place.verbs.delete("d/k")
    else:
        place.wire.append(index_key("d/"), b"=k\n")
        place.wire.append(DIRECTORY_REGISTER, b"=d/\n")
    place.maintenance.sweep()

    def remove_tombstones() -> None:
        place.maintenance.awake_s += TOMBSTONE_S
        place.maintenance.sweep()

    slow = place.another_wire(Interrupted)
    slow.meanwhile = remove_tombstones
    assert Operations(slow).compare_and_swap("d/k", None, VALUE)
    assert list(place.verbs.list_below("d/")) == ["d/k"]


class Overtaken(TcpStoreConnection):
    """A client that is slow between its look and its write."""

    meanwhile: Callable[[], None]

    def swap(self, key: bytes, expected: bytes | None, value: bytes) -> bool:
        self.meanwhile()
        return super().swap(key, expected, value)


def test_two_deletions_have_one_winner(place: HostedStore) -> None:
    """Their tombstones have the same version, and a TCPStore tells both writers of equal bytes that they won."""
    assert place.verbs.compare_and_swap("k", None, VALUE)
    slow, others = place.another_wire(Overtaken), list[bool]()
    slow.meanwhile = lambda: others.append(place.verbs.delete("k"))
    assert not Operations(slow).delete("k")
    assert others == [True]


def test_keys_created_and_deleted_during_removals(place: HostedStore) -> None:
    """Writers against a host that thinks half a minute passes between any two of its looks."""
    wrong: list[str] = []

    def come_and_go(me: int) -> None:
        verbs = Operations(place.another_wire())
        key = f"d{me % 2}/{me}"
        for _ in range(40):
            verbs.deadline = time.monotonic() + SOON_S
            if not verbs.compare_and_swap(key, None, VALUE):
                wrong.append(f"{key} was there")
            if key not in verbs.list_below(key):
                wrong.append(f"{key} was not found")
            if not verbs.delete(key):
                wrong.append(f"{key} was gone")

    writers = [threading.Thread(target=come_and_go, args=(me,)) for me in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        place.maintenance.awake_s += TOMBSTONE_S
        place.maintenance.sweep()
    assert wrong == []


def test_counted_change_without_a_name_is_repaired(place: HostedStore) -> None:
    """A writer killed between the two would leave every watch waiting."""
    register_watch(place.wire, "p/")
    place.pass_time(1.0)
    place.wire.add(change_counter_key("p/"), 1)
    assert place.verbs.compare_and_swap("p/k", None, VALUE)
    assert place.wire.read(change_key("p/", 1)) is None
    place.pass_time(3 * TURN_S)
    assert place.wire.read(change_key("p/", 1)) == b"p/"
    assert place.wire.read(change_key("p/", 2)) == b"p/k"
    place.pass_time(TOMBSTONE_S + 1)
    assert place.wire.read(change_key("p/", 1)) is None, "no watch waits for it any more"
    assert place.wire.read(change_key("p/", 2)) is None


def test_unwatched_prefix_is_dropped(place: HostedStore) -> None:
    register_watch(place.wire, "kept/")
    register_watch(place.wire, "left/")
    for _ in range(4):
        place.pass_time(DROP_UNWATCHED_AFTER_S / 3)
        register_watch(place.wire, "kept/")
    assert list(decode_entries(place.wire.read(WATCHED_PREFIX_REGISTER))) == ["kept/"]
    assert register_watch(place.wire, "left/") == 0
    assert list(decode_entries(place.wire.read(WATCHED_PREFIX_REGISTER))) == ["kept/", "left/"]


def test_versions_differ_between_starts(place: HostedStore) -> None:
    assert place.verbs.compare_and_swap("k", None, VALUE)
    before = place.verbs.read("k")
    again = HostedStore()
    assert again.verbs.read("k") is None
    assert again.verbs.compare_and_swap("k", None, VALUE)
    after = again.verbs.read("k")
    assert after[0] > before[0]
    assert not again.verbs.compare_and_swap("k", before[0], VALUE)
    assert remove(again.wire, "k", None)


_NOBODY_READS = """
import errno, os, socket
from elasticd_agent.store.c10d.client_process import C10dClient
ours, agents = socket.socketpair()
agents.shutdown(socket.SHUT_RD)
def connect(): raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
C10dClient(connect, ours).serve()
"""


def test_an_agent_that_has_given_up_gets_no_traceback_on_its_console() -> None:
    ended = subprocess.run([sys.executable, "-c", _NOBODY_READS], capture_output=True, text=True, timeout=SOON_S)
    assert (ended.returncode, ended.stderr) == (0, "")


_WATCHES = """
import socket, sys
from torch.distributed import TCPStore
from elasticd_agent.store.c10d import client_process
from elasticd_agent.store.c10d.tcp_store import TcpStoreConnection
client_process.WATCH_RECHECK_S = 0.4
def connect(): return TcpStoreConnection(TCPStore, "127.0.0.1", int(sys.argv[1]), 10.0)
client_process.C10dClient(connect, socket.socket(fileno=0)).serve()
"""


def test_watch_of_a_prefix_that_changes_often_is_not_dropped(place: HostedStore) -> None:
    place.verbs.compare_and_swap("a/changes", None, VALUE)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", _WATCHES, str(place.port)]
    with ours, theirs, ours.makefile("rb") as messages:
        ours.settimeout(SOON_S)
        client = subprocess.Popen(command, stdin=theirs, env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"})
        try:
            assert "ready" in json.loads(messages.readline())
            request = {"id": 1, "op": "watch", "args": {"prefix": "a/"}, "within": SOON_S}
            ours.sendall(json.dumps(request).encode() + b"\n")
            assert json.loads(messages.readline())["ok"]
            for _ in range(24):  # more than a sixth of the client's time, in which the host's is a sixteenth of its own
                time.sleep(0.07)
                version, value = place.verbs.read("a/changes") or [0, ""]
                assert place.verbs.compare_and_swap("a/changes", version, value)
                assert json.loads(messages.readline())["changed"] == "a/"
                place.pass_time(DROP_UNWATCHED_AFTER_S / 16)
                assert "a/" in decode_entries(place.wire.read(WATCHED_PREFIX_REGISTER))
        finally:
            client.kill()
            client.wait(SOON_S)
