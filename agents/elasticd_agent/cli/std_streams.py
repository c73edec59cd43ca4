"""Standard input, output and error are there, whatever closed them before us (`2>&-`, some init systems).

It exists because the next file that is opened gets the lowest free number: a lock, a socket or the store's connection
as descriptor 2 would be written to by whoever complains, and Python has no sys.stderr then. It touches no open one.
"""

from __future__ import annotations

import os
import sys


def ensure() -> None:
    """Open /dev/null for those of the three that are closed. To be called before any other file is opened."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:  # somebody has taken an earlier number meanwhile
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False))  # noqa: SIM115 for good
