"""The demo's picture: loss and world size over time with the faults marked, and the first fault through a magnifier.

It draws the event log and the loss log.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]

_FAULT = "#c1121f"
_ROUNDS = ("#1d4e89", "#e07a1f", "#2a9d6f", "#7b4ea3")  # one color a round, different in gray, too
_ZOOM_S = 1.5


@dataclass(frozen=True, slots=True)
class KilledWorker:
    """A worker killed by the demo; times are this machine's time.monotonic()."""

    at: float
    rank: int
    pid: int
    round: int
    back_at: float


def draw(events: Lines, losses: Lines, faults: list[KilledWorker], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    start = min(e["mono"] for e in events if e["kind"] == "group_started")
    style = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
    }
    with plt.rc_context(style):
        figure = plt.figure(figsize=(10, 5), layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=(5, 3), height_ratios=(3, 1))
        loss = figure.add_subplot(grid[0, 0])
        size = figure.add_subplot(grid[1, 0], sharex=loss)
        _draw_losses(loss, losses, start)
        _draw_world_size(size, events, faults, start)
        for fault in faults:
            for axes in (loss, size):
                axes.axvline(fault.at - start, color=_FAULT, linestyle=(0, (4, 2)), linewidth=1.2)
            loss.annotate(
                f"rank {fault.rank} killed",
                (fault.at - start, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(5, -4),
                textcoords="offset points",
                va="top",
                color=_FAULT,
            )
        if faults:
            _draw_magnified(figure.add_subplot(grid[:, 1]), events, losses, faults[0])
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _color(number: int) -> str:
    return _ROUNDS[(number - 1) % len(_ROUNDS)]


def _rounds(losses: Lines) -> list[tuple[int, Lines]]:
    return [(n, [line for line in losses if line["round"] == n]) for n in sorted({line["round"] for line in losses})]


def _draw_losses(axes: Any, losses: Lines, start: float) -> None:
    for number, lines in _rounds(losses):
        times = [line["mono"] - start for line in lines]
        axes.plot(times, [line["loss"] for line in lines], color=_color(number), linewidth=1.4, label=f"round {number}")
    axes.set_title("Loss of a byte-level GPT, mean over all workers")
    axes.set_ylabel("loss (nats per byte)")
    axes.tick_params(labelbottom=False)
    axes.legend(frameon=False, loc="center right")


def _draw_world_size(axes: Any, events: Lines, faults: list[KilledWorker], start: float) -> None:
    """Workers that train: a whole group from its start, none from its fault to the next group's start."""
    changes = [(e["mono"] - start, len(e["pids"])) for e in events if e["kind"] == "group_started"]
    changes += [(fault.at - start, 0) for fault in faults]
    changes += [(e["mono"] - start, 0) for e in events if e["kind"] == "job_ended"]
    times, sizes = zip(*sorted(changes), strict=True)
    axes.step(times, sizes, where="post", color="#333333", linewidth=1.4)
    axes.fill_between(times, sizes, step="post", color="#333333", alpha=0.12, linewidth=0)
    axes.set_ylim(0, max(sizes) + 0.6)
    axes.set_yticks([0, max(sizes)])
    axes.set_ylabel("workers")
    axes.set_xlabel("seconds since the first workers started")


def _draw_magnified(axes: Any, events: Lines, losses: Lines, fault: KilledWorker) -> None:
    """Each dot is a committed step; the gap is what the fault cost, and the drop is what was trained again."""
    gap = fault.back_at - fault.at
    low, high = fault.at - _ZOOM_S, fault.back_at + _ZOOM_S
    for number, lines in _rounds([line for line in losses if low <= line["mono"] <= high]):
        times = [line["mono"] - fault.at for line in lines]
        axes.plot(times, [line["step"] for line in lines], "o", color=_color(number), markersize=5)
    axes.axvspan(0, gap, color=_FAULT, alpha=0.12, linewidth=0)
    axes.axvline(0, color=_FAULT, linestyle=(0, (4, 2)), linewidth=1.2)
    saved = [e for e in events if e["kind"] == "checkpoint_saved" and e["mono"] < fault.at]
    if saved:
        step = saved[-1]["step"]
        axes.axhline(step, color="#888888", linewidth=0.8)
        axes.annotate(
            f"checkpoint, step {step}",
            (1.0, step),
            xycoords=("axes fraction", "data"),
            xytext=(0, -3),
            textcoords="offset points",
            ha="right",
            va="top",
            color="#666666",
            fontsize=9,
        )
    axes.set_xlim(-_ZOOM_S, gap + _ZOOM_S)
    axes.set_title(f"SIGKILL → next step: {gap:.2f} s")
    axes.set_xlabel("seconds since the SIGKILL")
    axes.set_ylabel("step")
    axes.yaxis.get_major_locator().set_params(integer=True)
