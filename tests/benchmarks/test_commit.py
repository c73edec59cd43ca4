"""The benchmark of `session.step()` runs: it builds the donor without a job."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import commit


def test_commits_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "COMMITS", 3)
    monkeypatch.setenv("ELASTICD_HEARTBEAT", "")  # the benchmark sets it: taken back at the end of the test
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    whole, step, end, parts = commit.commits(model, "a scheduler", torch.device("cpu"))
    assert whole > step > 0
    assert end > 0
    assert "record" in parts
