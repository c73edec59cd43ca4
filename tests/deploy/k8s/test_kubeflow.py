"""deploy/k8s/kubeflow and deploy/k8s/jobset: by the published schemas, and run as the kubelet would start them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.k8s.manifests import K8S, ROOT, Object
from tests.etcd import free_ports
from tests.faults.job import until

KINDS = {
    "kubeflow/runtime.yaml": "TrainerV1alpha1ClusterTrainingRuntime",
    "kubeflow/trainjob.yaml": "TrainerV1alpha1TrainJob",
    "jobset/jobset.yaml": "JobsetV1alpha2JobSet",
}


def manifest(path: str) -> Object:
    found: Object = yaml.safe_load((K8S / path).read_text())
    return found


def jobs(path: str) -> dict[str, Any]:
    """The replicated jobs of the JobSet, by name."""
    spec = manifest(path)["spec"]
    spec = spec["template"]["spec"] if "template" in spec else spec
    return {one["name"]: one["template"] for one in spec["replicatedJobs"]}


def fits(model: str, wanted: Object) -> bool:
    """`model` of the trainer's package, whose import takes a second, and all workers of pytest collect this file."""
    from kubeflow_trainer_api import models

    return bool(getattr(models, model).from_dict(wanted).to_dict() == wanted)


@pytest.mark.parametrize("path", KINDS)
def test_manifest_fits_the_published_schema(path: str) -> None:
    """Without a field that the schema does not know: the model drops those."""
    wanted = manifest(path)
    assert fits(KINDS[path], wanted)


@pytest.mark.parametrize("path", ["kubeflow/runtime.yaml", "jobset/jobset.yaml"])
@pytest.mark.parametrize("name", ["store", "node"])
def test_job_fits_kubernetes_schema(path: str, name: str) -> None:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": jobs(path)[name]["spec"]}
    kubernetes_validate.validate(job, "1.34", strict=True)


def snippet(words: str) -> dict[str, Any]:
    """The example of the page that has these words."""
    page = (ROOT / "docs" / "kubeflow.md").read_text()
    (found,) = [text for text in re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if words in text]
    values: dict[str, Any] = yaml.safe_load(found)
    return values


@pytest.mark.parametrize("path", ["kubeflow/runtime.yaml", "jobset/jobset.yaml"])
def test_restart_rule_of_the_page_fits_and_leaves_the_end_of_the_job_to_its_policy(path: str) -> None:
    spec, rule = jobs(path)["node"]["spec"], snippet("restartPolicyRules")
    (container,) = spec["template"]["spec"]["containers"]
    container |= rule
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": spec}
    for version in ("1.35", "1.37"):
        kubernetes_validate.validate(job, version, strict=True)
    (ended,) = [one["onExitCodes"]["values"] for one in spec["podFailurePolicy"]["rules"] if one["action"] == "FailJob"]
    assert rule["restartPolicyRules"][0]["exitCodes"] == {"operator": "NotIn", "values": [0, *ended]}


def test_in_place_restart_of_the_page_fits_the_schema() -> None:
    """With what JobSet's webhook asks of each replicated job."""
    wanted = manifest("jobset/jobset.yaml")
    wanted["spec"] |= snippet("InPlaceRestart")
    for one in wanted["spec"]["replicatedJobs"]:
        spec = one["template"]["spec"]
        size = spec.get("parallelism", 1)
        spec |= {"backoffLimit": 2**31 - 1, "podReplacementPolicy": "Failed", "parallelism": size, "completions": size}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": one["name"]}, "spec": spec}
        kubernetes_validate.validate(job, "1.37", strict=True)
    assert fits("JobsetV1alpha2JobSet", wanted)


SCRIPT = """
import pathlib, time
import torch, elasticd
session = elasticd.init()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
session.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.01)).restore()
session.checkpoint(every=10)
while not session.should_stop:
    model(torch.ones(1, 4)).sum().backward()
    session.step()
    print("of", session.world_size, flush=True)
    ends = torch.tensor(float(pathlib.Path(__file__).with_name("end").exists()))
    torch.distributed.broadcast(ends, 0)
    if ends:
        break
    time.sleep(0.1)
session.close()
"""
Start = Callable[[str, int], subprocess.Popen[bytes]]


@contextlib.contextmanager
def running(path: str, work: Path) -> Iterator[Start]:
    """Starts a pod's container as the kubelet would, with Trainer's variables; only addresses and paths differ."""
    (work / "train.py").write_text(SCRIPT)
    (port,) = free_ports(1)
    trainer = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "sample-node-0-0.sample"}
    given = {**trainer, "PET_MASTER_PORT": "29400", "JOBSET": "sample", "POD_IP": "127.0.0.1"}
    pods: list[subprocess.Popen[bytes]] = []

    def start(name: str, node: int) -> subprocess.Popen[bytes]:
        (container,) = jobs(path)[name]["spec"]["template"]["spec"]["containers"]
        env = {**given, "PET_NODE_RANK": str(node)} if name == "node" else {}
        texts = [*container.get("command", ["elasticd"]), *container["args"]]
        words = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], text) for text in texts]
        words = [word.replace("sample-store-0-0.sample:29400", f"127.0.0.1:{port}") for word in words]
        words = [word.replace("29400", str(port)).replace("/checkpoints", str(work)) for word in words]
        words = [word.replace("--nproc-per-node=8", "--nproc-per-node=1").replace("=1:4", "=1:2") for word in words]
        command = [sys.executable, "-m", "elasticd_agent", *words[1:]]
        with (work / f"{name}-{node}.log").open("a") as log:
            pods.append(subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=subprocess.STDOUT))
        return pods[-1]

    try:
        start("store", 0)
        yield start
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()


def told(work: Path, node: int) -> str:
    return (work / f"node-{node}.log").read_text()


@pytest.mark.system
@pytest.mark.parametrize("path", ["kubeflow/runtime.yaml", "jobset/jobset.yaml"])
def test_pods_train_together(path: str, tmp_path: Path) -> None:
    with running(path, tmp_path) as start:
        pods = [start("node", node) for node in (0, 1)]
        until(lambda: all("of 2" in told(tmp_path, node) for node in (0, 1)), "both nodes to train", 150.0)
        (tmp_path / "end").touch()
        assert [pod.wait(60) for pod in pods] == [0, 0], told(tmp_path, 0) + told(tmp_path, 1)


@pytest.mark.system
def test_killed_container_is_restarted_in_its_pod_and_the_other_is_not(tmp_path: Path) -> None:
    """As by the restart rule of the page, when memory was short."""
    values = snippet("restartPolicyRules")["restartPolicyRules"][0]["exitCodes"]["values"]
    with running("jobset/jobset.yaml", tmp_path) as start:
        other, killed = start("node", 0), start("node", 1)
        until(lambda: all("of 2" in told(tmp_path, node) for node in (0, 1)), "both nodes to train", 150.0)
        killed.kill()
        assert killed.wait() not in values
        until(lambda: "of 1" in told(tmp_path, 0), "the other node to continue", 60.0)
        before = told(tmp_path, 1)
        again = start("node", 1)
        until(lambda: "of 2" in told(tmp_path, 1).removeprefix(before), "the node to join", 150.0)
        (tmp_path / "end").touch()
        assert [pod.wait(60) for pod in (other, again)] == [0, 0], told(tmp_path, 0) + told(tmp_path, 1)
