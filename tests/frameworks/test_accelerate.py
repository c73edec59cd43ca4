"""What `accelerate config` and the options of `accelerate launch` say reaches the processes of `elasticd run`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from elasticd.integrations.accelerate import ElasticDataLoader

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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--multi_gpu --num_processes 2 --gpu_ids 2,3", {"CUDA_VISIBLE_DEVICES": "2,3", "PET_NPROC_PER_NODE": "2"}),
        ("--num_cpu_threads_per_process 5", {"OMP_NUM_THREADS": "5"}),
        ("--cpu --num_processes 2", {"ACCELERATE_USE_CPU": "True", "PET_NPROC_PER_NODE": "2"}),
        ("--use_megatron_lm --megatron_lm_tp_degree 2", {"MEGATRON_LM_TP_DEGREE": "2"}),
        (
            "--use_deepspeed --zero_stage 3 --num_processes 4 --num_machines 2 --main_process_ip a --machine_rank 1",
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "PET_NNODES": "2"},
        ),
    ],
)
def test_every_variable_is_carried_over(options: str, expected: dict[str, str], tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "elasticd.integrations.accelerate", "--mixed_precision", "no", *options.split()]
    own = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ} | {"HOME": str(tmp_path)}
    printed = subprocess.run(
        [*argv, "--main_process_port", "29876"], env=own, capture_output=True, text=True, timeout=100
    )
    lines = [shlex.split(line)[1].partition("=") for line in printed.stdout.splitlines()]
    assert expected.items() <= {name: value for name, _, value in lines}.items(), printed.stderr


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("before_the_step", [False, True])
def test_epochs_that_are_left_early(tmp_path: Path, before_the_step: bool) -> None:
    """Each step counts once, and a batch that was only seen does not."""
    accelerator = Accelerator(cpu=True)
    x = torch.arange(32.0).view(32, 1)
    loader = ElasticDataLoader(accelerator, DataLoader(TensorDataset(x, x), batch_size=4), directory=tmp_path)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-4))
    trained = []
    for epoch in loader.epochs(3):
        next(iter(loader))
        for x, y in loader:
            if before_the_step and loader.sampler.offset >= 12:
                break
            accelerator.backward(((model(x) - y) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()
            trained.append((epoch, *x.flatten().tolist()))
            if len(trained) % 3 == 0 and not before_the_step:
                break
    session = loader.session
    session.close()
    assert trained == [(epoch, *range(at, at + 4)) for epoch in range(3) for at in (0, 4, 8)]
    assert session.steps == 9


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("registered", [False, True])
def test_state_that_only_hooks_save(tmp_path: Path, caplog: pytest.LogCaptureFixture, registered: bool) -> None:
    """Such as the averaged weights of diffusers' scripts."""
    accelerator = Accelerator(cpu=True)
    accelerator.register_save_state_pre_hook(lambda *_: None)
    if registered:
        accelerator.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1)))
    loader = ElasticDataLoader(accelerator, DataLoader(torch.zeros(4, 1), batch_size=4), directory=tmp_path)
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-4))
    next(iter(loader))
    loader.session.close()
    assert ("register_save_state_pre_hook() are not called" in caplog.text) == (not registered)
