"""How much memory a copy of the state may take, by the machine and by every control group above this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticd.checkpointing.memory import memory_limit

MB = 1 << 20
NONE = {"memory.stat": "inactive_file 0\nactive_file 0\n"}


def v2(limit: int | str, used: int, cache: int = 0) -> dict[str, str]:
    limit_text = limit if isinstance(limit, str) else str(limit * MB)
    return {
        **NONE,
        "memory.max": limit_text,
        "memory.current": str(used * MB),
        "memory.stat": f"active_file {cache * MB}",
    }


def v1(limit: int, used: int) -> dict[str, str]:
    return {**NONE, "memory.limit_in_bytes": str(limit * MB), "memory.usage_in_bytes": str(used * MB)}


@pytest.mark.parametrize(
    ("own", "groups", "left_mb", "where"),
    [
        (["0::/"], {}, 10_000, "of this machine's memory"),
        (["0::/job"], {"job": v2("max", 700)}, 10_000, "of this machine's memory"),
        (["0::/job"], {"job": v2(1000, 700)}, 300, "below the memory limit of 1000 MB"),
        (["0::/job"], {"job": v2(1000, 700, cache=200)}, 500, "below the memory limit of 1000 MB"),
        (["0::/pod/job"], {"pod": v2(500, 450), "pod/job": v2(1000, 100)}, 50, "below the memory limit of 500 MB"),
        (["0::/job"], {"job": v2(1000, 1100)}, -100, "below the memory limit of 1000 MB"),
        # A container that sees its own group as the root.
        (["0::/docker/4f"], {"": v2(1000, 400)}, 600, "below the memory limit of 1000 MB"),
        (["4:memory:/job", "0::/"], {"memory/job": v1(800, 300)}, 500, "below the memory limit of 800 MB"),
        (["4:memory:/job"], {"memory/job": v1(1 << 43, 300)}, 10_000, "of this machine's memory"),
    ],
)
def test_smallest_limit_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: list[str],
    groups: dict[str, dict[str, str]],
    left_mb: int,
    where: str,
) -> None:
    for group, files in groups.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / group / name).write_text(text)

    (tmp_path / "own").write_text("\n".join(own))
    monkeypatch.setattr(memory_limit, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory_limit, "_machine_available_bytes", lambda: 10_000 * MB)
    monkeypatch.setattr(memory_limit, "_OWN_CGROUPS_FILE", tmp_path / "own")
    assert memory_limit.available_bytes() == (left_mb * MB, where)


@pytest.mark.parametrize(
    ("own", "file", "text", "kills"),
    [
        ("0::/job", "job/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0", 2),
        ("4:memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5", 5),
        ("4:memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0", 0),
        ("0::/", "memory.stat", "anon 5", 0),
    ],
)
def test_kills_for_lack_of_memory_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, file: str, text: str, kills: int
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(memory_limit, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory_limit, "_OWN_CGROUPS_FILE", tmp_path / "own")
    assert memory_limit.oom_kills() == kills
