"""`python -m elasticd_agent` is the command `elasticd`, for where it is not on the path."""

from __future__ import annotations

import sys

from elasticd_agent.cli.main import main

sys.exit(main())
