"""A few kinds of scripts, killed at every place of a step: `python -m benchmarks.exact` has all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import exact
from benchmarks.exact import all_kinds, compare


def test_kills_at_every_place_of_a_step_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank at each place, and of all of them in the optimizer's step."""
    monkeypatch.setattr(exact, "FAULTS", [fault for fault in exact.FAULTS if fault[1] < exact.STEPS or fault[1] == 87])
    assert len(exact.FAULTS) == len(exact.PLACES) + 1
    outcome = compare("saved_after_the_tail", tmp_path)
    assert outcome.result == "exact", outcome.what


@pytest.mark.system
@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("gan_with_frozen_parts", "exact"),
        ("dropout_with_the_usual_loader", "exact"),
        ("accumulated_step_by_step", "exact"),
        ("saved_before_step", "exact"),
        ("saved_after_a_tail_that_draws", "exact"),
        ("gan_in_turn", "exact"),
        ("ema", "exact"),
        ("clamped", "exact"),
        ("scaled_with_overflows", "exact"),
        ("scheduler_by_epoch", "exact"),
        ("accumulated", "exact"),
        ("evaluated", "exact"),
        ("worker_processes", "exact"),
        ("augmented_by_numpy", "exact"),
        ("tied", "exact"),
        ("compiled", "exact"),
        ("counted", "exact"),
        ("unfrozen_late", "exact"),
        ("moments_reset_in_a_saved_tail", "exact"),
        ("buffer_in_a_saved_tail", "exact"),
        ("trained_apart", "said"),
        ("scheduler_after_step", "refused"),
        ("ema_after_step", "refused"),
        ("clamped_after_step", "refused"),
        ("plateau_in_an_epoch", "said"),
        ("weight_decay_by_hand_late", "said"),
        ("moments_late_now_and_then", "said"),
        ("layer_clamped_late_now_and_then", "said"),
        ("buffer_after_step", "said"),
        ("lbfgs_of_each_ranks_loss", "said"),
        ("batch_norm_with_gradients_averaged_by_hand", "said"),
    ],
)
def test_other_kinds(tmp_path: Path, kind: str, result: str) -> None:
    outcome = compare(kind, tmp_path)
    assert outcome.result in (result, "exact"), outcome.what


def test_kinds_are_many() -> None:
    assert len(all_kinds()) >= 100
