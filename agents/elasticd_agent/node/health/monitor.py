"""The thread that looks after this node's health, and what the daemon asks of it. See `verdicts` for the rules.

Nothing here is ever waited for by the deciding loop: it reads `verdict()`, which is a value, says who was to blame, and
finds `HealthChanged` in its inbox. Every look is bounded; should one not end all the same, that itself is trouble.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from elasticd_agent.node.health import metrics as measured
from elasticd_agent.node.health.checks import Places
from elasticd_agent.node.health.persistence import Remembered
from elasticd_agent.node.health.policy import (
    Healthy,
    Past,
    Quarantined,
    Rules,
    Unhealthy,
    Verdict,
    blamed,
    forgiven,
    looked,
    verdict,
)
from elasticd_agent.node.health.result import Reading, bad

AGAIN_S = 5.0
"""What is not believed yet is looked at again this soon, and what keeps a node from joining."""
OVERDUE_S = 300.0
"""Far beyond all the deadlines of one look together."""
ATTENTIVE_S = 10.0
"""It is asked every second; who has not asked for so long was stopped itself, and so was the thread that looks."""
CLOSE_S = 10.0

State = Literal["healthy", "unhealthy", "quarantined"]


@dataclass(frozen=True, slots=True)
class Renewed:
    """What counts from now on."""

    places: Places
    rules: Rules
    every_s: float
    all_reduce: bool


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """`left_s`: how long the node is left out at least, as far as that is known."""

    state: State
    why: str
    left_s: float


class Health(Protocol):
    """This node's. Every method may be called from any thread, and returns at once but for `close`."""

    def start(self, post: Callable[[HealthChanged], None]) -> None: ...

    def verdict(self) -> tuple[bool, str]:
        """May it be given work, and if not, why not."""
        ...

    def standing(self) -> HealthChanged: ...

    def readings(self) -> tuple[Reading, ...]:
        """Of the last look."""
        ...

    def blamed(self, why: str) -> None:
        """A job failed or hung, and it was this node's doing rather than another's."""
        ...

    def metrics(self, node: str) -> bytes: ...

    def close(self) -> None: ...


class Checked(Protocol):
    """`checks.Checks`."""

    def look(self, idle: bool, most_gpus: int) -> list[Reading]: ...
    def renew(self, places: Places) -> None: ...
    def all_reduce(self) -> Reading: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class Watching:
    """Looks every `every_s`, sooner where there is doubt. `idle()`: no job runs on this node; asked from its thread."""

    def __init__(
        self,
        checks: Callable[[Callable[[], None]], Checked],
        rules: Rules,
        remembered: Remembered,
        *,
        every_s: float,
        all_reduce: bool,
        idle: Callable[[], bool],
        count_gpus: int = 0,
    ) -> None:
        """`checks` is made with what to call when a look would find something."""
        self._rules, self._remembered, self._every_s, self._idle = rules, remembered, every_s, idle
        self._inbox: queue.SimpleQueue[str | Renewed | None] = queue.SimpleQueue()
        self._checks = checks(lambda: self._inbox.put(""))
        self._post: Callable[[HealthChanged], None] = lambda change: None
        self._past = remembered.load(time.monotonic())
        remembered.gpus = max(remembered.gpus, count_gpus)
        self._tested = self._past.joined or not all_reduce
        self._all_reduce = all_reduce
        self._readings: tuple[Reading, ...] = ()
        self._looked_at = time.monotonic()
        self._closing = False
        self._asked_at = self._attentive_since = self._looked_at
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self, post: Callable[[HealthChanged], None]) -> None:
        """`post` is called from the thread that looks."""
        self._post = post
        if not self._idle():  # an earlier daemon let it join, whatever is remembered: nobody is stopped for that
            self._past, self._tested = replace(self._past, joined=True), True
        self._thread.start()

    def renew(self, renewed: Renewed) -> None:
        """From any thread: these settings count from the next look on, which is now."""
        self._inbox.put(renewed)

    def verdict(self) -> tuple[bool, str]:
        now = self.standing()
        return now.state == "healthy", now.why

    def standing(self) -> HealthChanged:
        now = time.monotonic()
        if now - self._asked_at > ATTENTIVE_S:
            self._attentive_since = now
        self._asked_at = now
        overdue_s = now - max(self._looked_at, self._attentive_since) - self._every_s
        if overdue_s > OVERDUE_S:
            return HealthChanged("unhealthy", f"the look that was due {overdue_s:.0f} s ago hangs", 0.0)
        return _change(verdict(self._past, now))

    def readings(self) -> tuple[Reading, ...]:
        return self._readings

    def blamed(self, why: str) -> None:
        self._inbox.put(why or "no reason was given")

    def metrics(self, node: str) -> bytes:
        now = self.standing()
        return measured.page(node, now.state, now.left_s, self._past.times, self._readings)

    def close(self) -> None:
        """Bounded."""
        self._closing = True
        self._inbox.put(None)
        self._checks.stop()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._checks.close()

    # ---- the thread

    def _run(self) -> None:
        look_at, said = time.monotonic(), self.standing()
        while True:
            now = time.monotonic()
            if now >= look_at:
                self._look()
                look_at = time.monotonic() + self._pause_s()
            said = self._tell(said)
            try:
                word = self._inbox.get(timeout=max(0.0, self._next(look_at) - time.monotonic()))
            except queue.Empty:
                continue
            if word is None:
                return
            if isinstance(word, Renewed):
                self._renew(word)
                look_at = time.monotonic()
            elif word:
                self._keep(blamed(self._past, word, time.monotonic(), self._rules))
            else:
                look_at = time.monotonic()

    def _renew(self, renewed: Renewed) -> None:
        self._checks.renew(renewed.places)
        self._rules, self._every_s, self._all_reduce = renewed.rules, renewed.every_s, renewed.all_reduce
        self._tested = self._tested or not renewed.all_reduce

    def _look(self) -> None:
        try:
            readings = self._found(self._idle())
        except Exception as error:  # noqa: BLE001 no process, pipe or file can be made, as a rule; and nobody else looks
            why = (isinstance(error, OSError) and error.strerror) or error
            readings = [bad("machine", f"nothing can be looked at: {why}")]
        if self._closing:
            return  # what was cut short says nothing
        now = time.monotonic()
        self._readings, self._looked_at = tuple(readings), now
        if self._remembered.taken_away():
            self._past = forgiven(self._past)
        self._keep(looked(self._past, readings, now, self._rules))

    def _found(self, idle: bool) -> list[Reading]:
        readings = self._checks.look(idle, self._remembered.gpus)
        if not self._tested and idle and all(reading.outcome != "bad" for reading in readings):
            readings.append(self._checks.all_reduce())
            self._tested = readings[-1].outcome != "bad"
        return readings

    def _keep(self, past: Past) -> None:
        if past.times > self._past.times and self._all_reduce:
            self._tested = False  # it shows once more that it can before it is taken again
        self._past = past
        self._remembered.save(past, time.monotonic())

    def _tell(self, said: HealthChanged) -> HealthChanged:
        change = self.standing()
        if (change.state, change.why) == (said.state, said.why):
            return said
        self._post(change)
        return change

    def _pause_s(self) -> float:
        soon = self._past.doubtful or not self._past.joined
        return min(AGAIN_S, self._every_s) if soon else self._every_s

    def _next(self, look_at: float) -> float:
        """A cool-off that ends is news, too."""
        now = time.monotonic()
        return min(look_at, self._past.until) if self._past.until > now else look_at


def _change(found: Verdict) -> HealthChanged:
    if isinstance(found, Healthy):
        return HealthChanged("healthy", found.why, 0.0)
    if isinstance(found, Unhealthy):
        return HealthChanged("unhealthy", found.why, 0.0)
    assert isinstance(found, Quarantined)
    return HealthChanged("quarantined", found.why, found.left_s)
