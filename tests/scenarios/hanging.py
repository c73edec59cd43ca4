"""Simulated observations and evidence of stalled ranks, for the real hang detector of a Cluster's agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.hangs.collector.record import RankEvidence
from elasticd_agent.hangs.evidence import EvidenceTarget, GatheredEvidence
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.model.records import Round
from elasticd_agent.model.reports import RankReport, StackPlace
from tests.scenarios.node import Node

GATHER_S = 0.3
COLLECTIVES = 3
"""Of every step."""


@dataclass(slots=True)
class FakeEvidence:
    """Says where each rank is, a little later."""

    node: Node
    later: Callable[[float, Callable[[], None]], None]
    now: Callable[[], float]
    gathered: int = 0

    def start_gathering(self, number: int, targets: Sequence[EvidenceTarget], final: Path, why: str) -> bool:
        self.gathered += 1
        where: StackPlace = "collective" if self.node.stuck in ("", "collective") else "elsewhere"
        at = "all_reduce (ddp.py:12)" if where == "collective" else "next_batch (data.py:88)"
        ranks = tuple(
            RankEvidence(t.rank, where=where, function=at, stack=at, state="S", source="py-spy") for t in targets
        )
        found = GatheredEvidence(number, ranks, final, GATHER_S)
        self.later(GATHER_S, lambda: self._found(found))
        return True

    def _found(self, found: GatheredEvidence) -> None:
        if self.node.suspicion is not None and not (self.node.dead or self.node.frozen):
            self.node.suspicion.evidence_gathered(found, self.now())

    def discard_current(self) -> None:
        pass

    def write_later(self, number: int, name: str, text: str, final: Path) -> None:
        pass

    def close(self) -> None:
        pass


def observation(node: Node, round: Round, step: int, idle_s: float, stuck: bool) -> Observation:
    """One look at the node's ranks. `stuck`: somebody of the round is."""
    behind = node.stuck in ("sleeps", "burns", "stopped")
    issued = step * COLLECTIVES + (1 if stuck and not behind else 0)
    ranks = tuple(
        RankReport(
            rank,
            slot,
            phase="step",
            step=step,
            collectives=issued,
            usual=COLLECTIVES,
            timeout_s=1800.0,
            idle_s=idle_s,
            alive_s=0.05 if node.stuck != "stopped" else idle_s,
            state={"stopped": "T", "burns": "R"}.get(node.stuck, "S"),
            stopped_s=idle_s if node.stuck == "stopped" else 0.0,
            cpu_s=min(idle_s, 3.0) if node.stuck == "burns" else 0.0,
            window_s=min(idle_s, 3.0),
        )
        for rank, name, _, slot in round.assignments()
        if name == node.name
    )
    return Observation(round.number, (), (), idle_s, ranks, observed_s=idle_s)
