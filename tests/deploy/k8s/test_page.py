"""docs/kubernetes.md, run word for word: openssl is the real one, what a cluster would answer is stood in for."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.k8s import manifests
from tests.deploy.k8s.manifests import KUBECTL, PAGE, ROOT, blocks

STOOD_IN = ("kubectl", "podman", "elasticd", "curl", "less", "sleep")


class Checkout:
    """As much of a checkout as the page needs, and what its commands asked."""

    def __init__(self, root: Path) -> None:
        self.root = root / "checkout"
        self.calls_file = root / "calls"
        shutil.copytree(ROOT / "deploy", self.root / "deploy")
        bin_ = root / "bin"
        bin_.mkdir()
        for name in STOOD_IN:
            script = bin_ / name
            program = manifests.__file__.replace("manifests.py", "standin.py")
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" {name} "$@"\n')
            script.chmod(0o755)
        # The real kubectl only renders, if there is one: the stand-in knows where it is.
        self.env = {
            **os.environ,
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'agents'}",
            "STANDIN_CALLS": str(self.calls_file),
            "STANDIN_KUBECTL": KUBECTL or "",
        }

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """With job control, as in the shell of a person: the page stops what it has put into the background."""
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-O", "expand_aliases", "-c", f"set -m\n{script}"],
            cwd=self.root,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=110,
        )

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Somebody has typed all of the page, from the top."""
    made = Checkout(tmp_path_factory.mktemp("page"))
    done = made.run("\n".join(blocks()))
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return made


def test_all_commands_of_the_page_run(followed: Checkout) -> None:
    asked = [call[1:] for call in followed.calls if call[0] == "kubectl"]
    written = [words[1:] for block in blocks() for words in manifests.kubectl_calls(block)]
    assert len(written) >= 20
    for words in written:
        assert [w for w in words if w != "&"] in asked, words


def test_certificates_fit_their_use(followed: Checkout) -> None:
    pki = followed.root / "pki"
    assert (pki.stat().st_mode & 0o777, (pki / "token").stat().st_mode & 0o777) == (0o700, 0o600)
    assert re.fullmatch("[0-9a-f]{64}\n", (pki / "token").read_text())
    for name, purpose in (
        ("etcd", "sslserver"),
        ("etcd", "sslclient"),
        ("etcd-client", "sslclient"),
        ("agent", "sslserver"),
    ):
        subprocess.run(
            ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", pki / "ca.crt", pki / f"{name}.crt"],
            check=True,
            capture_output=True,
        )
        assert (pki / f"{name}.key").stat().st_mode & 0o077 == 0
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(pki / f"{name}.crt", pki / f"{name}.key")
    shown = subprocess.run(
        ["openssl", "verify", "-purpose", "sslserver", "-CAfile", pki / "ca.crt", pki / "etcd-client.crt"],
        capture_output=True,
    )
    assert shown.returncode != 0, "an agent cannot pass for a server"


def test_only_names_sizes_and_addresses_are_left_to_edit() -> None:
    """Whoever adds a place to edit has to say so here, and on the page."""
    found = sorted(
        (str(path.relative_to(manifests.K8S)), line.split("EDIT: ")[1].strip())
        for path in manifests.K8S.rglob("*")
        if path.suffix in (".yaml", ".toml")
        for line in path.read_text().splitlines()
        if "EDIT: " in line
    )
    assert {path for path, _ in found} == {
        "base/checkpoints.yaml",  # the class, the size
        "base/daemonset.yaml",  # how many GPUs, how much shared memory
        "components/host-network/kustomization.yaml",  # the nodes' network
        "components/prometheus/network-policy.yaml",  # the namespace
        "components/prometheus/pod-monitor.yaml",  # the label
        "components/prometheus/rules.yaml",
        "components/rdma/rdma.yaml",  # the adapters' names
        "jobset/jobset.yaml",  # the image, the claim, the queue
        "jobset/queue.yaml",  # the nodes, their quota
        "kubeflow/runtime.yaml",  # the image, the claim
        "overlays/c10d/run.yaml",  # the job
        "overlays/etcd/etcd.yaml",  # the disks' class
        "overlays/external-etcd/agent.toml",  # its addresses
    }
    assert "`grep -rn EDIT deploy/k8s`" in PAGE.read_text()


def test_overlays_and_files_of_the_page_exist() -> None:
    page = PAGE.read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == set(manifests.OVERLAYS)
    for path in re.findall(r"(?:\.\./)?(deploy/[\w./-]+)", page):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\((?!http)([\w./-]+)(?:#\S*)?\)", page):
        assert (ROOT / "docs" / path).exists(), path


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("kubectl -n elasticd exec daemonset/elasticd-agent -- elasticd job", "there is no daemonset/elasticd-agent"),
        ("kubectl apply -k deploy/k8s/overlays/etcd", "nobody has pushed elasticd:0.1.0"),
        ("podman push elasticd:0.1.0; kubectl apply -k deploy/k8s/overlays/etcd", "no node has"),
        (
            "podman push elasticd:0.1.0; kubectl label node gpu-1 elasticd.dev/agent=true; "
            "kubectl apply -k deploy/k8s/overlays/etcd",
            "there is no Secret elasticd-",
        ),
        ("kubectl -n elasticd create secret generic x --from-file=a=none", "there is no namespace"),
        ("kubectl -n elasticd scale daemonset/elasticd-agent", "'scale' is nothing that the page should ask"),
        ("elasticd jobs --agents x", "--agents"),
        ("podman build -f deploy/Containerfile --build-arg VARIENT=cpu .", "no build argument VARIENT"),
    ],
)
def test_fake_cluster_refuses_invalid_commands(tmp_path: Path, script: str, why: str) -> None:
    made = Checkout(tmp_path)
    done = made.run(script)
    assert (done.returncode, why in done.stderr) == (1, True), done.stderr
