"""StoreCache: one copy for several users, read again after a change."""

from __future__ import annotations

import threading

import pytest

from elasticd.errors import StoreUnavailable
from elasticd_agent.model.keys import decode_record
from elasticd_agent.store.cache import StoreCache
from elasticd_agent.store.memory import MemoryStore
from elasticd_daemon.records import Cordon, JobResult
from tests.daemon.stores import InterruptedStore


class Fixture:
    def __init__(self) -> None:
        self.store = InterruptedStore(MemoryStore())
        self.errors: list[str] = []
        self.changes = 0
        self.cache = StoreCache(self.store, self.errors.append, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def put(self, key: str, value: bytes = b"") -> None:
        found = self.store.memory.read(key)
        assert self.store.memory.compare_and_swap(key, None if found is None else found.version, value)

    def lists(self) -> int:
        return len([verb for verb, _ in self.store.requests if verb == "list"])


@pytest.fixture
def one() -> Fixture:
    return Fixture()


def test_a_list_is_read_once_until_it_changes(one: Fixture) -> None:
    one.put("a/1")
    one.cache.watch("user", ["a/", "b/"])
    one.cache.watch("user", ["a/", "b/"])
    assert [list(one.cache.list("a/")) for _ in range(3)] == [["a/1"]] * 3
    generation = one.cache.generation
    one.put("c/1")
    assert (one.cache.generation, one.lists(), one.changes) == (generation, 1, 0)
    one.put("a/2")
    assert one.cache.generation > generation
    assert one.changes == 1
    assert list(one.cache.list("a/")) == ["a/1", "a/2"]
    assert one.lists() == 2


def test_a_change_during_the_read(one: Fixture) -> None:
    """The list is read once more at its next use."""
    one.cache.watch("user", ["a/"])

    def change(n: int, verb: str, key: str) -> None:
        if verb == "list" and one.changes == 0:
            one.put("a/1")

    one.store.before = change
    one.cache.list("a/")
    assert list(one.cache.list("a/")) == ["a/1"]
    assert one.lists() == 2


def test_a_read_that_fails(one: Fixture) -> None:
    def fail(n: int, verb: str, key: str) -> None:
        raise StoreUnavailable("no answer")

    one.store.before = fail
    with pytest.raises(StoreUnavailable):
        one.cache.list("a/")
    one.store.before = lambda n, verb, key: None
    one.put("a/1")
    assert list(one.cache.list("a/")) == ["a/1"]


def test_a_watch_that_names_its_prefix(one: Fixture) -> None:
    """It may have missed changes: every list above and below is read again."""
    for prefix in ("a/", "a/b/", "c/"):
        one.cache.list(prefix)
    one.cache.invalidate("a/")
    for prefix in ("a/", "a/b/", "c/"):
        one.cache.list(prefix)
    assert one.lists() == 5


def test_unwatch_keeps_what_another_user_watches(one: Fixture) -> None:
    one.cache.watch("loop", ["a/"])
    one.cache.watch("scheduler", ["a/", "b/"])
    one.cache.unwatch("scheduler")
    one.put("b/1")
    assert one.changes == 0
    one.put("a/1")
    assert one.changes == 1
    one.cache.unwatch("loop")
    one.put("a/2")
    assert one.changes == 1


def test_refresh(one: Fixture) -> None:
    one.cache.list("a/")
    assert one.cache.clear_if_due(100.0, 10.0)
    one.cache.list("a/")
    assert not one.cache.clear_if_due(109.0, 10.0)
    one.cache.list("a/")
    assert one.cache.clear_if_due(110.0, 10.0)
    one.cache.list("a/")
    assert one.lists() == 3


def test_drop_returns_the_prefixes_that_had_keys(one: Fixture) -> None:
    one.put("a/1/x")
    one.put("b/1")
    one.cache.list("a/1/")
    one.cache.list("b/")
    assert one.cache.drop_lists(("a/", "c/")) == ["a/1/"]
    assert one.cache.drop_lists(("a/",)) == []


def test_undecodable_records_are_reported_once(one: Fixture) -> None:
    one.put("a/n1", Cordon("n1", False, "disk").to_json())
    one.put("a/2", b"{")
    one.cache.watch("user", ["a/"])
    for _ in range(3):
        records, odd = one.cache.records_and_undecodable("a/", Cordon)
        assert ([r.node for r in records], odd) == (["n1"], ["a/2"])
        one.cache.clear()
    assert len(one.errors) == 1
    now: list[str] = []
    assert [r.node for r in one.cache.read_records("a/", Cordon, now.append)] == ["n1"]
    assert now == one.errors


def test_read_records_returns_what_the_store_holds(one: Fixture) -> None:
    """Without a watch the copy is old; what people see is read from the store."""
    one.put("a/n1", Cordon("n1", False, "").to_json())
    assert len(one.cache.records("a/", Cordon)) == 1
    one.put("a/n2", Cordon("n2", False, "").to_json())
    assert len(one.cache.records("a/", Cordon)) == 1
    assert len(one.cache.read_records("a/", Cordon, one.errors.append)) == 2
    assert len(one.cache.read_records("a/", Cordon, one.errors.append, cached_if_watched=True)) == 2, (
        "nobody watches it"
    )


def test_reads_and_changes_from_several_threads(one: Fixture) -> None:
    one.cache.watch("user", ["a/"])
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            one.cache.read_records("a/", Cordon, one.errors.append)
            one.cache.read_records("a/", Cordon, one.errors.append, cached_if_watched=True)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(200):
        one.put("a/n", Cordon("n", False, str(n)).to_json())
        assert [r.reason for r in one.cache.records("a/", Cordon)] == [str(n)]
    stop.set()
    for thread in threads:
        thread.join(10)
    assert not one.errors


def test_value_that_is_no_record_is_decoded_once(one: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one bad value costs every agent its decoding at each turn."""
    decoded: list[str] = []

    def decode(kind: type[JobResult], key: str, value: bytes) -> JobResult:
        decoded.append(key)
        return decode_record(kind, key, value)

    monkeypatch.setattr("elasticd_agent.store.cache.decode_record", decode)
    good = JobResult("good", 1, "succeeded", 0, "").to_json()
    for key, value in (("r/good", good), ("r/bad", b"?"), ("r/spoilt", good.replace(b"good", b"spoilt"))):
        one.put(key, value)
    one.cache.records("r/", JobResult)
    one.put("r/spoilt", b"?")
    one.cache.invalidate("r/")
    decoded.clear()
    for _ in range(3):
        found = one.cache.read_records("r/", JobResult, one.errors.append)
        records, errors = one.cache.records_and_undecodable("r/", JobResult)
        assert {record.job for record in found} == {record.job for record in records} == {"good", "spoilt"}
        assert errors == ["r/bad", "r/spoilt"], "also of a final record that was read before"
        one.put("r/new", JobResult("new", 1, "succeeded", 0, "").to_json())
        one.cache.clear()
        one.store.memory.delete("r/new")
    assert decoded.count("r/bad") == 0
    assert decoded.count("r/spoilt") == 1
