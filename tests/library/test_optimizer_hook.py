"""Scripts without elasticd have heartbeats by torch's optimizer hook, for every kind of optimizer step."""

from __future__ import annotations

from typing import Any

from elasticd.heartbeat.record import StepSource

# "adversarial" takes ten discriminator steps. In "one_after_another" the second optimizer's first step is taken for a
# part of the first one's last iteration: nobody can tell.
STEPS = {"adversarial": 10, "one_after_another": 4}


def test_every_optimizer_step_counts_once(start: Any) -> None:
    job = start("hooked.py", world_size=1)
    job.codes(timeout=90)
    (seen,) = job.results()
    assert seen.pop("taken_over") == [100, "SESSION"]
    assert seen == {name: [STEPS.get(name, 5), "HOOK"] for name in seen}
    assert len(seen) == 9


def test_session_steps_report_collectives_per_step(start: Any) -> None:
    job = start("plain.py", "7")
    job.results()
    for rank in job.ranks:
        seen = rank.read_heartbeat()
        assert (seen.step, seen.source, seen.collectives_per_step) == (7, StepSource.SESSION, 1), (
            "DDP reduces one bucket a step"
        )
        assert seen.collectives_at_step >= 7


def test_imports_cost_no_second(start: Any) -> None:
    (seen,) = start("lazy.py", world_size=1).results()
    assert seen == {"import": [], "session and hook": []}
