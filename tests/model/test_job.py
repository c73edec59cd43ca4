"""The three frozen values check themselves, in sentences that do the arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticd.errors import UsageError
from elasticd_agent.model.job import EntrypointMode, JobSpec, Policy, Rendezvous, Tls

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"slot_strikes": 5}, "slot_strikes 5 must not exceed no_progress_limit 3, .* lower it by 2"),
    (
        {"startup_ceiling_s": 0.4},
        "must exceed user_error_wait 0.5 s, a part of it, so that an error of all ranks is seen as one; raise "
        "it by more than 0.1 s",
    ),
    ({"backoff_s": ()}, "a growing list of seconds"),
    ({"backoff_s": (0, 4, 2)}, "a growing list of seconds"),
    ({"backoff_s": (-1, 0)}, "a growing list of seconds"),
    ({"progress_ceiling_s": 0}, "progress_ceiling 0 s must be more than 0"),
    ({"first_step_ceiling_s": float("nan")}, "first_step_ceiling nan s must be more than 0"),
    ({"shutdown_timeout_s": -1}, "shutdown_timeout -1 s cannot be negative"),
    ({"no_progress_limit": 0}, "no_progress_limit 0 must be at least 1"),
    ({"lease_s": 2}, r"lease 2 s must exceed renewal 1 s \+ 2 × store_timeout 0.9 s, .*; raise it by more than 0.8 s"),
    (
        {"lease_s": 3.2, "renewal_s": 0.5, "store_timeout_s": 1.2, "seen_timeout_s": 2},
        "lease 3.2 s must exceed 3 × store_timeout 1.2 s, .*; raise it by more than 0.4 s",
    ),
    ({"seen_timeout_s": 0.5}, "seen_timeout 0.5 s must exceed store_timeout 0.9 s, .*; raise it by more than 0.4 s"),
    ({"join_timeout_s": 5}, "join_timeout 5 s must exceed last_call_timeout 5 s, a part of it, .* more than 0 s"),
    ({"hold_timeout_s": 2}, r"hold_timeout 2 s must exceed grow_debounce 1 s \+ seen_timeout 1 s, .* more than 0 s"),
    ({"adopt_timeout_s": 1}, r"adopt_timeout 1 s must exceed lease 3 s \+ renewal 1 s, .* more than 3 s"),
    ({"store_away_s": 4}, "store_away 4 s must exceed lease"),
    ({"renewal_s": 0}, "renewal 0 s must be more than 0 seconds"),
    ({"node_cooloff_s": -1}, "node_cooloff -1 s cannot be negative"),
    ({"store_away_s": float("inf")}, "store_away inf s is longer than a year"),
    ({"hang_floor_s": 0.2}, "hang_floor 0.2 s must be at least 0.5 s, two looks at the workers"),
    ({"stopped_after_s": float("nan")}, "stopped_after nan s must be at least 0.5 s"),
    ({"hang_factor": 1}, "hang_factor 1 must be more than 1: it says how many times the usual is too long"),
    ({"slow_factor": float("inf")}, "slow_factor inf must be more than 1"),
    ({"evidence_timeout_s": 0}, "evidence_timeout 0 s must be more than 0"),
    ({"slow_ceiling_s": 5}, "slow_ceiling 5 s must exceed the least hang floor, 5 s, so that .* more than 0 s"),
    ({"slow_ceiling_s": 9, "hang_floor_s": 10}, "slow_ceiling 9 s must exceed hang_floor 10 s, .* more than 1 s"),
    (
        {"progress_ceiling_s": 20, "hang_floor_s": 30},
        "progress_ceiling 20 s must not be less than hang_floor 30 s: .*; raise it by 10 s",
    ),
    ({"on_hang": "panic"}, "on_hang 'panic' must be restart or report"),
]


@pytest.mark.parametrize(("numbers", "sentence"), WRONG, ids=[next(iter(numbers)) for numbers, _ in WRONG])
def test_contradictory_policy_is_refused_with_the_arithmetic(numbers: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Policy(**numbers)


def test_hang_floor_is_the_least_deadline() -> None:
    assert (Policy().least_deadline_s, Policy(hang_floor_s=9).least_deadline_s) == (5, 9)


def test_quarantine_doubles_up_to_an_hour() -> None:
    assert [Policy().slot_quarantine_s(times) for times in (1, 2, 3, 7, 99)] == [60, 120, 240, 3600, 3600]
    assert Policy(slot_cooloff_s=7200).slot_quarantine_s(2) == 7200


H = (("h", 1),)
NOWHERE: list[tuple[dict[str, Any], str]] = [
    ({"min_nodes": 0}, "at least 1 node, not 0"),
    ({"min_nodes": 3, "max_nodes": 2}, "at least 3 nodes but at most 2 is impossible; write 2:3"),
    ({"max_nodes": 2}, "2 nodes cannot meet in the memory of one"),
    ({"backend": "etcd"}, "etcd needs an endpoint, HOST:PORT"),
    ({"backend": "c10d", "endpoints": (*H, ("g", 2))}, "c10d has one endpoint, not 2"),
    ({"backend": "c10d", "endpoints": (("h", 0),)}, "port 0 for the store on h is out of range"),
    ({"backend": "etcd", "endpoints": H, "user": "u"}, "the store's user 'u' needs a password"),
    ({"backend": "etcd", "endpoints": H, "password": "p"}, "the store's password needs a user"),
    ({"node": "a/b"}, "node id 'a/b' must be printable"),
]


@pytest.mark.parametrize(("fields", "sentence"), NOWHERE, ids=[sentence for _, sentence in NOWHERE])
def test_impossible_rendezvous_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Rendezvous(**fields)


def test_client_certificate_is_two_files() -> None:
    for name, missing in (("cert", "key"), ("key", "cert")):
        with pytest.raises(UsageError, match=f"{name} without {missing}"):
            Tls(**{name: Path("x")})


def test_swapped_worker_bounds_are_refused() -> None:
    with pytest.raises(UsageError, match="write 2:4"):
        JobSpec("python", EntrypointMode.SCRIPT, "t.py", (), Path("/"), "job", "run", min_workers=4, max_workers=2)
