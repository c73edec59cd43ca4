"""Requests for jobs and cordons: a lost race is read again, an outage is reported, repeating is safe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest

from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.model import keys
from elasticd_agent.store import Store
from elasticd_agent.store import cache as cache_module
from elasticd_agent.store.cache import StoreCache
from elasticd_agent.store.etcd.store import EtcdStore
from elasticd_agent.store.memory import MemoryStore
from elasticd_daemon import keys as names
from elasticd_daemon.records import Cordon, JobResult, Placement, RoundSummary, SlotAssignment, Submission
from elasticd_daemon.scheduler import job_queue as queue
from tests.daemon.stores import InterruptedStore
from tests.etcd import etcd_servers


@pytest.fixture(scope="module", params=["memory", "etcd"])
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[Store, Callable[[], Store]]]:
    with ExitStack() as cleanup:
        if request.param == "memory":
            memory = MemoryStore()
            yield memory, lambda: memory
            return
        endpoints = cleanup.enter_context(etcd_servers()).endpoints

        def client() -> Store:
            made = EtcdStore(endpoints, timeout_s=30.0)
            cleanup.callback(made.close)
            made.read("k")
            return made

        clients = [client() for _ in range(4)]
        yield clients[0], iter([*clients, *clients]).__next__


@pytest.fixture
def store(opened: tuple[Store, Callable[[], Store]]) -> Store:
    for key in opened[0].list(""):
        opened[0].delete(key)
    return opened[0]


def submit(
    store: Store, job: str | None = "llm", stem: str = "job", cache: StoreCache | None = None, **more: object
) -> Submission:
    fields: dict[str, object] = {"submitted_by": "ann", "submitted_at": 5.0, **more}
    request = Submission(job or "", 0, '{"command": ["train.py"]}', 1, 2, 2, 4, **fields)  # type: ignore[arg-type]
    return queue.submit(store, request, stem=stem, cache=cache)


def at_once(calls: list[Callable[[], object]]) -> list[object]:
    """What each returned or raised."""
    start, answers = threading.Barrier(len(calls)), [None] * len(calls)

    def call(index: int) -> None:
        start.wait(60)
        try:
            answers[index] = calls[index]()  # type: ignore[call-overload]
        except (UsageError, StoreUnavailable) as error:
            answers[index] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return list(answers)


def test_submit_numbers_jobs_in_order(store: Store) -> None:
    assert [submit(store, job).number for job in ("a", "b", "c")] == [1, 2, 3]
    found = queue.read_view(store).submissions
    assert {
        (s.job, s.number, s.min_nodes, s.max_nodes, s.min_slots, s.max_slots, s.submitted_by, s.submitted_at)
        for s in found
    } == {(job, number, 1, 2, 2, 4, "ann", 5.0) for job, number in (("a", 1), ("b", 2), ("c", 3))}


def test_generated_name_that_is_taken_is_made_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of an ended job, whose history would be deleted."""
    made = iter(("0001", "0001", "0002", "0003", "0004"))
    monkeypatch.setattr(queue.secrets, "token_hex", lambda size: next(made))
    assert submit(store, None).job == "job-0001"
    queue.cancel(store, "job-0001", "ann", 6.0)
    submit(store, "job-0003")
    assert [submit(store, None).job for _ in range(2)] == ["job-0002", "job-0004"]


def test_submit_many_at_once(opened: tuple[Store, Callable[[], Store]], store: Store) -> None:
    """All are there, each with its own number."""
    clients = [opened[1]() for _ in range(4)]
    answers = at_once([lambda c=c, i=i: submit(c, None if i % 2 else f"j{i}") for i, c in enumerate(clients * 4)])
    made = [a for a in answers if isinstance(a, Submission)]
    assert len(made) == 16, answers
    assert sorted(s.number for s in made) == list(range(1, 17))
    assert {s.job: s for s in queue.read_view(store).submissions} == {s.job: s for s in made}


def test_submit_two_with_one_id_at_once(store: Store) -> None:
    """One wins; the other gets the name of the winner."""
    for turn in range(10):
        answers = at_once([partial(submit, store, f"j{turn}", submitted_by=by) for by in ("ann", "bob")])
        made = [a for a in answers if isinstance(a, Submission)]
        (refused,) = [a for a in answers if isinstance(a, UsageError)]
        assert len(made) == 1
        assert (
            f"job 'j{turn}' has not ended: it was submitted by {made[0].submitted_by} as number {made[0].number}"
            in str(refused)
        )
        assert made[0] in queue.read_view(store).submissions


def test_submit_the_id_of_an_ended_job(store: Store) -> None:
    first = submit(store)
    with pytest.raises(UsageError, match=r"cancel it first \(elasticd cancel llm\), or choose another id"):
        submit(store)
    ending = queue.cancel(store, "llm", "ann", 6.0)
    assert (ending.number, ending.outcome, ending.exit_code) == (first.number, "cancelled", 143)
    assert ending.reason == "cancelled by ann"
    second = submit(store)
    assert second.number > first.number
    assert [s.number for s in queue.read_view(store).unfinished()] == [second.number]
    with pytest.raises(UsageError):
        submit(store)
    assert queue.cancel(store, "llm", "", 7.0).number == second.number, "the ending of the earlier run is replaced"


def test_cancel_an_ended_job(store: Store) -> None:
    """It returns how the job ended."""
    wants = submit(store)
    done = JobResult("llm", wants.number, "succeeded", 0, "all workers are done")
    assert queue.record_result(store, done) == done
    assert queue.cancel(store, "llm", "ann", 9.0) == done
    assert queue.record_result(store, JobResult("llm", wants.number, "failed", 1, "too late")) == done
    with pytest.raises(UsageError, match="there is no job 'lm'; `elasticd jobs` lists all jobs"):
        queue.cancel(store, "lm", "ann", 9.0)


def test_cancel_while_the_job_ends(opened: tuple[Store, Callable[[], Store]], store: Store) -> None:
    """There is one result, which both receive."""
    for turn in range(10):
        wants = submit(store, f"j{turn}")
        done = JobResult(wants.job, wants.number, "succeeded", 0, "done")
        answers = at_once([partial(queue.cancel, store, wants.job, "", 0.0), partial(queue.record_result, store, done)])
        assert answers[0] == answers[1]
        assert queue.read_view(store).result(wants.job, wants.number) == answers[0]


def test_cancel_a_job_without_submission(store: Store) -> None:
    store.compare_and_swap(names.PLACEMENTS + "x", None, Placement("x", 4, (SlotAssignment("n1", (0,)),), "").to_json())
    assert queue.cancel(store, "x", "ann", 1.0).number == 4


def test_invalid_requests(store: Store) -> None:
    for job in ("a/b", " a", ".a", "a\n", "x" * 200):
        with pytest.raises(UsageError, match="job id"):
            submit(store, job)
        with pytest.raises(UsageError, match="job id"):
            queue.cancel(store, job, "", 0.0)
        with pytest.raises(UsageError, match="node"):
            queue.cordon(store, job, False, "", "", 0.0)
    for job in ("-f", "bad id", "$(id)", "a;b", "x*", "ä"):
        with pytest.raises(UsageError, match="characters that a shell"):
            submit(store, job)
    for limits in ((0, 1, 2, 4), (3, 2, 2, 4), (1, 2, 2, 1), (1, 2, 0, 0)):
        with pytest.raises(UsageError, match="submission of 'llm'"):
            queue.submit(store, Submission("llm", 0, "{}", *limits))
    with pytest.raises(UsageError, match=r"its job file has 300002 bytes; the limit is 262144"):
        queue.submit(store, Submission("big", 0, '"' + "x" * 300_000 + '"', 1, 1, 1, 1))
    assert not queue.read_view(store).submissions


def test_cordons(store: Store) -> None:
    assert queue.cordon(store, "n1", False, "the disk\n is full", "ann", 1.0) == Cordon(
        "n1", False, "the disk is full", cordoned_by="ann", cordoned_at=1.0
    )
    assert queue.cordon(store, "n1", True, "", "bob", 2.0).drain
    assert queue.cordon(store, "n1", False, "again", "ann", 3.0).drain, "only uncordon takes a drain back"
    assert [c.reason for c in queue.read_view(store).cordons] == ["again"]
    assert queue.uncordon(store, "n1")
    assert not queue.uncordon(store, "n1")
    assert len(queue.cordon(store, "n2", False, "x" * 10_000, "", 0.0).reason) == queue.MAX_REASON_CHARS


def test_record_result_bounds_the_history(store: Store) -> None:
    wants = submit(store)
    rounds = tuple(RoundSummary(n, 512, f"round {n} " + "because " * 1000) for n in range(5000))
    kept = queue.record_result(store, JobResult("llm", wants.number, "failed", 1, "r" * 9999, rounds=rounds))
    assert [note.number for note in kept.rounds] == list(range(5000 - queue.MAX_RESULT_ROUNDS, 5000))
    assert kept.rounds[0].reason.startswith("round 4800 because")
    found = store.read(names.RESULTS + "llm")
    assert len(found.value) < 60_000
    assert queue.read_view(store).result("llm", wants.number) == kept


def test_result_overwritten_with_garbage_still_holds(store: Store) -> None:
    """Else the job would count as unfinished, take its slots again, and send running jobs away."""
    cache = StoreCache(store, queue.ignore_sentence)
    submit(store, "job", cache=cache)
    result = queue.cancel(store, "job", "ann", 7.0)
    assert queue.read_view(store, cache=cache).results == (result,)
    found = store.read(names.RESULTS + "job")
    assert store.compare_and_swap(names.RESULTS + "job", found.version, b'{"number": 1e9')
    told: list[str] = []
    now = queue.read_view(store, told.append, cache)
    assert (now.results, now.unfinished(), len(told)) == ((result,), (), 1)
    store.delete(names.RESULTS + "job")
    assert queue.read_view(store, cache=cache).results == ()


def test_read_view_decodes_a_record_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of 500 ended jobs is requested every few seconds, and hardly any of them changes."""
    decoded: list[str] = []

    def counted(kind: type[Submission], key: str, value: bytes) -> Submission:
        decoded.append(key)
        return keys.decode_record(kind, key, value)

    monkeypatch.setattr(cache_module, "decode_record", counted)
    cache = StoreCache(store, queue.ignore_sentence)
    made = [submit(store, f"job{i}", token=f"token{i}") for i in range(5)]
    decoded.clear()
    assert set(queue.read_view(store, cache=cache).submissions) == set(made)
    assert submit(store, "job3", token="token3", cache=cache) == made[3]
    assert sorted(decoded) == [names.SUBMISSIONS + f"job{i}" for i in range(5)]
    result = queue.cancel(store, "job2", "ann", 7.0)
    store.delete(names.SUBMISSIONS + "job4")
    decoded.clear()
    now = queue.read_view(store, cache=cache)
    assert (set(now.submissions), now.results) == (set(made[:4]), (result,))
    assert decoded == [names.RESULTS + "job2"]
    submit(store, "job2")
    assert [s.number for s in queue.read_view(store, cache=cache).unfinished()] == [1, 2, 4, 6]


def test_damaged_records(store: Store) -> None:
    """They are named, and block no other record."""
    submit(store, "good")
    store.compare_and_swap(names.SUBMISSIONS + "bad", None, b"{")
    store.compare_and_swap(names.RESULTS + "good", None, b"\xff")
    sentences: list[str] = []
    assert [s.job for s in queue.read_view(store, sentences.append).submissions] == ["good"]
    assert len(sentences) == 2
    assert all("cannot be decoded and is left alone" in sentence for sentence in sentences)
    with pytest.raises(UsageError, match=r"submissions/bad in the store cannot be decoded.*choose another id"):
        submit(store, "bad")
    with pytest.raises(UsageError, match=r"there is no job 'bad'; .*cannot be decoded"):
        queue.cancel(store, "bad", "", 0.0)
    assert queue.cancel(store, "good", "", 0.0).outcome == "cancelled", "what it replaced sentences nothing"


@pytest.mark.parametrize("text", [b"", b"x", b"-3", b"0", b"9" * 400, b"1.5", "٣".encode()])
def test_submit_with_a_damaged_sequence(store: Store, text: bytes) -> None:
    """It continues above every known number."""
    for job in "abc":
        submit(store, job)
    found = store.read(names.SUBMISSION_SEQUENCE)
    assert store.compare_and_swap(names.SUBMISSION_SEQUENCE, found.version, text)
    assert submit(store, "d").number == 4
    store.delete(names.SUBMISSION_SEQUENCE)
    assert submit(store, "e").number == 5


def test_store_that_was_restored_from_before_a_run(store: Store) -> None:
    """A lower number would be one of a run that has ended, and never start."""
    first = submit(store, "llm")
    queue.cancel(store, "llm", "ann", 6.0)
    running = replace(first, number=9)  # submitted after the snapshot
    queue.submit_again(store, "llm", 9, running.to_json())
    queue.submit_again(store, "llm", 1, first.to_json())
    assert queue.read_view(store).unfinished() == (running,)
    queue.cancel(store, "llm", "ann", 7.0)
    assert (submit(store, "llm").number, submit(store, "next").number) == (10, 11)
    assert [s.job for s in queue.read_view(store).unfinished()] == ["llm", "next"]


def flaky(*fails: int, late: bool = False) -> InterruptedStore:
    """A store of which these requests fail: before they are done, or, with `late`, only their answer is lost."""

    def fail(n: int, verb: str, key: str) -> None:
        if n in fails and not (late and verb == "write"):
            raise StoreUnavailable("etcd at 10.0.0.1:2379 does not answer")

    store = InterruptedStore(MemoryStore(), fail)
    store.lost_answers = set(fails) if late else set()
    return store


def attempt(store: Store, token: str) -> object:
    try:
        return submit(store, "llm", token=token)
    except (StoreUnavailable, UsageError) as error:
        return error


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("away", [1, 2])
@pytest.mark.parametrize("token", ["", "t-1"])
def test_submit_repeated_after_an_outage(late: bool, away: int, token: str) -> None:
    """Whichever request is lost, done or not: repeating leads to one job, under the id that the sentence named."""
    reference = flaky()
    submit(reference, "llm", token=token)
    for first in range(1, len(reference.requests) + 1):
        store = flaky(*range(first, first + away), late=late)
        made = attempt(store, token)
        if isinstance(made, StoreUnavailable):
            known = "whether job 'llm' was submitted is not known" not in str(made)
            assert not (known and queue.read_view(store.memory).submissions), "the sentence must say what is not sure"
            assert known or "submitted again with the id 'llm', it is never run twice" in str(made)
            store.before = lambda n, verb, key: None
            store.lost_answers = set()
            made = attempt(store, token)
        if isinstance(made, UsageError):
            assert (token, late) == ("", True)
            assert "has not ended" in str(made)
            (made,) = queue.read_view(store.memory).submissions
        assert queue.read_view(store.memory).submissions == (made,)


def test_submit_with_a_token_and_no_id(store: Store) -> None:
    made = submit(store, None, token="t-2")
    assert submit(store, None, token="t-2") == made
    assert submit(store, None, token="t-3") != made
    assert submit(store, None) not in (made,)


def test_submit_after_a_lost_answer() -> None:
    """The record with our number is ours: there is nothing to report. Without an answer to that question it is open."""
    reference = flaky()
    submit(reference)
    last = len(reference.requests)
    lost = flaky(last, late=True)
    assert submit(lost) == queue.read_view(lost.memory).submissions[0]
    with pytest.raises(StoreUnavailable, match="is not known"):
        submit(flaky(last, last + 1))
