"""The sdist and the wheel: complete, accepted by PyPI's checks, the same bytes when they are built again."""

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


def run(*command: str | Path, cwd: Path) -> str:
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=250)
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
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", folder / "tools", "build", cwd=folder)
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


def test_wheel_has_the_man_page_and_absolute_links(built: Path) -> None:
    with zipfile.ZipFile(only(built / "first", "*.whl")) as wheel:
        names = wheel.namelist()
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert [name for name in names if name.endswith("share/man/man1/elasticd.1")]
    assert f"\nVersion: {elasticd.__version__}\n" in metadata
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    pages = {match for link in links if (match := re.match(r"https://elasticd.dev/([\w-]+)/", link))}
    assert [page[1] for page in pages if not (ROOT / "docs" / f"{page[1]}.md").exists()] == []


def test_twine_accepts_it(built: Path) -> None:
    pytest.importorskip("twine")
    files = [*(built / "first").glob("*.whl"), *(built / "first").glob("*.tar.gz")]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=built)


def test_site_has_no_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    run(*build, cwd=ROOT)
    assert (tmp_path / "site" / "quickstart" / "index.html").exists()
    assert "elasticd open" in (tmp_path / "site" / "search" / "search_index.json").read_text()
