"""The names of a job's records."""

from __future__ import annotations

from elasticd_agent.model.keys import Keys


def test_watched_keys_are_not_written_by_every_node() -> None:
    """Or a hang of N nodes is N² messages, each with a node's report in it."""
    keys = Keys("job")
    for watched in (keys.round, keys.planner, keys.master(), keys.pause, keys.hang_report_request):
        for written in (keys.nodes, keys.failures(), keys.done(), keys.hang_reports()):
            assert not written.startswith(watched), f"a watch on {watched} hears of {written}"
