"""What importing elasticd, and installing the optimizer hook, import besides: nothing that costs a second."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = "('torch', 'numpy', 'torch._dynamo')"
IMPORTS = f"import sys, elasticd.session, elasticd.sampler; print([m for m in {HEAVY} if m in sys.modules])"
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


sys.stdout.write(json.dumps({"import": run(IMPORTS), "hook": run(HOOK)}) + "\n")
