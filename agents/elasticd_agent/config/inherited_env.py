"""What a job's processes inherit of the daemon's environment, and what they get instead.

It exists so that a job sees neither what configures the daemon and its service manager, nor the daemon's own Python
paths, and so that the job's PATH or LD_LIBRARY_PATH never reaches the daemon's interpreter. It reads the user table.
"""

from __future__ import annotations

import pwd
import re
from collections.abc import Mapping

from elasticd.errors import UsageError

SET_BY_ELASTICD = re.compile(
    "(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|ELASTICD_.*|PYTHON_EXEC|PET_.*"
)
"""Variables of workers and of `elasticd run`: never a job's own."""
_SET_FOR_THE_DAEMON = re.compile(
    "PYTHON.*|VIRTUAL_ENV.*|CONDA_.*|NOTIFY_SOCKET|WATCHDOG_.*|LISTEN_.*|INVOCATION_ID|JOURNAL_STREAM|MAINPID|MANAGERPID"
    "|SYSTEMD_.*|MEMORY_PRESSURE_.*|(CREDENTIALS|RUNTIME|STATE|CACHE|LOGS|CONFIGURATION)_DIRECTORY|SUDO_.*|SSH_.*"
    "|XDG_.*|TERM|PWD|OLDPWD|SHLVL|_"
)
"""Variables of the agent's interpreter, of systemd, and of the shell that started it."""


def job_environment(daemon_env: Mapping[str, str], job_env: Mapping[str, str], user: str | None) -> dict[str, str]:
    """What all processes of a job start from: the machine's settings, then the user's home, then the job's own.

    Raises UsageError when there is no such user.
    """
    env = {
        name: value
        for name, value in daemon_env.items()
        if not SET_BY_ELASTICD.fullmatch(name) and not _SET_FOR_THE_DAEMON.fullmatch(name)
    }
    if user is not None:
        try:
            entry = pwd.getpwnam(user)
        except KeyError:
            raise UsageError(f"user: {user!r} does not exist on this machine; create it, or name another") from None
        env |= {"HOME": entry.pw_dir, "USER": user, "LOGNAME": user, "SHELL": entry.pw_shell or "/bin/sh"}
    return {**env, **job_env}
