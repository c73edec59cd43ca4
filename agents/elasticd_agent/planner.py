"""The planner's hands: reads the view of a job from the store, asks `plan`, publishes by compare-and-swap.

Whatever it knows is in the store, but for the times at which it saw things, which are its own clock's. A lost race is
no news: the Round that won is read at the next turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticd.wire import Failure, NodeRecord, Round
from elasticd_agent.config import Policy
from elasticd_agent.messages import StopForced, StopRequested
from elasticd_agent.plan import Asked, Present, View, Wait, plan
from elasticd_agent.store import Store


@dataclass(frozen=True, slots=True)
class Keys:
    """The names a job's records have in the store."""

    job: str

    @property
    def _root(self) -> str:
        return f"/elasticd/v1/jobs/{self.job}"

    @property
    def round(self) -> str:
        return f"{self._root}/round"

    @property
    def nodes(self) -> str:
        return f"{self._root}/nodes/"

    def node(self, node: str) -> str:
        return f"{self.nodes}{node}"

    def failures(self, number: int) -> str:
        return f"{self._root}/failures/{number}/"

    def done(self, number: int) -> str:
        return f"{self._root}/done/{number}/"


@dataclass(slots=True)
class Planner:
    """One job's planner on this node. Times are monotonic seconds."""

    store: Store
    keys: Keys
    policy: Policy
    asked: Asked
    first_number: int = 1
    checkpoint: tuple[int, int] | None = None
    high_water: int = 0
    stop: StopRequested | StopForced | None = None
    _round_at: dict[int, float] = field(default_factory=dict)
    _failed_at: dict[int, float] = field(default_factory=dict)
    _joined_at: dict[tuple[str, str], float] = field(default_factory=dict)

    def turn(self, now: float) -> Round | Wait:
        """Look at the job once; publish the next Round if there shall be one. Raises StoreUnavailable."""
        found = self.store.read(self.keys.round)
        view = self._view(None if found is None else Round.from_json(found.value), now)
        verdict = plan(view, self.policy, now)
        if isinstance(verdict, Wait):
            return verdict
        version = None if found is None else found.version
        if not self.store.compare_and_swap(self.keys.round, version, verdict.to_json()):
            return Wait("another planner was faster", now)
        self._forget(verdict.number - 1)
        return verdict

    def _view(self, current: Round | None, now: float) -> View:
        number = current.number if current is not None else 0
        nodes = [NodeRecord.from_json(item.value) for item in self.store.list(self.keys.nodes).values()]
        failures = [Failure.from_json(item.value) for item in self.store.list(self.keys.failures(number)).values()]
        done = self.store.list(self.keys.done(number))
        if failures:
            self._failed_at.setdefault(number, now)
        return View(
            current=current,
            nodes=tuple(Present(n, self._joined_at.setdefault((n.id, n.incarnation), now)) for n in nodes),
            asked=self.asked,
            failures=tuple(failures),
            done=frozenset(key.rpartition("/")[2] for key in done),
            stop=self.stop,
            first_number=self.first_number,
            checkpoint=self.checkpoint,
            high_water=self.high_water,
            round_at=self._round_at.setdefault(number, now),
            failed_at=self._failed_at.get(number, now),
        )

    def _forget(self, number: int) -> None:
        """Records of rounds before this one serve nobody any more."""
        for prefix in (self.keys.failures(number - 1), self.keys.done(number - 1)):
            for key in self.store.list(prefix):
                self.store.delete(key)
        for times in (self._round_at, self._failed_at):
            for old in [known for known in times if known < number]:
                del times[old]
