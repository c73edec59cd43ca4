"""What elasticd's modules import besides: no torch where a script may not have imported it, else no torch._dynamo."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = "('torch', 'numpy', 'torch._dynamo')"
IMPORTS = f"import sys, elasticd.sampler, elasticd.process_group; print([m for m in {HEAVY} if m in sys.modules])"
SESSION = "import sys, elasticd.session; print([m for m in ['torch._dynamo'] if m in sys.modules])"
HOOK = """
import sys
import torch
from elasticd.heartbeat import optimizer_hook, record as heartbeat
before = 'torch._dynamo' in sys.modules
optimizer_hook.install_optimizer_hook(heartbeat.NullHeartbeat())
print(['torch._dynamo'] if 'torch._dynamo' in sys.modules and not before else [])
"""


def run(script: str) -> object:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.replace("'", '"'))


sys.stdout.write(json.dumps({"import": run(IMPORTS), "session": run(SESSION), "hook": run(HOOK)}) + "\n")
