"""What every worker loads by path: the job's interpreter need not have elasticd, nor another package."""

from __future__ import annotations

import json
import subprocess
import sys

from elasticd_agent.system.installation import library_file, program
from elasticd_agent.workers.launcher.requests import LIBRARY_MODULES

LOAD = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_template", sys.argv[1])
template = importlib.util.module_from_spec(spec)
spec.loader.exec_module(template)
print(*template.load_library(json.loads(sys.argv[2])))
"""


def test_library_loads_where_nothing_is_installed() -> None:
    paths = json.dumps({name: library_file(name) for name in LIBRARY_MODULES})
    command = [sys.executable, "-I", "-S", "-c", LOAD, program("template"), paths]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert ended.stdout.split() == list(LIBRARY_MODULES), ended.stderr
