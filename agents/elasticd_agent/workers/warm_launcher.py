"""The template of a job's workers as its manager sees it: workers are forked by it, or start cold, with the reason.

The template imports torch and what else the job preloads, which takes seconds, and once for all rounds. A module that
makes it unfit to fork is left out, and another template preloads the rest; a template that ends by itself is replaced a
few times. Only when that does not help, workers start cold from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from elasticd_agent.workers.events import StartModeKnown
from elasticd_agent.workers.launcher.messages import EndTemplate, TemplateReady
from elasticd_agent.workers.launcher.owner_client import OwnerClient
from elasticd_agent.workers.launcher.requests import ALWAYS_PRELOADED, LaunchRequests

TEMPLATE_WAIT_S = 180.0
"""Importing torch from a cold network file system can take minutes: a round waits so long for the template, from the
template's start, and then starts cold."""
MODULE_IMPORT_TIMEOUT_S = 600.0
"""The time that the import of one module may take."""
FORK_DEADLINE_S = 10.0
TEMPLATE_TRIES = 3


class WarmLauncher:
    """The newest template. `report` gets what a person should know of it."""

    def __init__(
        self, owner: OwnerClient, requests: LaunchRequests, report: Callable[[StartModeKnown | str], None]
    ) -> None:
        self.ready = False
        """The template can fork."""
        self.cold_reason: str | None = None
        """Why workers start cold for good."""
        self.preloading_module = ""
        """The module that the template imports, or imported last."""
        self._module_since = 0.0
        self._owner = owner
        self._requests = requests
        self._report = report
        self._template_started_at: float | None = None
        """When the template was started; None once it is ready, or has ended."""
        self._tries = 0
        self._is_replaced = False
        """The template ends, and another one leaves a module out."""

    def start_template(self) -> None:
        self._tries += 1
        self._is_replaced = False
        self._template_started_at = time.monotonic()
        self.module_import_started("torch")
        self._owner.send(self._requests.template_request())

    def give_up(self, why: str, since: str = " from now on") -> None:
        """Start workers cold."""
        self.cold_reason = why
        self.ready = False
        self._report(StartModeKnown("cold", f"workers start cold{since}: {why}"))

    def start_deadline(self, now: float) -> float:
        """When a start that begins now waits no longer for the template."""
        if self.ready:
            return now + FORK_DEADLINE_S
        return max(now, (now if self._template_started_at is None else self._template_started_at) + TEMPLATE_WAIT_S)

    def preload_deadline(self) -> float | None:
        return None if self._template_started_at is None else self._module_since + MODULE_IMPORT_TIMEOUT_S

    def end_late_preload(self) -> None:
        """The module that is imported has taken too long."""
        self._template_started_at = None
        self._owner.send(EndTemplate())
        late = f"its import took longer than {MODULE_IMPORT_TIMEOUT_S:.0f} s"
        if self.preloading_module in ALWAYS_PRELOADED:
            self.give_up(f"{self.preloading_module}: {late}")
        else:
            self.leave_out({self.preloading_module: late})

    # --- reports of the owner -------------------------------------------------------------------------------------

    def module_import_started(self, module: str) -> None:
        self.preloading_module, self._module_since = module, time.monotonic()

    def leave_out(self, modules: Mapping[str, str]) -> None:
        """The template ends; the next one does without these modules, each of which has its reason."""
        for name, why in modules.items():
            self._report(f"{name} is not preloaded: {why}")
        self._requests.leave_out(modules)
        self.ready = False
        self._is_replaced = True
        self._tries = 0

    def template_ready(self, template: TemplateReady) -> None:
        self._template_started_at = None
        if template.cold is not None:
            self._owner.send(EndTemplate())
            self.give_up(template.cold)
            return
        self.ready = True
        seconds = template.seconds
        self._report(StartModeKnown("warm", f"the warm launcher is ready after {seconds:.1f} s", seconds))

    def fork_succeeded(self) -> None:
        self._tries = 0

    def template_ended(self, why: str, starting_round: int | None) -> bool:
        """Start another template, or give up. True if that one leaves a module out, and the start waits for it."""
        was_ready, self.ready, self._template_started_at = self.ready, False, None
        if self.cold_reason is not None:
            return False
        if self._is_replaced:
            self.start_template()
            return True
        if starting_round is not None:
            self._report(f"the warm launcher {why}: round {starting_round} starts cold")
        elif was_ready:
            self._report(f"the warm launcher {why}: the workers continue, and another one is started")
        if self._tries < TEMPLATE_TRIES:
            self.start_template()
        else:
            self.give_up(f"the launcher ended {TEMPLATE_TRIES} times, the last time because it {why}")
        return False
