"""The launchers that are compared, and how each starts the same script.

torchrun appears twice: with its defaults, and at its best. By default it shares the agent's store with the workers, and
a restarted gloo group then often reads the dead group's addresses and stalls; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
keeps the stores apart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ComparedLauncher:
    """A way to start workers on this machine: its command and the environment it needs."""

    name: str
    title: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, script: str, workers: int, *args: str) -> list[str]:
        return [*self.command, "--nproc-per-node", str(workers), script, *args]

    def full_environment(self) -> dict[str, str]:
        """The same for all launchers, and what each would set by itself; set here so that torchrun does not warn."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        # Or a launcher run from a checkout would compile itself at every start, and an installed one would not.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return environment


ELASTICD = ComparedLauncher(
    "elasticd",
    "elasticd",
    # More restarts than anything here needs: a restart is measured, not the budget.
    (sys.executable, "-m", "elasticd_agent", "run", "--standalone", "--max-restarts", "1000"),
)
TORCHRUN = ComparedLauncher(
    "torchrun",
    "torchrun, defaults",
    (sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "100"),
)
TORCHRUN_TUNED = ComparedLauncher(
    "torchrun_tuned",
    "torchrun, at its best",
    TORCHRUN.command,
    {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
)
ALL = (ELASTICD, TORCHRUN, TORCHRUN_TUNED)
