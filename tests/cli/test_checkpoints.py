"""`elasticd checkpoints` lists, describes, checks and prunes a directory, and leaves one that is in use alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from elasticd.checkpointing.storage.atomic_write import discard_checkpoint
from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.checkpointing.storage.lineage import Entry
from elasticd.checkpointing.storage.retention import set_aside
from elasticd_agent.cli import checkpoints as command
from elasticd_agent.cli.main import main
from tests.library import checkpoints


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for step in (10, 20, 30, 40):
        state = {"model": {"weight": torch.full((64,), float(step))}}
        checkpoints.save(tmp_path, round=1, step=step, parent=None, world_size=2, job="lm", run="one", state=state)
    return tmp_path


def damage(directory: Path, name: str) -> None:
    path = directory / name / "state.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def test_list_names_what_can_be_restored_and_why_the_rest_cannot(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "r1-s20" / "manifest.json").write_text("{}")
    set_aside(directory, 30)
    assert main(["checkpoints", "list", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["r1-s30", "r1-s20", "r1-s10", "r1-s40.aside"]
    assert [line.endswith("can be restored") for line in lines] == [True, False, True, False]
    assert lines[-1].endswith("set aside by session.restore(step=…)")
    assert main(["checkpoints", "list", str(directory), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["step"], bool(row["why"])) for row in rows] == [(30, False), (20, True), (10, False), (40, True)]


def test_show_prints_the_manifest(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "show", str(directory)]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 40
    assert main(["checkpoints", "show", str(directory), "r1-s20"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 20


def test_verify_reads_every_byte(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "verify", str(directory)]) == 0
    assert capsys.readouterr().out.count(": whole") == 4
    damage(directory, "r1-s30")
    assert main(["checkpoints", "verify", str(directory)]) == 1
    assert "r1-s30: state.pt does not match its checksum" in capsys.readouterr().out
    assert main(["checkpoints", "verify", str(directory), "r1-s40"]) == 0


def test_verify_reports_damage_that_the_lineage_leaves_out(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"model": {"weight": torch.zeros(64)}}
    checkpoints.save(directory, round=2, step=30, parent=(1, 20), world_size=2, job="lm", run="one", state=state)
    assert main(["checkpoints", "verify", str(directory)]) == 0
    assert "r1-s40: whole, not in the lineage of the newest round" in capsys.readouterr().out
    (directory / "r1-s10" / "state.pt").unlink()
    (directory / "r1-s20" / "manifest.json").write_text("{}")
    (directory / "r1-s40" / "state.pt").unlink()
    os.mkfifo(directory / "r1-s40" / "state.pt")
    assert main(["checkpoints", "verify", str(directory)]) == 1
    shown = capsys.readouterr().out
    assert sum(f"r1-s{step}: " in shown and f"r1-s{step}: whole" not in shown for step in (10, 20, 40)) == 3


def test_verify_while_a_job_deletes(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = command.find_damage

    def read_slowly(entry: Entry) -> str | None:
        for name in ("r1-s10", "r1-s20"):
            if entry.path.name == "r1-s40":
                discard_checkpoint(directory / name)
        return real(entry)

    monkeypatch.setattr(command, "find_damage", read_slowly)
    assert main(["checkpoints", "verify", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["r1-s40: whole", "r1-s30: whole"]
    assert all(line.endswith(": deleted meanwhile, by the job that uses the directory") for line in lines[2:])


def test_prune_does_not_write_through_a_link(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path_factory.mktemp("root") / "passwd"
    victim.write_text("root")
    (directory / ".lock").unlink(missing_ok=True)
    (directory / ".lock").symlink_to(victim)
    assert main(["checkpoints", "prune", str(directory), "--keep", "1"]) == 2
    assert "/.lock: " in capsys.readouterr().err
    assert victim.read_text() == "root"
    assert len(list(directory.glob("r*"))) == 4


def test_prune_keeps_the_newest_the_milestones_and_the_last_good_one(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(directory, "r1-s40")
    assert main(["checkpoints", "prune", str(directory), "--keep", "1", "--keep-every", "20"]) == 0
    assert "1 deleted, 3 left" in capsys.readouterr().out
    assert sorted(path.name for path in directory.glob("r*")) == ["r1-s20", "r1-s30", "r1-s40"]


def test_prune_by_root_leaves_a_lock_that_the_user_can_open(directory: Path) -> None:
    """In a directory that was copied without its lock. For others than root it is their own."""
    if os.geteuid() == 0:
        os.chown(directory, 65534, 65534)
    assert main(["checkpoints", "prune", str(directory)]) == 0
    assert (directory / ".lock").stat().st_uid == directory.stat().st_uid


def test_prune_refuses_a_directory_in_use(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(lock: DirectoryLock) -> None:
        raise api_error

    from elasticd.errors import DirectoryInUse

    api_error = DirectoryInUse("held by run one")
    monkeypatch.setattr(DirectoryLock, "acquire", refuse)  # a process never conflicts with its own locks
    assert main(["checkpoints", "prune", str(directory), "--keep", "1"]) == 1
    assert "held by run one" in capsys.readouterr().out
    assert len(list(directory.glob("r*"))) == 4


@pytest.mark.parametrize(
    "argv",
    [
        ["list", "/nowhere"],
        ["show", "DIR", "r1-s11"],
        ["prune", "DIR", "--keep", "0"],
        ["prune", "DIR", "r1-s10"],
        ["verify", "DIR", "--json"],
        ["burn", "DIR"],
    ],
)
def test_wrong_requests_are_usage_errors(directory: Path, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", *(str(directory) if word == "DIR" else word for word in argv)]) == 2
    assert capsys.readouterr().err.startswith("elasticd checkpoints: error: ")
    assert len(list(directory.glob("r*"))) == 4
