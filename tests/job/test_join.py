"""What a node says of itself at its job's table, when its surroundings are not at their best."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.job.join import OwnAddress, directory_id


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


def test_directory_id_being_written_by_another_node(tmp_path: Path) -> None:
    """A directory that another node is just naming has the same name here."""
    path = tmp_path / ".directory-id"
    path.touch()
    other = threading.Timer(0.1, path.write_text, ["theirs"])
    other.start()
    assert directory_id(tmp_path) == "theirs"
    other.join()


def test_directory_id_left_unfinished(tmp_path: Path) -> None:
    """A name that nobody has finished is written anew and lasts."""
    (tmp_path / ".directory-id").touch()
    name = directory_id(tmp_path)
    assert name
    assert directory_id(tmp_path) == name
