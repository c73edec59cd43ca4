"""The version of a package, from where an interpreter would look for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elasticd_agent.system.python_packages import installed_version

SITE = "lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ((f"{SITE}/torch-2.13.0+cpu.dist-info",), (2, 13)),
        ((f"{SITE}/torch-2.7.1.dist-info", f"{SITE}/torch_geometric-2.9.0.dist-info"), (2, 7)),
        (("lib/python3/dist-packages/torch-2.6.0a0+git1.egg-info",), (2, 6)),
        ((f"{SITE}/torch-2.13.0.dist-info", "mine/torch-2.8.0.dist-info"), (2, 8)),
        ((f"{SITE}/torchvision-0.28.0.dist-info",), None),
        ((), None),
    ],
)
def test_version_by_directory(tmp_path: Path, installed: tuple[str, ...], found: tuple[int, int] | None) -> None:
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.touch(0o755)
    for name in installed:
        (tmp_path / name).mkdir(parents=True)
    environ = {"PATH": str(python.parent), "PYTHONPATH": str(tmp_path / "mine")}
    assert installed_version("torch", str(python), environ) == found
    assert installed_version("torch", "python3", environ) == found


def test_version_of_this_torch() -> None:
    import torch

    major, minor, *_ = torch.__version__.split(".")
    assert installed_version("torch", sys.executable, {}) == (int(major), int(minor))
