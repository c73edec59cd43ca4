"""What `accelerate config` and the options of `accelerate launch` say reaches the processes of `elasticd run`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_processes: 2
num_machines: 1
machine_rank: 0
mixed_precision: bf16
use_cpu: true
dynamo_config:
  dynamo_backend: EAGER
"""
SEEN = """
from accelerate import Accelerator
own = Accelerator()
print(own.mixed_precision, own.state.dynamo_plugin.backend.value, own.device.type)
"""


@pytest.mark.parametrize(("options", "seen"), [([], "bf16 EAGER cpu"), (["--mixed_precision", "no"], "no EAGER cpu")])
def test_environment_is_carried_over(tmp_path: Path, options: list[str], seen: str) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    argv = [sys.executable, "-m", "elasticd.integrations.accelerate", "--config_file", str(tmp_path / "config.yaml")]
    own = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    printed = subprocess.run([*argv, *options], env=own, capture_output=True, text=True, timeout=100)
    assert printed.returncode == 0, printed.stderr
    lines = [shlex.split(line) for line in printed.stdout.splitlines()]
    assert {words[0] for words in lines} == {"export"} and all(len(words) == 2 for words in lines)
    carried = dict(words[1].split("=", 1) for words in lines)
    ran = subprocess.run(
        [sys.executable, "-c", SEEN], env={**own, **carried}, capture_output=True, text=True, timeout=100
    )
    assert ran.stdout.strip() == seen, ran.stderr
