"""The benchmark's table, in markdown, and the machine it was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.job import Memory
from benchmarks.launchers import ALL
from benchmarks.measurements import Kills, Overhead, Recoveries


def machine() -> dict[str, str | int]:
    """What a reader needs to know to compare figures: processor, cores this process may use, kernel, versions."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def machine_line(facts: Mapping[str, str | int]) -> str:
    return (
        f"{facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']}, Python {facts['python']}, "
        f"torch {facts['torch']}, gloo"
    )


def recovery_table(results: Sequence[Recoveries]) -> str:
    """Rows: start, kills; columns: launchers. Each cell median (max), and how many of the tries recovered."""
    names = [launcher for launcher in ALL if any(r.launcher == launcher.name for r in results)]
    lines = [
        "| seconds: median (max), recovered/tried | " + " | ".join(launcher.title for launcher in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    rows = (
        ("start → first step", "start"),
        ("SIGKILL of a rank other than 0 → next step", "kill_other"),
        ("SIGKILL of rank 0 → next step", "kill_rank0"),
    )
    for workers in sorted({r.workers for r in results}):
        by_name = {r.launcher: r for r in results if r.workers == workers}
        for title, kind in rows:
            cells = [_cell(by_name[launcher.name], kind) for launcher in names]
            lines.append(f"| {title}, {workers} workers | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(result: Recoveries, kind: str) -> str:
    values, tried = getattr(result, kind), getattr(result, f"{kind}_tried")
    if not values:
        return f"never, 0/{tried}"
    return f"{statistics.median(values):.3f} ({max(values):.3f}), {len(values)}/{tried}"


def overhead_line(result: Overhead) -> str:
    ours, theirs, ratio = statistics.median(result.elasticd), statistics.median(result.torchrun), result.ratio
    return (
        f"Steady state, {result.workers} workers, {1000 / theirs:.2f} ms a step: elasticd {ours:.0f} steps/s, torchrun "
        f"{theirs:.0f} steps/s; ratio of turns {ratio.median:.3f}, {ratio.coverage:.0%} interval "
        f"{ratio.low:.3f} to {ratio.high:.3f} ({len(result.starts)} starts, {len(result.elasticd)} pairs of turns)."
    )


def memory_table(found: Mapping[str, Memory], workers: int) -> str:
    lines = [f"| PSS in MB, {workers} workers | agent | launcher | workers | whole job |", "|---|---|---|---|---|"]
    for launcher in ALL:
        if (m := found.get(launcher.name)) is not None:
            launcher_cell = f"{m.launcher:.0f}" if m.launcher else "–"
            lines.append(f"| {launcher.title} | {m.agent:.0f} | {launcher_cell} | {m.workers:.0f} | {m.total:.0f} |")
    return "\n".join(lines)


def kills_line(result: Kills) -> str:
    done = sorted(result.recovered)
    head = f"{result.requested} kills in a row, {result.workers} workers"
    if not done:
        return f"{head}: none recovered."
    late = done[min(len(done) - 1, len(done) * 99 // 100)]
    return (
        f"{head}: {len(done)} recovered, {len(result.lost)} lost or stuck; "
        f"median {statistics.median(done):.3f} s, 99th percentile {late:.3f} s, max {done[-1]:.3f} s; "
        f"at most {result.most_steps_repeated} steps repeated (a snapshot every 10)."
    )
