"""deploy/Containerfile, built and started: `elasticd run` and the agent in it, with minimal permissions.

The root is read-only, there is no capability, the user is 10001, and whatever is written to is a mount: as
deploy/k8s/ runs it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deploy.podman import REPOSITORY, UID, CannotRun, Container, Podman

PYTHONS = {"bookworm": (3, 11), "trixie": (3, 13)}
"""Debian's own: wheels are made by this interpreter, so it has to be the same."""
FEW_RIGHTS = ["--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
Until = Callable[[Callable[[], object], float], object]

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def sources() -> set[str]:
    """What is to be in the package; listed before it is built, as somebody may be at work here."""
    agents = REPOSITORY / "agents"
    return {str(path.relative_to(agents)) for path in agents.rglob("*") if path.is_file() and path.suffix != ".pyc"}


@pytest.fixture(scope="module")
def podman(sources: set[str]) -> Iterator[Podman]:
    base = REPOSITORY / ".venv" / "booted"
    faulthandler.cancel_dump_traceback_later()  # the first build takes minutes, and nothing is stuck
    try:
        made = Podman(REPOSITORY / ".venv" / "images")
        if not (base / "complete").exists():
            raise CannotRun("there is no small Debian to start from (tests/install-servers system)")
        release = dict(
            line.split("=", 1) for line in (base / "root/etc/os-release").read_text().split("\n") if "=" in line
        )
        if PYTHONS.get(release["VERSION_CODENAME"]) != sys.version_info[:2]:
            raise CannotRun(f"Debian's Python there is not this one, {sys.version.split()[0]}")
        made.build(made.imported(base / "root", base / "complete"), REVISION="abc123")
    except CannotRun as why:
        pytest.skip(f"no image can be built here: {why}")
    yield made
    made("rm", "--all", "--force", "--time=0")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder that is /job in the container, and its user's."""
    folder = tmp_path / "job"
    folder.mkdir()
    shutil.copy(REPOSITORY / "tests/systemd/train.py", folder)
    os.chown(folder, UID, UID)
    return folder


@pytest.fixture
def options(tmp_path: Path, job: Path) -> list[str]:
    written = {"/var/lib/elasticd": tmp_path / "state", "/checkpoints": tmp_path / "checkpoints", "/job": job}
    for folder in written.values():
        folder.mkdir(exist_ok=True)
        os.chown(folder, UID, UID)
    mounts = [f"--volume={here}:{there}" for there, here in written.items()]
    return [
        *FEW_RIGHTS,
        *mounts,
        "--mount=type=tmpfs,destination=/run/elasticd,U=true",
        "--mount=type=tmpfs,destination=/tmp",
        "--shm-size=256m",
        "--network=host",
    ]


def steps(job: Path) -> list[tuple[int, int]]:
    """(step, the pid of rank 0 that made it), of whole lines."""
    try:
        lines = (job / "steps").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [(int(step), int(pid)) for step, pid, _ in map(str.split, lines)]


LOOKS = """
import importlib.util, json, os, pathlib, struct
top = pathlib.Path(importlib.util.find_spec("elasticd_agent").origin).parent.parent
files = [path for name in ("elasticd_agent", "elasticd_daemon") for path in (top / name).rglob("*") if path.is_file()]
sources = [*(path for path in files if path.suffix == ".py"), *(top / "torch" / "nn").rglob("*.py")]
def compiled(source):
    cached = pathlib.Path(importlib.util.cache_from_source(str(source)))
    return cached.exists() and struct.unpack("<I", cached.read_bytes()[8:12])[0] == int(source.stat().st_mtime)
ours = []
for folder, _, names in os.walk("/"):
    if folder.startswith(("/proc", "/sys", "/dev")):
        continue
    for path in [folder, *(os.path.join(folder, name) for name in names)]:
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            continue
        if found.st_uid == os.getuid():
            ours.append(path)
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(json.dumps({
    "uid": [os.getuid(), os.getgid()],
    "not compiled": [str(s) for s in sources if not compiled(s)],
    "sources": len(sources),
    "ours": ours,
    "pip.conf": os.path.exists("/etc/pip.conf"),
    "wheels": os.path.exists("/wheels") and os.listdir("/wheels"),
    "capabilities": status["CapEff"].strip(),
    "home": os.path.expanduser("~"),
    "files": [str(path.relative_to(top)) for path in files],
}))
"""


def test_content(sources: set[str], podman: Podman) -> None:
    (about,) = json.loads(podman("image", "inspect", "localhost/elasticd:test").stdout)
    config = about["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["/usr/bin/tini", "--", "elasticd"]
    assert config["StopSignal"] == "SIGTERM"
    assert "9411/tcp" in config["ExposedPorts"]
    assert config["Labels"]["org.opencontainers.image.revision"] == "abc123"
    assert config["Labels"]["elasticd.variant"] == "cpu"
    assert config["Labels"]["org.opencontainers.image.base.name"].startswith("localhost/debian:")
    history = json.loads(podman("history", "--format=json", "localhost/elasticd:test").stdout)
    sizes = sorted(layer["size"] for layer in history)
    assert sum(sizes) < 1.6e9, sizes
    own = [layer for layer in history if "/wheel/*.whl" in layer["CreatedBy"]]
    assert [layer["size"] < 20e6 for layer in own] == [True], "a change of elasticd is a small layer"

    looked = podman(
        "run", "--rm", "--network=none", "--entrypoint=python", "localhost/elasticd:test", "-c", LOOKS
    ).stdout
    seen = json.loads(looked)
    assert seen["uid"] == [UID, UID]
    assert seen["sources"] > 200 and seen["not compiled"] == []
    assert sorted(seen["ours"]) == ["/checkpoints", "/run/elasticd", "/var/lib/elasticd"]
    assert not seen["pip.conf"] and not seen["wheels"], "how pip was told is nobody's who has the image"
    assert int(seen["capabilities"], 16) == 0, "a user other than root has none, whatever the container may have"
    assert seen["home"] == "/var/lib/elasticd"
    assert sources - set(seen["files"]) == set(), "pages and scripts are in it as well as Python"


def test_elasticd_run_survives_the_kill_of_a_worker(
    podman: Podman, job: Path, options: list[str], until: Until
) -> None:
    words = ["run", "--nproc-per-node=2", "--checkpoint-dir=/checkpoints/run", "/job/train.py", "/job"]
    with podman.container(options, words) as container:
        until(lambda: len(steps(job)) > 30, 90)
        step, rank_0 = steps(job)[-1]
        container.kills(rank_0)
        until(lambda: steps(job)[-1][0] > step + 10, 30)
        assert steps(job)[-1][1] != rank_0
        last = max(step for step, pid in steps(job) if pid == rank_0)
        first_again = next(step for step, pid in steps(job) if pid != rank_0)
        assert 20 < first_again <= last + 1, "from the memory of the other rank, or from the checkpoint"
        (job / "enough").touch()
        assert container.exit_code() == 0, container.said()
        assert "was killed by SIGKILL" in container.said()


def told(container: Container) -> list[dict[str, object]]:
    lines = container.does("cat", "/var/lib/elasticd/logs/events.jsonl", check=False).splitlines()
    return [json.loads(line) for line in lines]


def agents(container: Container) -> list[int]:
    return [int(str(event["pid"])) for event in told(container) if event["kind"] == "agent_started"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_agent_runs_a_job_survives_a_kill_and_drains_on_stop(
    podman: Podman, job: Path, options: list[str], until: Until
) -> None:
    port = free_port()
    (job / "job.toml").write_text(
        'id = "one"\ncommand = ["train.py", "/job"]\nworkdir = "/job"\nworkers = 2\n'
        'checkpoint_dir = "/checkpoints/one"\n'
    )
    (job / "agent.toml").write_text(f'node = "n1"\nslots = 2\n[http]\nport = {port}\n')
    (job / "agent.toml").chmod(0o644)

    def soon(condition: Callable[[], object], seconds: float) -> object:
        try:
            return until(condition, seconds)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{container.said()}") from None

    def answers(route: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{route}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return int(error.code)
        except OSError:
            return 0

    with podman.container(options, ["agent", "--supervised", "--config", "/job/agent.toml"]) as container:
        soon(lambda: answers("/healthz") == 200 or not container.runs(), 60)
        soon(lambda: answers("/readyz") == 200 or not container.runs(), 60)
        assert answers("/healthz") == 200, container.said()
        assert container.does("elasticd", "submit", "/job/job.toml").strip() == "one"
        soon(lambda: len(steps(job)) > 30, 90)
        rank_0 = steps(job)[-1][1]

        (agent,) = agents(container)
        container.kills(agent)
        soon(lambda: len(agents(container)) == 2, 20)
        at = steps(job)[-1][0]
        soon(lambda: answers("/readyz") == 200, 30)
        soon(lambda: steps(job)[-1][0] > at + 10, 20)
        assert {pid for _, pid in steps(job)} == {rank_0}, f"no worker was restarted\n{container.said()}"
        assert json.loads(container.does("elasticd", "jobs", "--json"))["jobs"][0]["state"] == "running"
        page = container.does("elasticd", "dump", "one")
        assert "> main  /job/train.py" in page and "(py-spy)" in page, "stacks need no right to trace others"

        assert container.is_stopped(within_s=60) == 0, container.said()
        assert "SIGTERM: jobs have 60 s to leave this node" in container.said()
        left_at = steps(job)[-1][0]
        container.starts_again()
        soon(lambda: steps(job)[-1][1] != rank_0, 60)
        soon(lambda: steps(job)[-1][0] > left_at + 5, 30)
        every = [step for step, _ in steps(job)]
        assert every == list(range(1, every[-1] + 1)), "no step was lost, none made twice"
        (job / "enough").touch()
        soon(lambda: json.loads(container.does("elasticd", "jobs", "--json"))["jobs"][0]["state"] == "succeeded", 30)
        assert container.is_stopped(within_s=60) == 0, container.said()
