"""deploy/k8s/kubeflow and deploy/k8s/jobset: by the published schemas, and run as the kubelet would start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_cluster_training_runtime import TrainerV1alpha1ClusterTrainingRuntime
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from tests.deploy.k8s.manifests import K8S, Object
from tests.etcd import free_ports
from tests.faults.job import until

KINDS = {
    "kubeflow/runtime.yaml": TrainerV1alpha1ClusterTrainingRuntime,
    "kubeflow/trainjob.yaml": TrainerV1alpha1TrainJob,
    "jobset/jobset.yaml": JobsetV1alpha2JobSet,
}


def manifest(path: str) -> Object:
    found: Object = yaml.safe_load((K8S / path).read_text())
    return found


def jobs(path: str) -> dict[str, Any]:
    """The replicated jobs of the JobSet, by name."""
    spec = manifest(path)["spec"]
    spec = spec["template"]["spec"] if "template" in spec else spec
    return {one["name"]: one["template"] for one in spec["replicatedJobs"]}


@pytest.mark.parametrize("path", KINDS)
def test_manifest_fits_the_published_schema(path: str) -> None:
    """Without a field that the schema does not know: the model drops those."""
    wanted = manifest(path)
    assert KINDS[path].from_dict(wanted).to_dict() == wanted


@pytest.mark.parametrize("path", ["kubeflow/runtime.yaml", "jobset/jobset.yaml"])
@pytest.mark.parametrize("name", ["store", "node"])
def test_job_fits_kubernetes_schema(path: str, name: str) -> None:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": jobs(path)[name]["spec"]}
    kubernetes_validate.validate(job, "1.34", strict=True)


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print("of", int(ones), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.system
@pytest.mark.parametrize("path", ["kubeflow/runtime.yaml", "jobset/jobset.yaml"])
def test_pods_train_together(path: str, tmp_path: Path) -> None:
    """A store and two nodes, with the variables that Trainer and the kubelet set; only addresses and paths differ."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (port,) = free_ports(1)
    trainer = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "sample-node-0-0.sample"}
    given = {**trainer, "PET_MASTER_PORT": "29400", "JOBSET": "sample", "POD_IP": "127.0.0.1"}

    def start(name: str, node: int = 0) -> subprocess.Popen[bytes]:
        (container,) = jobs(path)[name]["spec"]["template"]["spec"]["containers"]
        env = {**given, "PET_NODE_RANK": str(node)} if name == "node" else {}
        texts = [*container.get("command", ["elasticd"]), *container["args"]]
        words = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], text) for text in texts]
        words = [word.replace("sample-store-0-0.sample:29400", f"127.0.0.1:{port}") for word in words]
        words = [word.replace("29400", str(port)).replace("/checkpoints", str(tmp_path)) for word in words]
        words = [word.replace("--nproc-per-node=8", "--nproc-per-node=1").replace("=1:4", "=1:2") for word in words]
        command = [sys.executable, "-m", "elasticd_agent", *words[1:]]
        with (tmp_path / f"{name}-{node}.log").open("w") as log:
            return subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=subprocess.STDOUT)

    pods = [start("store"), start("node", 0), start("node", 1)]
    try:
        until(lambda: all(pod.poll() is not None for pod in pods[1:]), "the nodes to end", 150.0)
        said = [path.read_text() for path in sorted(tmp_path.glob("node-*.log"))]
        assert [pod.returncode for pod in pods[1:]] == [0, 0], said
        assert all("of 2" in text for text in said), said
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
