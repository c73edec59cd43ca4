"""The sdist and the wheel: complete, accepted by PyPI's checks, the same bytes when built again; pipx installs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import elasticd

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def run(*command: str | Path, cwd: Path, within: float = 250.0) -> str:
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=within)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of what is under version control, and a wheel that is built from the unpacked sdist, twice."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    source.mkdir()
    archive = folder / "head.tar"
    run("git", "archive", "--output", archive, run("git", "stash", "create", cwd=ROOT).strip() or "HEAD", cwd=ROOT)
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", folder / "tools", "build", "pipx", cwd=folder)
    os.environ["PYTHONPATH"] = str(folder / "tools")
    try:
        for out in ("first", "second"):
            run(sys.executable, "-m", "build", "--outdir", folder / out, source, cwd=folder)
    finally:
        del os.environ["PYTHONPATH"]
    return folder


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_builds_are_reproducible(built: Path) -> None:
    for pattern in ("*.whl", "*.tar.gz"):
        assert only(built / "first", pattern).read_bytes() == only(built / "second", pattern).read_bytes(), pattern


def test_sdist_is_complete(built: Path) -> None:
    with tarfile.open(only(built / "first", "*.tar.gz")) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    listed = {name for name in run("git", "ls-files", cwd=ROOT).splitlines() if not name.startswith(".ci/")}
    assert sorted(listed - packed) == []


def test_tests_pass_from_the_sdist(built: Path, tmp_path: Path) -> None:
    with tarfile.open(only(built / "first", "*.tar.gz")) as tar:
        tar.extractall(tmp_path, filter="data")
    source = only(tmp_path, "elasticd-*")
    pytest_there = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run(*pytest_there, "--collect-only", cwd=source)
    own = f"import elasticd\n\n\ndef test_own() -> None:\n    assert elasticd.__file__.startswith({str(source)!r})\n"
    (source / "tests" / "model" / "test_own.py").write_text(own)
    run(*pytest_there, "tests/model", "tests/config", "tests/job", "tests/library/test_sampler.py", cwd=source)


@pytest.mark.timeout(600)
def test_pipx_installs_it(built: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    say = "sys.stdout.write(f'rank {elasticd.init().rank}\\n')"  # at once: print() writes in parts
    script.write_text(f"import sys, torch, elasticd\n{say}\n")
    places = {"PIPX_HOME": tmp_path / "pipx", "PIPX_BIN_DIR": tmp_path / "bin", "PIPX_MAN_DIR": tmp_path / "man"}
    variables = [f"{name}={place}" for name, place in places.items()]
    pipx = ["env", f"PYTHONPATH={built / 'tools'}", *variables, sys.executable, "-m", "pipx", "install"]
    run(*pipx, only(built / "first", "*.whl"), "--pip-args", f"-c {ROOT / 'constraints.txt'}", cwd=tmp_path, within=550)
    elasticd_there = tmp_path / "bin" / "elasticd"
    assert elasticd.__version__ in run(elasticd_there, "--version", cwd=tmp_path)
    assert (tmp_path / "man" / "man1" / "elasticd.1").exists()
    out = run(elasticd_there, "run", "--nproc-per-node", "2", script, cwd=tmp_path)
    assert {"rank 0", "rank 1"} <= set(out.splitlines())


def test_wheel_has_the_pages_and_absolute_links(built: Path) -> None:
    with zipfile.ZipFile(only(built / "first", "*.whl")) as wheel:
        names = wheel.namelist()
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert [name for name in names if name.endswith("share/man/man1/elasticd.1")]
    pages = {name.removeprefix("elasticd_agent/docs/") for name in names if name.startswith("elasticd_agent/docs/")}
    assert pages == {path.name for path in (ROOT / "docs").glob("*.md")}
    assert f"\nVersion: {elasticd.__version__}\n" in metadata
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_twine_accepts_it(built: Path) -> None:
    pytest.importorskip("twine")
    files = [*(built / "first").glob("*.whl"), *(built / "first").glob("*.tar.gz")]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=built)


def test_site_has_no_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    run(*build, cwd=ROOT)
    assert (tmp_path / "site" / "quickstart" / "index.html").exists()
    assert "ElasticBatchSampler.loss_scale" in (tmp_path / "site" / "api" / "index.html").read_text()
    assert "elasticd open" in (tmp_path / "site" / "search" / "search_index.json").read_text()
