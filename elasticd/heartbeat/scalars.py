"""A script's own numbers (a loss, a learning rate) on their way to the dashboard: sampled, so that a call costs little.

The interval between two samples grows with the age of the process: a day of training is 1,400 lines of the event log.
Values of a device are fetched only for a sample.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import SupportsFloat

from elasticd.errors import UsageError
from elasticd.heartbeat.worker_events import MAX_SCALARS, WorkerEventWriter

logger = logging.getLogger("elasticd")

MIN_INTERVAL_S = 1.0
INTERVAL_AGE_SHARE = 1 / 200
"""The interval between two samples, as a share of the process's age."""


@dataclass(slots=True)
class ScalarSampler:
    events: WorkerEventWriter
    clock: Callable[[], float] = time.monotonic
    _names: set[str] = field(default_factory=set)
    _began_at: float = 0.0
    _due_at: float = float("-inf")
    _is_limit_reported: bool = False
    _unsampled: tuple[int, Mapping[str, SupportsFloat]] | None = None
    """The values logged since the last sample, copied on their device."""

    def __post_init__(self) -> None:
        self._began_at = self.clock()
        atexit.register(self.close)

    def log(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Raises UsageError for too many names at first, TypeError and ValueError for a value that is no number."""
        now = self.clock()
        if self.events.path is None:
            return
        values = {name: _detached_copy(value) for name, value in values.items()}
        if now < self._due_at:
            self._unsampled = step, values
            return
        self._due_at = now + max(MIN_INTERVAL_S, (now - self._began_at) * INTERVAL_AGE_SHARE)
        self._write(step, values)

    def close(self) -> None:
        """The last values are samples, too. Raises nothing: a device may have failed."""
        atexit.unregister(self.close)
        last, self._unsampled = self._unsampled, None
        if last is not None:
            with contextlib.suppress(Exception):
                self._write(*last)

    def _write(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        self._unsampled = None
        if len({*self._names, *values}) > MAX_SCALARS:
            values = self._within_limit(step, values)
        self._names.update(values)
        numbers = {name: float(value) for name, value in values.items()}
        finite = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        shown = ", ".join(f"{name} {number:.6g}" for name, number in numbers.items())
        self.events.write("scalars", f"step {step}: {shown}", step, values=finite)

    def _within_limit(self, step: int, values: Mapping[str, SupportsFloat]) -> Mapping[str, SupportsFloat]:
        """Leave out the names beyond the limit: an error that comes with the first evaluation would cost the training
        before it.
        """
        if not self._names:
            raise UsageError(f"session.log() takes at most {MAX_SCALARS} names in all, not {sorted(values)}")
        new = [name for name in values if name not in self._names]
        left_out = new[MAX_SCALARS - len(self._names) :]
        if not self._is_limit_reported:
            self._is_limit_reported = True
            what = f"session.log() takes at most {MAX_SCALARS} names in all: {', '.join(left_out)} cannot be shown"
            logger.warning(what)
            self.events.write("message", what, step, once="names of session.log()")
        return {name: value for name, value in values.items() if name not in left_out}


def _detached_copy(value: SupportsFloat) -> SupportsFloat:
    """A tensor without its graph, which would keep memory, and as it is now: a running loss is reset in place."""
    detach = getattr(value, "detach", None)
    copied: SupportsFloat = value if detach is None else detach().clone()
    return copied
