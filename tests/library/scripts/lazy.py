"""What elasticd's modules import besides: no torch where a script may not have imported it, else no compiler."""

from __future__ import annotations

import json
import subprocess
import sys

COMPILER = "torch._dynamo"
SHOW = "print([name for name in {} if name in sys.modules])"
IMPORTS = f"import sys, elasticd.sampler, elasticd.process_group; {SHOW.format(['torch', 'numpy', COMPILER])}"
SESSION_AND_HOOK = f"""
import sys, elasticd.session
from elasticd.heartbeat import optimizer_hook, record as heartbeat
optimizer_hook.install_optimizer_hook(heartbeat.NullHeartbeat())
{SHOW.format([COMPILER])}
"""


def run(script: str) -> object:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.replace("'", '"'))


sys.stdout.write(json.dumps({"import": run(IMPORTS), "session and hook": run(SESSION_AND_HOOK)}) + "\n")
