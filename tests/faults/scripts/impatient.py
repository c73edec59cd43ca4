"""Runs `elasticd run` with ceilings of a second and a half, which no flag sets: they are minutes for a reason."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from elasticd_agent.config.run_options import parse_run
from elasticd_agent.job.run import run_job


def main() -> int:
    spec, policy, settings = parse_run(sys.argv[1:], os.environ, Path.cwd())
    quick = {"startup_ceiling_s": 1.5, "first_step_ceiling_s": 1.5, "progress_ceiling_s": 1.5}
    return run_job(spec, replace(policy, **quick), settings)


if __name__ == "__main__":
    sys.exit(main())
