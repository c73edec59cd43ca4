"""The pages from what agents say, however wicked or senseless that is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd_agent.node.dashboard import decode as facts
from elasticd_agent.node.dashboard import job_page as jobpage
from elasticd_agent.node.dashboard import status as standing
from elasticd_agent.node.dashboard.job_page import LogTail, PageQuery
from elasticd_agent.node.dashboard.layout import page
from elasticd_agent.node.dashboard.overview import overview
from tests.node.dashboard.hostile_texts import PAYLOADS, WICKED, Read, read
from tests.node.dashboard.samples import NOW, a_job, a_rank, a_round


def whole(said: dict[str, Any], tail: LogTail | None = None, evidence: list[dict[str, Any]] | None = None) -> Read:
    job = facts.job_status(said)
    explained = jobpage.explanation(job.job, evidence or [], brief=True)
    content = jobpage.job_page(job, PageQuery(), NOW, tail or LogTail("a line\n", "on a"), explained)
    return read(page(job.job, "a", "0.1.0", *content, now=NOW, leave=True))


def shown(said: dict[str, Any]) -> str:
    return " ".join(" ".join(whole(said).text).split())


def test_a_job_as_it_is() -> None:
    text = shown(a_job())
    for part in (
        "287", "1 steps/s", "of its time counted", "step 280", "7.0 s ago", "93.0 %", "4.0 s",
        "1 fault, 11 steps again", "rank 1 was killed by SIGKILL",
        "training for 3 min 16 s", "−4.0 s", "trained for 1 min 40 s", "a line",
    ):  # fmt: skip
        assert part in text, part
    assert standing.state(facts.job_status(a_job())) == ("running", "good")


@pytest.mark.parametrize(
    ("progress", "word", "sentence"),
    [
        ({"ranks": [a_rank(0), a_rank(2, state="T", idle_seconds=2.5)]}, "stalled",
         "Rank 2 on b is stopped: nothing of it has moved for 2.5 s. The others wait for it."),
        ({"ranks": [a_rank(0, state="Z")]}, "stalled", "Rank 0 on a is dead: nothing of it has moved for 0.1 s."),
        ({"ranks": [a_rank(0, idle_seconds=30.0)]}, "stalled", "Rank 0 on a has not moved for 30 s."),
        ({"ranks": [a_rank(k, idle_seconds=30.0) for k in range(4)]}, "stalled", "4 ranks have not moved for 30 s."),
        ({"phase": "stopping"}, "stopping", "The workers of round 2 are being ended."),
        ({"rounds": [a_round(7, NOW, first_step_at=None, cause="hung", reason="rank 3 hangs", lost_seconds=3.0)]},
         "recovering", "No step for 3.0 s: round 7 is starting, since rank 3 hangs"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_first(progress: dict[str, Any], word: str, sentence: str) -> None:
    said = a_job(**progress)
    assert standing.problem(facts.job_status(said)) == (word, sentence)
    assert f"running, {word}" in shown(said)
    assert standing.problem(facts.job_status({**said, "ended_at": NOW})) is None


def test_a_round_that_was_planned_is_no_loss() -> None:
    rounds = [
        a_round(1, NOW - 300, over_at=NOW - 200),
        a_round(2, NOW - 199, cause="resize", reason="b joined", lost_seconds=0.8, lost_steps=0),
    ]
    text = shown(a_job(rounds=rounds))
    assert "paused 0.8 s" in text and "no step lost" in text and "Lost nothing" in text


def test_a_round_without_a_node_that_was_lost_was_not_planned() -> None:
    """Its cause is a resize, as a drain's, and the page told of a pause as planned."""
    why = {"cause": "resize", "reason": "b is lost: its lease has ended", "lost": ["b"]}
    rounds = [
        a_round(1, NOW - 300, over_at=NOW - 200),
        a_round(2, NOW - 199, **why, lost_seconds=0.8, lost_steps=11),
    ]
    text = shown(a_job(rounds=rounds))
    assert "node lost b is lost" in text and "−0.8 s" in text and "1 fault, 11 steps again" in text
    assert "paused" not in text


def test_steps_that_take_long_are_no_trouble() -> None:
    said = a_job(steps_per_second=0.05, ranks=[a_rank(0, idle_seconds=60.0)])
    assert standing.problem(facts.job_status(said)) is None
    waiting = a_job(ranks=[a_rank(0, phase="checkpoint", idle_seconds=60.0)])
    assert standing.problem(facts.job_status(waiting)) is None


def test_a_job_before_its_first_round_and_after_its_end() -> None:
    nothing = {**a_job(), "progress": None, "places": [], "state": "pending", "nodes": []}
    assert "No step has been made yet" in shown(nothing)
    ended = {
        **a_job(),
        "ended_at": NOW - 60,
        "ended_seconds": 60.0,
        "exit_code": 1,
        "state": "failed",
        "reason": "gave up",
    }
    assert "Ended 1 min ago with exit code 1: gave up" in shown(ended)


def test_who_does_not_answer_is_named() -> None:
    assert "b does not answer: it did not answer within 2 s" in shown(
        a_job(silent={"b": "it did not answer within 2 s"})
    )


def wicked(value: object) -> Any:
    """The same with every word replaced."""
    if isinstance(value, dict):
        return {key: wicked(one) for key, one in value.items()}
    if isinstance(value, list):
        return [wicked(one) for one in value]
    return WICKED if isinstance(value, str) else value


def test_nothing_that_others_say_becomes_markup() -> None:
    said = wicked(a_job(silent={WICKED: WICKED}, ranks=[a_rank(0, phase="barrier", barrier="x"), a_rank(1, state="")]))
    evidence = [{"node": WICKED, "page": WICKED, "document": {"verdict": {}}}, {"node": "b", "page": WICKED}]
    text = "".join(whole(said, LogTail(WICKED, WICKED), evidence).text)
    assert text.count("onmouseover='alert(1)") > 20
    assert "".join(whole(said, LogTail(why=WICKED)).text).count("CDATA") > 10
    read(page(WICKED, WICKED, WICKED, jobpage.evidence_link(WICKED), now=NOW, leave=False))


def test_nothing_of_the_overview_becomes_markup() -> None:
    job = wicked({k: v for k, v in a_job().items() if k not in ("places", "progress")})
    node = {"node": WICKED, "state": WICKED, "slots": 4, "used": 2, "jobs": [WICKED], "reason": WICKED,
            "address": WICKED, "gpus": [WICKED], "versions": {}}  # fmt: skip
    doing = {WICKED: facts.job_status(wicked(a_job()))}
    for here in (WICKED, "elsewhere"):
        content = overview([job], [node], here, doing, list(PAYLOADS))
        assert "".join(read(page("jobs", here, "0", *content, now=NOW, leave=True)).text).count("onmouseover") > 5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
_KEYS = sorted(a_job()["progress"])


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(_KEYS), JSON | st.lists(st.dictionaries(
    st.sampled_from(sorted({*a_round(1, 0.0), *a_rank(0)})), JSON, max_size=6), max_size=3)))  # fmt: skip
def test_whatever_a_runner_says_there_is_a_page(progress: dict[str, Any]) -> None:
    whole(a_job(**progress))
