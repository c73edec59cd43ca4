"""What elasticd's modules import besides: no torch where a script may not have imported it, else no compiler."""

from __future__ import annotations

import json
import subprocess
import sys

COMPILER = "torch._dynamo"
SHOW = "print([name for name in {} if name in sys.modules])"
IMPORTS = f"import sys, elasticd.sampler, elasticd.process_group; {SHOW.format(['torch', 'numpy', COMPILER])}"
SESSION = f"import sys, elasticd.session; {SHOW.format([COMPILER])}"
HOOK = f"""
import sys
import torch
from elasticd.heartbeat import optimizer_hook, record as heartbeat
before = set(sys.modules)
optimizer_hook.install_optimizer_hook(heartbeat.NullHeartbeat())
{SHOW.format([COMPILER]).replace("sys.modules", "sys.modules.keys() - before")}
"""


def run(script: str) -> object:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.replace("'", '"'))


sys.stdout.write(json.dumps({"import": run(IMPORTS), "session": run(SESSION), "hook": run(HOOK)}) + "\n")
