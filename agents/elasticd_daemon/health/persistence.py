"""The health history across the agent's restarts, in <state>/health.json: ages, never times of day.

An age is valid within one boot, which the kernel's boot id names; after a reboot the ages count from now. An unreadable
file counts as missing, and an unwritable one is logged once.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from elasticd.errors import WireError
from elasticd_agent.model.codec import Document, Record
from elasticd_agent.system.files import replace_file
from elasticd_daemon.health.policy import CheckHistory, HealthHistory, after_reboot

_log = logging.getLogger("elasticd.health")


@dataclass(frozen=True, slots=True)
class FailingCheck(Record):
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class HealthRecord(Document):
    boot_id: str
    at: float  #: CLOCK_MONOTONIC when it was written; the ages and `left_s` are of that moment
    fit_since_boot: bool
    streak: int
    left_s: float
    why: str = ""
    failure_age_s: float | None = None
    job_failure_ages_s: tuple[float, ...] = ()
    failing: tuple[FailingCheck, ...] = ()
    gpus: int = 0


class HealthFile:
    def __init__(self, path: Path, boot: str) -> None:
        self._path = path
        self._boot = boot
        self._warned = False
        self._exists = False
        self.max_gpus = 0
        """The most that were ever seen here, so that a GPU that is lost in a reboot is missed."""

    def load(self, now: float) -> HealthHistory:
        try:
            record = HealthRecord.from_json(self._path.read_bytes())
        except FileNotFoundError:
            return HealthHistory()
        except (OSError, WireError) as error:
            _log.warning("the health history of this node is lost: %s: %s", self._path, error)
            return HealthHistory()
        self.max_gpus = max(self.max_gpus, record.gpus)
        self._exists = True
        same = record.boot_id == self._boot and record.at <= now
        then = record.at if same else now
        history = HealthHistory(
            checks=tuple(CheckHistory(check.name, (True,), True, check.why) for check in record.failing),
            fit_since_boot=record.fit_since_boot,
            failure_streak=record.streak,
            quarantined_until=then + record.left_s if record.left_s > 0 else float("-inf"),
            last_failure_at=then - record.failure_age_s if record.failure_age_s is not None else float("-inf"),
            why=record.why,
            job_failure_times=tuple(then - age_s for age_s in record.job_failure_ages_s),
        )
        return history if same else after_reboot(history)

    def save(self, history: HealthHistory, now: float) -> None:
        record = HealthRecord(
            boot_id=self._boot,
            at=now,
            fit_since_boot=history.fit_since_boot,
            streak=history.failure_streak,
            left_s=max(0.0, history.quarantined_until - now),
            why=history.why,
            failure_age_s=now - history.last_failure_at if history.last_failure_at > float("-inf") else None,
            job_failure_ages_s=tuple(now - at for at in history.job_failure_times),
            failing=tuple(FailingCheck(row.check, row.why) for row in history.failing_node_checks),
            gpus=self.max_gpus,
        )
        try:
            replace_file(self._path, record.to_json(), sync=False)
        except OSError as error:
            if not self._warned:
                _log.warning(
                    "%s cannot be written (%s): a restart of the agent loses the health history", self._path, error
                )
            self._warned = True
        else:
            self._warned = False
            self._exists = True

    def was_deleted(self) -> bool:
        """A person deletes the file to reset the history."""
        return self._exists and not os.path.lexists(self._path)
