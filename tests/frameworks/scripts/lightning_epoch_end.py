"""The example of Lightning; rank 1 is killed at the end of the first epoch, and again in the middle of the second."""

from __future__ import annotations

import os
import signal
from typing import Any

from elasticd.integrations.lightning import ElasticdCallback
from examples import lightning_fit


class Killed(ElasticdCallback):
    def on_validation_end(self, trainer: Any, *rest: Any) -> None:
        super().on_validation_end(trainer, *rest)
        die_once(self.session.rank, self.session.round, self.session.steps == 63)

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, *rest)
        die_once(self.session.rank, self.session.round - 1, self.session.steps == 100)


def die_once(rank: int, round: int, due: bool) -> None:
    if due and rank == 1 and round == 1:
        os.kill(os.getpid(), signal.SIGKILL)


lightning_fit.ElasticdCallback = Killed  # type: ignore[misc]
lightning_fit.main()
