"""States of ranks that train on one GPU over NCCL: what a rank saves at a fault, and a save as usual."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.faults.job import SCRIPTS, Fault, Job
from tests.gpu.conftest import StartGpuJob

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STEPS = 60


def digests(run: Job, what: str, rank: int) -> dict[int, set[str]]:
    """Of the rank's state, by step."""
    found: dict[int, set[str]] = {}
    path = run.work / f"{what}-{rank}"
    for line in path.read_text().splitlines() if path.exists() else ():
        _, step, digest = line.split()
        found.setdefault(int(step), set()).add(digest)
    return found


def test_state_saved_at_a_fault_is_that_of_the_step_before(gpu_job: StartGpuJob) -> None:
    """A rank is killed, again one step later, and so is rank 0; then one exits. The survivors wait in NCCL's kernel,
    and their scripts wait for the GPU at each step.
    """
    faults = [Fault(1, 13, "SIGKILL"), Fault(1, 14, "SIGKILL", 2), Fault(0, 27, "SIGKILL"), Fault(1, 45, "exit 3")]
    run = gpu_job(faults, script=SCRIPTS / "donor.py", args=("--steps", str(STEPS)))
    assert run.wait() == 0
    found = [(event["step"], event["reason"]) for event in run.events("resumed")]
    saved = {step for step, reason in found if "after the fault" in reason}
    assert len(saved & {12, 13, 26, 44}) > 2, run.err  # a survivor may be in a launch when the fault is found
    for rank in (0, 1):
        trained, restored = digests(run, "steps", rank), digests(run, "restored", rank)
        assert all(len(each) == 1 for each in trained.values()), "a step was trained twice, with another result"
        # Rank 0's state has the running averages of the rank that saved it.
        both = restored.keys() & trained.keys() - ({26} if rank == 0 else set())
        assert both
        assert {step: restored[step] for step in both} == {step: trained[step] for step in both}


def test_rank_that_is_far_ahead_of_its_gpu_holds_up_no_restart(gpu_job: StartGpuJob) -> None:
    """Its script waits for the GPU at no step: when the fault is found, it waits in a launch, and no copy ends."""
    args = ("--steps", "1000000", "--every", "100", "--ahead")
    run = gpu_job([Fault(1, 360, "SIGKILL")], script=SCRIPTS / "donor.py", args=args)
    resumed, published = run.event("resumed", round=2), run.event("round_published", round=2)
    assert run.event("group_started", round=2)["mono"] - published["mono"] < 1.5, run.err
    assert 300 <= resumed["step"] < 360, resumed
    print(resumed["reason"], *[line for line in run.err.splitlines() if "has not saved" in line])


def test_checkpoint_of_a_gpu_is_what_the_ranks_have(gpu_job: StartGpuJob) -> None:
    """Copied through pinned memory in chunks, of which parameters are parts and multiples."""
    run = gpu_job(script=Path(__file__).parent / "scripts" / "saves.py")
    assert run.wait() == 0
    for step in (1, 2, 3):
        saved = torch.load(run.work / "checkpoints" / f"r1-s{step}" / "state.pt", weights_only=True, map_location="cpu")
        sums = [float(value.double().sum()) for value in saved["model"].values()]
        assert [f"{each:.6g}" for each in sums] == run.file(f"sums-{step}").split()
    for saved in run.events("checkpoint_saved"):
        print(f"{saved['bytes']} bytes: training was blocked for {saved['seconds']:.3f} s")


@pytest.mark.parametrize("name", ["layers", "resnet50", "vit_b_16"])
def test_a_model_in_half_precision_with_a_scaler_goes_on_at_the_fault(gpu_job: StartGpuJob, name: str) -> None:
    """Its script waits for the GPU only where the GradScaler does. A survivor may be in a launch: not each is saved."""
    if name != "layers":
        pytest.importorskip("torchvision")
    kills = [Fault(1, 20, "SIGKILL"), Fault(0, 40, "SIGKILL"), Fault(1, 60, "SIGKILL")]
    run = gpu_job(kills, script=SCRIPTS / "half.py", args=(name,))
    assert run.wait() == 0
    resumed = [event["reason"] for event in run.events("resumed")]
    print(*resumed, sep="\n")
    assert sum("after the fault" in reason for reason in resumed) >= 2, run.err
    assert "cannot save" not in run.err
