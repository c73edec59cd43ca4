"""200 kills in a row in one elasticd job, none lost or stuck: `make soak`. Exit code 1 if one was."""

from __future__ import annotations

import sys

from benchmarks.recovery import main

if __name__ == "__main__":
    sys.exit(main(["--kills", "200", *sys.argv[1:]]))
