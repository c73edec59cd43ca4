"""What a node says of itself at its job's table, when its surroundings are not at their best."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.job import join
from elasticd_agent.job.join import OwnAddress, ensure_directory_id, wait_for_route
from elasticd_agent.model.job import EntrypointMode, JobSpec, Rendezvous


def test_a_resolver_or_a_route_that_is_away_does_not_cost_the_node() -> None:
    """It is asked when a group starts, and most of all when another one has failed: of a network that fails, say."""
    answers: list[str | Exception] = ["10.0.0.1", "10.0.0.2", UsageError("no address of this machine reaches etcd")]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    own = OwnAddress(ask)
    assert own.known == "10.0.0.1"
    assert own() == "10.0.0.2"
    assert own() == "10.0.0.2"
    assert answers == []


def spec(host: str) -> JobSpec:
    where = Rendezvous("c10d", ((host, 29400),), max_nodes=2)
    return JobSpec(sys.executable, EntrypointMode.SCRIPT, "train.py", (), Path(), "job", "0", rendezvous=where)


def test_name_that_becomes_known_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "RESOLVE_RETRY_S", 0.01)
    answers = iter([StoreUnavailable("the name is not known")] * 3)

    def resolve(endpoints: object, given: object, *, leave_loopback: bool) -> str:
        for answer in answers:
            raise answer
        return "127.0.0.1"

    monkeypatch.setattr(join, "local_address", resolve)
    lines: list[str] = []
    wait_for_route(spec("store.example"), 600.0, lambda: False, lines.append)
    assert lines == ["the name is not known; retrying for 600 s"]
    assert next(answers, None) is None


def test_a_single_node_waits_for_the_name_of_its_workers_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's own name is in DNS some moments after the pod has started."""
    monkeypatch.setattr(join, "RESOLVE_RETRY_S", 0.01)
    answers, lines = iter([False, False, True]), list[str]()
    monkeypatch.setattr(join, "is_known", lambda host: next(answers))
    alone = replace(spec("store.example"), rendezvous=Rendezvous(), master_addr="job-node-0-0.job")
    wait_for_route(alone, 600.0, lambda: False, lines.append)
    assert lines == ["the workers' store: the address 'job-node-0-0.job' cannot be resolved; retrying for 600 s"]
    assert next(answers, None) is None


def test_wait_for_a_name_is_repeated_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = [100.0], list[str]()

    def resolve(endpoints: object, given: object, *, leave_loopback: bool) -> str:
        raise StoreUnavailable("the name is not known")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(join, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(join, "local_address", resolve)
    with pytest.raises(StoreUnavailable):
        wait_for_route(spec("store.example"), 70.0, lambda: False, lines.append)
    said = "the name is not known; retrying for 70 s"
    assert lines == [said, f"{said}, 30 s so far", f"{said}, 60 s so far"]


def test_unknown_name_is_an_outage_after_the_join_timeout() -> None:
    began, lines = time.monotonic(), list[str]()
    with pytest.raises(StoreUnavailable, match=r"nowhere\.invalid.*the name is not known.*; retried for 0\.3 s"):
        wait_for_route(spec("nowhere.invalid"), 0.3, lambda: False, lines.append)
    assert 0.3 <= time.monotonic() - began < 30
    assert len(lines) <= 1, "a slow resolver may take all of the time"


def test_signal_ends_the_wait_for_a_route() -> None:
    answers = [False, True]
    wait_for_route(spec("nowhere.invalid"), 600.0, lambda: answers.pop(0), lambda line: None)
    assert answers == []


def test_resolver_that_does_not_answer() -> None:
    """A resolver that does not answer holds nobody up."""
    answered = threading.Event()
    answered.set()

    def ask() -> str:
        answered.wait(60)
        return "10.0.0.1"

    own = OwnAddress(ask)
    answered.clear()
    began = time.monotonic()
    assert own() == "10.0.0.1"
    assert time.monotonic() - began < 30
    answered.set()


def test_address_without_a_free_thread() -> None:
    """Where no thread can be started what was known counts."""
    own = OwnAddress(lambda: "10.0.0.1")
    before = threading.stack_size(1 << 46)
    try:
        assert own() == "10.0.0.1"
    finally:
        threading.stack_size(before)


def test_directory_id_being_written_by_another_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that another node is just naming has the same name here."""
    monkeypatch.setattr(join, "DIRECTORY_ID_WAIT_S", 60.0)
    path = tmp_path / ".directory-id"
    path.touch()
    other = threading.Timer(0.1, path.write_text, ["theirs"])
    other.start()
    assert ensure_directory_id(tmp_path) == "theirs"
    other.join()


def test_directory_id_left_unfinished(tmp_path: Path) -> None:
    """A name that nobody has finished is written anew and lasts."""
    (tmp_path / ".directory-id").touch()
    name = ensure_directory_id(tmp_path)
    assert name
    assert ensure_directory_id(tmp_path) == name
