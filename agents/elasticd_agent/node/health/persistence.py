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
from elasticd_agent.node.health.policy import Past, Row, rebooted
from elasticd_agent.system.procfs import read

_log = logging.getLogger("elasticd.health")


@dataclass(frozen=True, slots=True)
class Failing(Record):
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Kept(Document):
    """`at`: CLOCK_MONOTONIC of `boot` when it was written; the ages and `left_s` are of that moment."""

    boot: str
    at: float
    joined: bool
    times: int
    left_s: float
    why: str = ""
    troubled_age_s: float | None = None
    blame_ages_s: tuple[float, ...] = ()
    failing: tuple[Failing, ...] = ()
    gpus: int = 0


class Remembered:
    """One node's. `gpus`: the most that were ever seen here, so that one which is gone after a reboot is missed."""

    def __init__(self, path: Path | None, boot: str) -> None:
        self._path, self._boot, self._said, self._there = path, boot, False, False
        self.gpus = 0

    def load(self, now: float) -> Past:
        if self._path is None:
            return Past()
        try:
            kept = Kept.from_json(self._path.read_bytes())
        except FileNotFoundError:
            return Past()
        except (OSError, WireError) as error:
            _log.warning("what was known of this node's health is lost: %s: %s", self._path, error)
            return Past()
        self.gpus, self._there = kept.gpus, True
        same = kept.boot == self._boot and kept.at <= now
        then = kept.at if same else now
        past = Past(
            rows=tuple(Row(one.name, (True,), True, one.why) for one in kept.failing),
            joined=kept.joined,
            times=kept.times,
            until=then + kept.left_s if kept.left_s > 0 else float("-inf"),
            troubled=then - kept.troubled_age_s if kept.troubled_age_s is not None else float("-inf"),
            why=kept.why,
            blames=tuple(then - age_s for age_s in kept.blame_ages_s),
        )
        return past if same else rebooted(past)

    def save(self, past: Past, now: float) -> None:
        if self._path is None:
            return
        kept = Kept(
            boot=self._boot,
            at=now,
            joined=past.joined,
            times=past.times,
            left_s=max(0.0, past.until - now),
            why=past.why,
            troubled_age_s=now - past.troubled if past.troubled > float("-inf") else None,
            blame_ages_s=tuple(now - at for at in past.blames),
            failing=tuple(Failing(row.check, row.why) for row in past.failing),
            gpus=self.gpus,
        )
        new = self._path.with_suffix(".new")
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                file.write(kept.to_json())
            os.replace(new, self._path)
        except OSError as error:
            if not self._said:
                _log.warning("%s cannot be written (%s): a restart of the agent forgets strikes", self._path, error)
            self._said = True
        else:
            self._said, self._there = False, True

    def taken_away(self) -> bool:
        """Somebody has removed the file: that is how a person says that all of this is forgiven."""
        return self._path is not None and self._there and not os.path.lexists(self._path)


def boot_id() -> str:
    """Another one after each reboot; "" where the kernel does not say."""
    return read("/proc/sys/kernel/random/boot_id").decode("ascii", "replace").strip()
