"""`elasticd logs`: output written while it reads, several rounds, and agents that are unreachable for a while."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticd_daemon import keys as names
from elasticd_daemon.api.client import AgentClient, Reply, RequestFailed, Unreachable
from elasticd_daemon.cli import log_follower as following
from elasticd_daemon.cli.log_follower import LogFollower, LogQuery
from elasticd_daemon.records import JobResult, RunnerStatus
from tests.daemon.served import Served

Until = Callable[[Callable[[], object], float], object]
ALL = LogQuery("llama", 0, ("stdout", "stderr"), None, None, None, follow=False)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "it")
    made.announce(RunnerStatus("llama", 1, (0,), "running"))
    made.place("llama", made.submit(), "n1")
    yield made
    made.close()


class FollowerThread:
    """`elasticd logs -f` on a thread of its own; each wait of its ends at once and is counted."""

    def __init__(self, one: Served, expected: LogQuery) -> None:
        self.out, self.err = io.BytesIO(), io.BytesIO()
        self.answers: list[str] = []
        self.waits, self.error = 0, ""
        self._over = threading.Event()
        self._follower = LogFollower(one.unix(), expected, self.out, self.err, self.answers.append, sleep=self._slept)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _slept(self, seconds: float) -> None:
        self.waits += 1
        if self._over.wait(0.01):
            raise KeyboardInterrupt

    def _run(self) -> None:
        try:
            self._follower.run()
        except (RequestFailed, Unreachable) as error:
            self.error = str(error)
        except KeyboardInterrupt:
            self.error = "interrupted"

    def wait(self, within: float = 30.0) -> bool:
        self._thread.join(within)
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._over.set()
        assert self.wait()


def read(one: Served, **how: Any) -> tuple[bytes, bytes]:
    out, err = io.BytesIO(), io.BytesIO()
    LogFollower(one.unix(), replace(ALL, **how), out, err, lambda _: None, sleep=lambda _: None).run()
    return out.getvalue(), err.getvalue()


def end(one: Served) -> None:
    ending = JobResult("llama", 1, "succeeded", 0, "done", time.time(), ("n1",))
    assert one.store.compare_and_swap(names.RESULTS + "llama", None, ending.to_json())
    one.announce()


def test_long_log_is_printed_once(one: Served) -> None:
    text = "".join(f"line {number}\n" for number in range(200_000))
    one.log(1, 0, "stdout", "an older round\n")
    one.log(2, 0, "stdout", text)
    one.log(2, 0, "stderr", "trouble\n")
    assert read(one) == (text.encode(), b"trouble\n")
    assert read(one, round=1) == (b"an older round\n", b"")
    assert read(one, tail_lines=2) == (b"line 199998\nline 199999\n", b"trouble\n")
    assert read(one, tail_lines=0) == (b"", b"")
    assert read(one, streams=("stderr",)) == (b"", b"trouble\n")


def test_missing_log_gives_the_agents_sentence(one: Served) -> None:
    with pytest.raises(RequestFailed, match=r"no log of rank 0 .* on n1"):
        read(one)
    one.log(1, 0, "stdout", "x")
    with pytest.raises(RequestFailed, match="no log of rank 3"):
        read(one, rank=3)
    with pytest.raises(RequestFailed, match="there is no job 'nope'"):
        read(one, job="nope")
    with pytest.raises(RequestFailed, match="there is no job 'nope'"):
        read(one, job="nope", follow=True)


def test_follow_says_that_it_waits_for_a_rank_without_a_log(one: Served, until: Until) -> None:
    one.event("round_published", time.time(), 1, world_size=1, nodes=["n1"])
    one.log(1, 0, "stdout", "one\n")
    reading = FollowerThread(one, replace(ALL, rank=8, follow=True))
    until(lambda: reading.waits > following.POLLS_UNTIL_MENTIONED, 60)
    (said,) = reading.answers
    assert said.startswith("job 'llama' has no log of rank 8 (std") and said.endswith(
        "of the last one ranks 0; waiting for it until the job ends"
    )
    end(one)
    assert reading.wait() and reading.out.getvalue() == b""


def test_follow_through_all_rounds_to_the_end(one: Served, until: Until) -> None:
    reading = FollowerThread(one, replace(ALL, follow=True))
    until(lambda: reading.waits > 2, 30)
    assert reading.answers == ["running: runs"] or reading.answers == ["starting: runs"], reading.answers
    one.event("round_published", time.time(), 1, world_size=1, nodes=["n1"])
    one.log(1, 0, "stdout", "one\n")
    until(lambda: reading.out.getvalue() == b"one\n", 30)
    one.log(1, 0, "stdout", "two, ")
    one.log(1, 0, "stderr", "!\n")
    until(lambda: reading.out.getvalue() == b"one\ntwo, " and reading.err.getvalue() == b"!\n", 30)
    one.log(1, 0, "stdout", "last words of round 1\n")
    # The rank has no part in round 2, and is back in round 3.
    one.log(2, 1, "stdout", "somebody else's\n")
    one.log(3, 0, "stdout", "three\n")
    until(lambda: reading.out.getvalue().endswith(b"three\n"), 30)
    assert reading.out.getvalue() == b"one\ntwo, last words of round 1\nthree\n"
    one.log(3, 0, "stdout", "and out\n")
    end(one)
    assert reading.wait(), "it ends with the job"
    assert (reading.out.getvalue()[-8:], reading.error) == (b"and out\n", "")


def test_a_pending_job_is_called_so_once(one: Served, until: Until) -> None:
    one.announce()
    one.place("llama", 1, reason="pending: needs 1 node")
    reading = FollowerThread(one, replace(ALL, follow=True))
    until(lambda: reading.answers, 30)
    reading.stop()
    assert reading.answers == ["pending: needs 1 node"]


def test_without_follow_a_fast_writer_is_not_awaited(one: Served) -> None:
    one.log(1, 0, "stdout", "x" * (3 << 20))

    class Faster(Between):
        def get(self, path: str, query: dict[str, Any] | None = None) -> Reply:
            one.log(1, 0, "stdout", "x" * (2 << 20))
            return super().get(path, query)

    out = io.BytesIO()
    client: Any = Faster(one.unix(), lambda: None)
    LogFollower(client, replace(ALL, streams=("stdout",)), out, io.BytesIO(), lambda _: None).run()
    assert 3 << 20 <= len(out.getvalue()) <= 8 << 20


class Between:
    """A client that has something happen after it was told that there is no more of stdout, before it asks on."""

    def __init__(self, client: AgentClient, happens: Callable[[], None]) -> None:
        self._client, self._happens, self._at_its_end = client, happens, False

    def get(self, path: str, query: dict[str, Any] | None = None) -> Reply:
        if self._at_its_end:
            self._at_its_end, happens, self._happens = False, self._happens, lambda: None
            happens()
        reply = self._client.get(path, query)
        self._at_its_end = query is not None and query["stream"] == "stdout" and not reply.body
        return reply


def test_lines_between_two_requests_are_printed(one: Served) -> None:
    one.event("round_published", time.time(), 1, world_size=1, nodes=["n1"])
    for stream in ("stdout", "stderr"):
        one.log(1, 0, stream, "one\n")

    def happens() -> None:
        one.log(1, 0, "stdout", "last words\n")
        end(one)

    out = io.BytesIO()
    client: Any = Between(one.unix(), happens)
    LogFollower(client, replace(ALL, follow=True), out, io.BytesIO(), lambda _: None, sleep=lambda _: None).run()
    assert out.getvalue() == b"one\nlast words\n"


def test_last_lines_of_a_cancelled_job_are_awaited(one: Served, until: Until) -> None:
    one.log(1, 0, "stdout", "one\n")
    one.event("round_published", time.time(), 1, world_size=1, nodes=["n1"])
    reading = FollowerThread(one, replace(ALL, follow=True))
    until(lambda: reading.out.getvalue() == b"one\n", 30)
    assert one.unix().post("/v1/jobs/llama/cancel").code == 200
    waits = reading.waits
    until(lambda: reading.waits > waits + 5, 30)
    one.log(1, 0, "stdout", "checkpoint saved\n")
    until(lambda: reading.out.getvalue().endswith(b"saved\n"), 30)
    one.announce()
    assert reading.wait()


def test_rotated_log_continues(one: Served, until: Until) -> None:
    one.event("round_published", time.time(), 1, world_size=1, nodes=["n1"])
    path = one.log(1, 0, "stdout", "a long line of words\n")
    reading = FollowerThread(one, replace(ALL, follow=True))
    until(lambda: reading.out.getvalue() == b"a long line of words\n", 30)
    path.write_text("new\n")
    until(lambda: reading.out.getvalue() == b"a long line of words\nnew\n", 30)
    reading.stop()
    assert reading.error == "interrupted"


def test_outage_while_following_is_logged_once_and_bounded(
    one: Served, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.event("round_published", time.time(), 1, world_size=1, nodes=["n1"])
    one.log(1, 0, "stdout", "one\n")
    reading = FollowerThread(one, replace(ALL, follow=True))
    until(lambda: reading.out.getvalue() == b"one\n", 30)
    one.store.is_down = True
    until(lambda: reading.answers, 30)
    waits = reading.waits
    until(lambda: reading.waits > waits + 5, 30)
    one.log(1, 0, "stdout", "two\n")
    one.store.is_down = False
    until(lambda: reading.out.getvalue() == b"one\ntwo\n", 30)
    monkeypatch.setattr(following, "OUTAGE_TIMEOUT_S", 0.1)  # of what is asked from now on
    waits = reading.waits
    until(lambda: reading.waits > waits + 1, 30)
    assert len(reading.answers) == 1
    assert "retrying" in reading.answers[0]
    one.store.is_down = True
    assert reading.wait()
    assert "gave up after" in reading.error
