"""deploy/requirements.txt: what `make lock` writes, in step with pyproject.toml and constraints.txt."""

from __future__ import annotations

import re
import sys

import pytest

from tests.faults.job import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = re.compile(r"[A-Za-z0-9_.-]+")


def pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


@pytest.mark.parametrize("name", ["Containerfile", "systemd/install.sh"])
def test_deployments_install_it_first(name: str) -> None:
    text = (REPOSITORY / "deploy" / name).read_text()
    first, *_ = re.findall(r"^[^#\n]*pip (?:install|wheel) (.*)", text, re.MULTILINE)
    assert re.search(r"--require-hashes -r \S*requirements\.txt", first)


def test_every_dependency_but_torch_is_pinned_with_hashes() -> None:
    text = (REPOSITORY / "deploy" / "requirements.txt").read_text()
    locked, known = pins(text), pins((REPOSITORY / "constraints.txt").read_text())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = {NAME.match(one)[0].lower() for one in project["dependencies"] if "python_version <" not in one}  # type: ignore[index]
    assert needed - locked.keys() == {"torch"}, "make lock"
    assert {name: version for name, version in locked.items() if known.get(name, version) != version} == {}, "make lock"
    for block in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE):
        assert "==" not in block or "--hash=sha256:" in block, block


def test_what_builds_the_wheel_is_pinned_with_hashes() -> None:
    locked = (REPOSITORY / "deploy" / "build-requirements.txt").read_text()
    needed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    names = {NAME.match(one)[0].lower() for one in needed} | {"build"}  # type: ignore[index]
    assert names <= pins(locked).keys(), "make lock"
    known = pins((REPOSITORY / "constraints.txt").read_text())
    assert {name: version for name, version in pins(locked).items() if known.get(name, version) != version} == {}
    for name in ("deploy/Containerfile", "deploy/systemd/install.sh", ".github/workflows/release.yml"):
        text = (REPOSITORY / name).read_text()
        assert re.search(r"pip install .*--require-hashes -r \S*build-requirements\.txt", text), name
        assert "--no-build-isolation" in text or "--no-isolation" in text, name


def test_installer_takes_no_name_of_an_index() -> None:
    """Whoever registers a name decides what it installs."""
    text = (REPOSITORY / "deploy" / "systemd" / "install.sh").read_text()
    assert set(re.findall(r"\bfrom=(\S*)", text)) == {"''", "$here/../.."}


def test_workflows_use_actions_by_their_commits() -> None:
    """Their owners can move tags; a workflow of this repository ("./…") comes with the commit that names it."""
    found = [path.read_text() for path in (REPOSITORY / ".github" / "workflows").glob("*.yml")]
    used = re.findall(r"uses: *(.*)", "".join(found))
    assert len(used) > 5
    assert [one for one in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+|\./\S+", one)] == []
