"""What renders where there is no kubectl renders what kubectl does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.k8s import kustomize
from tests.deploy.k8s.manifests import K8S, KUBECTL, OVERLAYS, rendered

EVERY = (*(f"overlays/{name}" for name in OVERLAYS), "sample-job")


def plain(objects: list[kustomize.Object]) -> dict[tuple[str, str], Any]:
    """By kind and name, without the hashes, which differ."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: bare(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [bare(inner) for inner in value]
        return re.sub(r"^(elasticd-agent)-[0-9a-z]{10}$", r"\1", value) if isinstance(value, str) else value

    found = bare(objects)
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


@pytest.mark.skipif(KUBECTL is None, reason="no kubectl here to compare with")
@pytest.mark.parametrize("path", EVERY)
def test_renders_the_same_as_kubectl(path: str) -> None:
    ours, theirs = plain(kustomize.build(K8S / path)), plain(list(rendered(path)))
    assert set(ours) == set(theirs)
    for who in theirs:
        assert ours[who] == theirs[who], who


def test_unknown_fields_are_refused(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("namePrefix: x-\n")
    with pytest.raises(NotImplementedError, match="namePrefix"):
        kustomize.build(tmp_path)
