"""What the reporters of one job share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from elasticd_agent.hangs.observer import Observation
from elasticd_agent.model.job import JobSpec, Policy
from elasticd_agent.model.records import Round
from elasticd_agent.telemetry.console import Console
from elasticd_agent.telemetry.event_log import EventSink
from elasticd_agent.telemetry.goodput import GoodputLedger
from elasticd_agent.telemetry.goodput_tracker import GoodputTracker
from elasticd_agent.telemetry.metrics import MetricsRecorder
from elasticd_agent.telemetry.recovery_time import RecoveryTimer


@dataclass(slots=True)
class JobContext:
    spec: JobSpec
    policy: Policy
    node: str
    events: EventSink
    metrics: MetricsRecorder
    console: Console
    recovery: RecoveryTimer = field(default_factory=RecoveryTimer)
    goodput: GoodputTracker = field(init=False)
    round: Round | None = None
    """The newest Round, the terminal one included."""
    running_round: tuple[Round, float] | None = None
    """The newest Round that is not terminal, and when it arrived."""
    observation: Observation | None = None
    """The last observation of this node's workers."""
    step: int | None = None

    def __post_init__(self) -> None:
        self.goodput = GoodputTracker(self.node, GoodputLedger(time.monotonic()), self.policy.backoff_s)

    @property
    def round_number(self) -> int:
        return self.round.number if self.round is not None else 0

    def max_workers(self, round: Round) -> int:
        """The most workers that the job may have; other nodes can have more slots than this one."""
        return max(self.spec.max_workers * self.spec.rendezvous.max_nodes, round.world_size)
