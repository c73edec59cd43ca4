"""What health remembers across the daemon's restarts, in <state>/health.json: ages, never times of day.

CLOCK_MONOTONIC goes on while the machine is up, so what is written is an age at a moment of one boot, named by the
kernel's boot id; after a reboot the ages stand where they stood. A file that cannot be read is one that is not there,
and one that cannot be written costs memory, not health: both are said once.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from elasticd.errors import WireError
from elasticd_agent.model.codec import Document, Record
from elasticd_agent.node.health.policy import CheckHistory, HealthHistory, after_reboot
from elasticd_agent.system.files import replace_file
from elasticd_agent.system.procfs import read

_log = logging.getLogger("elasticd.health")


@dataclass(frozen=True, slots=True)
class FailingCheck(Record):
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class HealthRecord(Document):
    """`at`: CLOCK_MONOTONIC of `boot` when it was written; the ages and `left_s` are of that moment."""

    boot_id: str
    at: float
    fit_since_boot: bool
    streak: int
    left_s: float
    why: str = ""
    failure_age_s: float | None = None
    job_failure_ages_s: tuple[float, ...] = ()
    failing: tuple[FailingCheck, ...] = ()
    gpus: int = 0


class HealthFile:
    """One node's. `gpus`: the most that were ever seen here, so that one which is gone after a reboot is missed."""

    def __init__(self, path: Path | None, boot: str) -> None:
        self._path, self._boot, self._warned, self._exists = path, boot, False, False
        self.max_gpus = 0

    def load(self, now: float) -> HealthHistory:
        if self._path is None:
            return HealthHistory()
        try:
            kept = HealthRecord.from_json(self._path.read_bytes())
        except FileNotFoundError:
            return HealthHistory()
        except (OSError, WireError) as error:
            _log.warning("what was known of this node's health is lost: %s: %s", self._path, error)
            return HealthHistory()
        self.max_gpus, self._exists = kept.gpus, True
        same = kept.boot_id == self._boot and kept.at <= now
        then = kept.at if same else now
        past = HealthHistory(
            checks=tuple(CheckHistory(one.name, (True,), True, one.why) for one in kept.failing),
            fit_since_boot=kept.fit_since_boot,
            streak=kept.streak,
            quarantined_until=then + kept.left_s if kept.left_s > 0 else float("-inf"),
            last_failure_at=then - kept.failure_age_s if kept.failure_age_s is not None else float("-inf"),
            why=kept.why,
            job_failures=tuple(then - age_s for age_s in kept.job_failure_ages_s),
        )
        return past if same else after_reboot(past)

    def save(self, past: HealthHistory, now: float) -> None:
        if self._path is None:
            return
        kept = HealthRecord(
            boot_id=self._boot,
            at=now,
            fit_since_boot=past.fit_since_boot,
            streak=past.streak,
            left_s=max(0.0, past.quarantined_until - now),
            why=past.why,
            failure_age_s=now - past.last_failure_at if past.last_failure_at > float("-inf") else None,
            job_failure_ages_s=tuple(now - at for at in past.job_failures),
            failing=tuple(FailingCheck(row.check, row.why) for row in past.failing),
            gpus=self.max_gpus,
        )
        try:
            replace_file(self._path, kept.to_json(), sync=False)
        except OSError as error:
            if not self._warned:
                _log.warning("%s cannot be written (%s): a restart of the agent forgets strikes", self._path, error)
            self._warned = True
        else:
            self._warned, self._exists = False, True

    def was_deleted(self) -> bool:
        """Somebody has removed the file: that is how a person says that all of this is forgiven."""
        return self._path is not None and self._exists and not os.path.lexists(self._path)


def boot_id() -> str:
    """Another one after each reboot; "" where the kernel does not say."""
    return read("/proc/sys/kernel/random/boot_id").decode("ascii", "replace").strip()
