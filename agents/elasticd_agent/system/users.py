"""Users by name. In a container a uid need not have one."""

from __future__ import annotations

import os
import pwd


def user_name() -> str:
    """The name of this process's user; its number if it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
