"""The trial of a job that is not submitted yet, to see whether this node would refuse it: the checks of its runner,
as the job's user.

They run in a process of their own, since the file systems of a job may never answer.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace

from elasticd.errors import ElasticdError, UsageError
from elasticd_agent.system.bounded_io import DeadlineExceeded, run_within
from elasticd_daemon.records import Submission
from elasticd_daemon.runners.reconcile import RunnerStart
from elasticd_daemon.runners.spawn import Account, SpecBuilder, name_to_become, own_command, runner_environment
from elasticd_daemon.runners.spec import RunnerSpec

TRIAL_TIMEOUT_S = 20.0
"""A busy node takes seconds to start a process; a dead file system never answers."""
REFUSED = 2
"""The exit code of `elasticd try-job`, main.py."""


class TrialFailed(ElasticdError):
    """The check itself ended, e.g. killed for lack of memory: it says nothing of the job."""


def refusal(specs: SpecBuilder, submission: Submission) -> str:
    """Why this node would refuse the job, in one sentence; "" if it would not. Raises
    DeadlineExceeded, TrialFailed.
    """
    spec = replace(specs.build(RunnerStart(submission, tuple(range(submission.min_slots)))), tls=False)
    try:
        account = specs.account(spec)
        return run_within(TRIAL_TIMEOUT_S, lambda: _ask_process(spec, account), account.name)
    except UsageError as error:
        return str(error)
    except (DeadlineExceeded, subprocess.TimeoutExpired):
        raise DeadlineExceeded(f"its check did not end within {TRIAL_TIMEOUT_S:g} s") from None


def _ask_process(spec: RunnerSpec, account: Account) -> str:
    done = subprocess.run(
        [*own_command(), "try-job", name_to_become(account)],
        input=spec.to_json(),
        capture_output=True,
        cwd="/",
        env=runner_environment(account),
        timeout=TRIAL_TIMEOUT_S,
    )
    if done.returncode == 0:
        return ""
    refused = done.returncode == REFUSED
    lines = (done.stdout if refused else done.stderr).decode(errors="replace").split("\n")
    reason = next((line for line in reversed(lines) if line.strip()), "")
    if refused and reason:
        return reason
    raise TrialFailed(f"its check ended with code {done.returncode}" + (f": {reason}" if reason else ""))
