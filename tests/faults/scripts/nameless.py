"""`elasticd run` as a user without an entry in /etc/passwd and without a home, as a container's may be."""

from __future__ import annotations

import os
import pwd
import sys

from elasticd_agent.cli.main import main


def unknown(uid: int) -> pwd.struct_passwd:
    raise KeyError(f"getpwuid(): uid not found: {uid}")


pwd.getpwuid = unknown
for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
    os.environ.pop(name, None)
if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
