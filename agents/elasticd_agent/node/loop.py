"""The daemon's deciding loop: one inbox, one thread. Every turn looks at everything anew and makes the node agree.

It exists so that the daemon can be killed, replaced or cut off at any moment: what it knows is in the store, in the
runners' folders and in locks, and a turn needs nothing that an earlier one remembered. A store that is away stops
nothing: the last that was known counts until it is back. Where a job runs is `placing`'s to decide, what that means
for this node `reconciling`'s, doing it `performing`'s.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from elasticd.errors import StoreRefused, StoreUnavailable, UsageError, WireError
from elasticd_agent.config.agent_settings import Settings
from elasticd_agent.node import keys as names
from elasticd_agent.node.configured_jobs import HandedIn
from elasticd_agent.node.executor import Performing
from elasticd_agent.node.health.job_failures import Blames
from elasticd_agent.node.health.policy import UNSEEN
from elasticd_agent.node.job_cache import Knowledge
from elasticd_agent.node.journal import Telling
from elasticd_agent.node.metrics import Facts, NodeMetrics
from elasticd_agent.node.reconcile import Ended, Plan, reconcile
from elasticd_agent.node.records import NodeCard, NodeState, Running
from elasticd_agent.node.registration import Announcement, NameTaken
from elasticd_agent.node.runners.manager import Runners
from elasticd_agent.node.runners.spec_builder import Orders
from elasticd_agent.node.scheduler import job_queue as jobs
from elasticd_agent.node.scheduler.policy import View
from elasticd_agent.node.sd_notify import Notifier
from elasticd_agent.store import Store
from elasticd_agent.telemetry import events

GATHER_S = 0.02
"""What is hinted at together is looked at together."""
TAKEN_S = 2.0
"""A name that is taken when we start may be that of a daemon that is no more: two of its leases and this decide."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Something may have changed: look."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A signal to the daemon: to drain and end, to read its configuration again, to replace itself."""

    what: Literal["drain", "reload", "replace"]
    by: str


Message = Hint | Asked


class Health(Protocol):
    def verdict(self) -> tuple[bool, str]: ...
    def blamed(self, why: str) -> None: ...


class Placer(Protocol):
    @property
    def places(self) -> bool: ...
    def turn(self, now: float) -> list[str]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop is made of."""

    store: Store
    announcement: Announcement
    runners: Runners
    placer: Placer
    health: Health
    notifier: Notifier
    telling: Telling
    inbox: queue.SimpleQueue[Message]
    card: NodeCard
    metrics: NodeMetrics


class Deciding:
    """`reload` reads the configuration again and says what came of it, or raises UsageError."""

    def __init__(
        self,
        parts: Parts,
        orders: Orders,
        reload: Callable[[Settings], tuple[Settings, list[str]]],
        replaceable: Callable[[], str],
    ) -> None:
        """`replaceable`: why the daemon cannot replace itself by what is installed now, or ""."""
        self._parts = parts
        self._reload, self._replaceable = reload, replaceable
        settings = orders.settings
        self.card = parts.card
        self._announcement = parts.announcement
        self._knowledge = Knowledge(parts.store, parts.telling.warned, lambda: parts.inbox.put(Hint()))
        self._handed = HandedIn(settings.state_dir)
        self._blames = Blames(parts.card.node)
        self._ended = Ended()
        self._known = View()
        self._draining = ""
        self._away_since: float | None = None
        self._joined = False
        self._taken_said = ""
        self._forgotten_since: float | None = None
        self._performing = Performing(parts.runners, parts.telling, parts.metrics, orders, self._ended)
        self._turned_at = time.monotonic()
        self._next_at = 0.0
        self._began_at = time.monotonic()

    # --- asked from other threads -----------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        return self._performing.orders.settings

    @property
    def joined(self) -> bool:
        return self._announcement.there

    @property
    def away(self) -> bool:
        return self._away_since is not None

    def takes_part(self) -> tuple[bool, str]:
        """What a readiness probe is told, and why. It does not follow the store: who has joined trains on without it,
        and a probe that fails would only take the node from whoever wants to look at it."""
        since = self._away_since
        if since is None:
            return self.joined, "joined" if self.joined else "not joined: the node's card is not in the store"
        without = f"the store has not answered for {time.monotonic() - since:.0f} s"
        if self._joined:
            return True, f"joined; {without}, and what runs here goes on without it"
        return False, f"not joined yet: {without}"

    def facts(self) -> Facts:
        """How the node is now, for its metrics."""
        running, known = self.card.running, self._known
        states = [one.state for one in running]
        over = {(e.job, e.number) for e in known.endings}
        waiting = [p for p in known.placements if not p.places and (p.job, p.number) not in over]
        return Facts(
            slots=self.card.slots,
            used=sum(len(runs.order.slots) for runs in self._parts.runners.alive()),
            state=self.card.state,
            joined=self.joined,
            places=self._parts.placer.places,
            runners={state: states.count(state) for state in states},
            waiting=len(waiting),
            store_up=not self.away,
            late_s=self.overdue_s(),
            lines_lost=self._parts.telling.lost,
        )

    def jobs(self) -> tuple[tuple[str, int], ...]:
        """(job, number) of the runners here."""
        return tuple(runs.key for runs in self._parts.runners.alive())

    def needed(self) -> set[tuple[str, int]]:
        """(job, number) whose files on this node are in use, or may be soon."""
        return {*self.jobs(), *((s.job, s.number) for s in self._known.unended())}

    def addressed(self, address: str) -> None:
        """Where the daemon is asked from other nodes; before `run`."""
        self.card = replace(self.card, address=address)

    def overdue_s(self) -> float:
        """For how long the deciding thread should have turned and has not."""
        return max(0.0, time.monotonic() - max(self._next_at, self._turned_at))

    # --- the loop ---------------------------------------------------------------------------------------------------

    def adopt(self) -> int:
        """Find the runners that an earlier daemon has started, and how the others ended; how many live."""
        for over in self._parts.runners.adopt():
            if over.last is not None and over.last.outcome != "left":
                self._ended.add(over, 0.0, time.monotonic())
        return len(self._parts.runners.alive())

    def run(self) -> bool:
        """Until it is over. True: the process is to replace itself; False: it is to end."""
        parts = self._parts
        parts.notifier.ready(f"node {self.card.node}")
        while True:
            asked = self._receive()
            while asked:
                if self._heard(asked.pop(0)):
                    for later in asked:  # the next one's to hear
                        parts.inbox.put(later)
                    return True
            self._turn(time.monotonic())
            if self._draining and not parts.runners.alive():
                return False

    def _receive(self) -> list[Asked]:
        """Wait until there is something to do; what people have asked for meanwhile."""
        asked = []
        timeout: float | None = max(0.0, self._next_at - time.monotonic())
        try:
            first = self._parts.inbox.get(timeout=timeout)
            if isinstance(first, Hint):
                time.sleep(GATHER_S)
            else:
                asked.append(first)
            while True:
                more = self._parts.inbox.get_nowait()
                if isinstance(more, Asked):
                    asked.append(more)
        except queue.Empty:
            return asked

    def _heard(self, asked: Asked) -> bool:
        """True if the process is to replace itself now."""
        telling = self._parts.telling
        match asked.what:
            case "drain" if self._draining:
                telling.warned(f"{asked.by} again: what is left here is killed")
                self._parts.runners.hurry()
            case "drain":
                within_s = float(self.settings.drain_timeout_s)
                self._draining = f"the agent was stopped ({asked.by})"
                telling.happened(
                    events.AgentState, f"{asked.by}: jobs have {within_s:g} s to leave this node", state="draining"
                )
                self._parts.notifier.stopping(within_s + 30.0, "draining")
            case "reload":
                self._parts.notifier.reloading()
                try:
                    settings, said = self._reload(self.settings)
                    self._performing.orders = replace(self._performing.orders, settings=settings)
                    self.card = replace(self.card, labels=settings.labels)
                    telling.happened(events.AgentReloaded, f"{asked.by}: {'; '.join(said) or 'nothing has changed'}")
                except UsageError as error:
                    telling.warned(f"{asked.by}: nothing was reloaded: {error}")
                self._parts.notifier.ready(f"node {self.card.node}")
            case "replace":
                if why := self._replaceable():
                    telling.warned(f"{asked.by}: this agent goes on as it is: {why}")
                elif self._draining:
                    telling.warned(f"{asked.by}: this agent is leaving already")
                else:
                    return True
        return False

    def _turn(self, now: float) -> None:
        self._turned_at = now
        parts, settings = self._parts, self.settings
        for over in parts.runners.poll(now):
            self._performing.over(over, now)
        heard = parts.runners.heard()
        for blame in self._blames.heard(heard, [key for key in heard if not self._performing.started(key)]):
            parts.health.blamed(blame)
        self._carded(self.card.running)
        self._agree(now)
        plan = reconcile(self._known, self.card.node, parts.runners.alive(), self._ended, self._draining, now)
        self._performing.perform(plan, now)
        running = plan.running if not plan.start else self._plan(now).running
        changed = self._carded(running)
        due = parts.runners.due()
        times = [now + float(settings.renewal_s), plan.until, due, *([now] if changed and not self.away else [])]
        self._next_at = min(at for at in times if at is not None)
        parts.notifier.feed()

    def _plan(self, now: float) -> Plan:
        runs = self._parts.runners.alive()
        return reconcile(self._known, self.card.node, runs, self._ended, self._draining, now)

    # --- the store --------------------------------------------------------------------------------------------------

    def _agree(self, now: float) -> None:
        """Hear what the store says, and say what there is to say. One that is away costs nothing but the news."""
        try:
            if self._announcement.turn(self.card, now):
                self._knowledge.forget()
                if not self._joined:
                    self._joined = True
                    self._parts.telling.happened(
                        events.AgentJoined, f"node {self.card.node} takes part", slots=self.card.slots
                    )
            if self._knowledge.turn(now):
                self._announcement.check()
            self._known = self._knowledge.view()
            self._say_endings()
            self._tell_again(now)
            if not self._draining:
                for sentence in self._handed.turn(
                    self._parts.store, self.settings.jobs, self._known, self.card.node, time.time()
                ):
                    self._parts.telling.said(sentence)
            for sentence in self._parts.placer.turn(now):
                self._parts.telling.happened(events.Placed, sentence)
            self._known = self._knowledge.view()
            self._back(now)
        except StoreUnavailable as error:
            self._lost(str(error), now)
        except NameTaken as error:
            if not self._joined and now >= self._began_at + 2 * float(self.settings.lease_s) + TAKEN_S:
                raise UsageError(str(error)) from None
            if self._joined and str(error) != self._taken_said:
                self._taken_said = str(error)
                self._parts.telling.warned(f"{error}; what runs here goes on")
        except (StoreRefused, WireError) as error:
            if not self._joined and isinstance(error, StoreRefused):
                raise
            self._lost(str(error), now)

    def _lost(self, why: str, now: float) -> None:
        self._knowledge.forget()
        if self._away_since is None:
            self._away_since = now
            self._parts.metrics.store_away()
            self._parts.telling.happened(events.StoreAway, f"what runs here goes on without the store: {why}")
        self._forgotten_since = None

    def _back(self, now: float) -> None:
        if self._away_since is not None:
            seconds, self._away_since = now - self._away_since, None
            sentence = f"the store answers again after {seconds:.1f} s"
            self._parts.telling.happened(events.StoreBack, sentence, seconds=seconds)

    def _say_endings(self) -> None:
        for ending in self._plan(time.monotonic()).endings:
            jobs.ended(self._parts.store, ending)
            self._knowledge.hint(names.ENDED + ending.job)
        self._known = self._knowledge.view()
        self._ended.settle(self._known, self.card.node)

    def _tell_again(self, now: float) -> None:
        """A store that came back empty hears from us which jobs there are, once every node has had time to be back."""
        forgotten = self._plan(now).forgotten
        if not forgotten:
            self._forgotten_since = None
            return
        if self._forgotten_since is None:
            self._forgotten_since = now
            named = ", ".join(order.job for order in forgotten)
            self._parts.telling.warned(f"the store does not know {named}, which runs on here: it is told again")
        if now < self._forgotten_since + float(self.settings.lease_s) + float(self.settings.renewal_s):
            return
        for order in forgotten:
            if order.submission:
                self._parts.store.compare_and_swap(names.SUBMITTED + order.job, None, order.submission.encode())
                self._knowledge.hint(names.SUBMITTED + order.job)
        self._forgotten_since = None

    # --- the card -----------------------------------------------------------------------------------------------------

    def _carded(self, running: tuple[Running, ...]) -> bool:
        """Write the card anew. True if it says something else than before."""
        state, why = self._state()
        if state != self.card.state and state != "draining":
            self._parts.telling.happened(
                events.AgentState, f"node {self.card.node} is {state}" + (f": {why}" if why else ""), state=state
            )
        card = replace(self.card, state=state, why=why, running=running)
        changed, self.card = card != self.card, card
        return changed

    def _state(self) -> tuple[NodeState, str]:
        if self._draining:
            return "draining", self._draining
        cordon = next((c for c in self._known.cordons if c.node == self.card.node), None)
        well, why = self._parts.health.verdict()
        if not well:
            return "starting" if why == UNSEEN else "quarantined", why
        if cordon is not None:
            return "cordoned", cordon.reason
        return "ready", ""

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self, *, leaves: bool) -> None:
        """Let another daemon place; `leaves`: take the card away, too. Raises nothing."""
        self._knowledge.close()
        for away in (self._parts.placer.close, *([self._announcement.withdraw] if leaves else [])):
            try:
                away()
            except (StoreUnavailable, StoreRefused):
                pass  # it runs out by itself
