"""What is kept of a node's health across restarts and reboots, whatever the file holds."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd_agent.node.health.persistence import Remembered, boot_id
from elasticd_agent.node.health.policy import Past, Quarantined, Rules, Unhealthy, blamed, looked, verdict
from elasticd_agent.node.health.result import bad

RULES = Rules()


def test_a_cool_off_and_blames_go_on_in_the_same_boot(tmp_path: Path) -> None:
    past = looked(Past(joined=True), [bad("a", "full")] * 1, 100.0, Rules(strikes=1))
    past = blamed(past, "x", 110.0, RULES)
    kept = Remembered(tmp_path / "h", "b")
    kept.gpus = 8
    kept.save(past, 120.0)
    again = Remembered(tmp_path / "h", "b")
    found = again.load(130.0)
    assert verdict(found, 130.0) == Unhealthy("a: full")
    cooling = looked(found, [], 130.0, RULES)
    assert verdict(cooling, 130.0) == Quarantined(past.why, 60.0)
    assert (found.times, found.blames, found.troubled, found.joined, again.gpus) == (1, (110.0,), 110.0, True, 8)


def test_after_a_reboot_only_the_count_is_left(tmp_path: Path) -> None:
    past = looked(Past(joined=True), [bad("a", "full")], 5000.0, Rules(strikes=1))
    Remembered(tmp_path / "h", "b").save(past, 5010.0)
    found = Remembered(tmp_path / "h", "c").load(3.0)
    assert (found.times, found.joined, found.rows, found.blames) == (1, False, (), ())
    assert found.troubled == -7.0
    assert isinstance(verdict(found, 3.0), Unhealthy)


def test_it_is_private_and_leaves_no_other_file(tmp_path: Path) -> None:
    Remembered(tmp_path / "health.json", "b").save(Past(), 1.0)
    assert os.listdir(tmp_path) == ["health.json"]
    assert (tmp_path / "health.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"version": "9.0"}', b'{"version": "1.0"}', b"\xff", b"null"])
def test_a_file_that_makes_no_sense_is_forgotten_with_a_sentence(
    tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "h").write_bytes(text)
    with caplog.at_level(logging.WARNING):
        assert Remembered(tmp_path / "h", "b").load(1.0) == Past()
    assert "what was known of this node's health is lost" in caplog.text


def test_a_directory_that_is_gone_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Remembered(tmp_path / "none" / "h", "b")
    for _ in range(3):
        kept.save(Past(), 1.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@given(st.floats(1, 1e6), st.floats(0, 1e6), st.integers(0, 9), st.lists(st.floats(0, 1e5), max_size=3), st.booleans())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, at: float, later_s: float, times: int, ages: list[float], joined: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "health-any.json"
    past = Past(joined=joined, times=times, until=at + 50, troubled=at - 1, why="w", blames=tuple(at - a for a in ages))
    Remembered(path, "b").save(past, at)
    found = Remembered(path, "b").load(at + later_s)
    assert (found.joined, found.times, found.why) == (joined, times, "w")
    assert found.until == pytest.approx(past.until)
    assert found.troubled == pytest.approx(past.troubled)
    assert found.blames == pytest.approx(past.blames)
    assert "wall" not in json.loads(path.read_bytes())


def test_the_kernel_names_this_boot() -> None:
    assert len(boot_id()) == 36
    assert boot_id() == boot_id()
