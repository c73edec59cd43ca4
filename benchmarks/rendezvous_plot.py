"""Draws what rendezvous.py measured over the number of nodes, both axes logarithmic.

Growth shows as a slope: level is constant, one decade a decade is linear. Reads the JSON that
rendezvous.py writes; needs matplotlib, which the `demo` extra brings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STYLES = {
    "join": "o-",
    "lose one": "s--",
    "lose a tenth": "^:",
    "add a tenth": "v-.",
    "lose the leader": "D--",
    "store away 30 s": "P:",
}
COUNTED = "join", "lose one"
"""The loss of a tenth costs a survivor as much as the loss of one."""
TITLES = "seconds", "store requests a node", "kB a node", "processor ms a node, agent and etcd"


def draw(lives: Sequence[dict[str, Any]], path: Path) -> bool:
    """False without matplotlib."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    is_measured = any("cpu_s" in step for one in lives for step in one["steps"].values())
    titles = TITLES if is_measured else TITLES[:-1]  # a simulation uses no processor time
    figure, axes = plt.subplots(1, len(titles), figsize=(4.7 * len(titles), 4.2), layout="constrained")
    for store in sorted({one["store"] for one in lives}):
        _draw_store(store, sorted((one for one in lives if one["store"] == store), key=lambda one: one["nodes"]), axes)
    peers = {one["nodes"]: one["torch_join_seconds"] for one in lives if one.get("torch_join_seconds") is not None}
    if peers:
        axes[0].plot(sorted(peers), [peers[nodes] for nodes in sorted(peers)], "k*-", label="torch's rendezvous: join")
    for each, title in zip(axes, titles, strict=True):
        ticks = sorted({one["nodes"] for one in lives})
        each.set(xscale="log", yscale="log", xlabel="nodes", title=title)
        each.set_xticks(ticks, [str(nodes) for nodes in ticks])
        each.minorticks_off()
        each.grid(True, alpha=0.3)
        each.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _draw_store(store: str, mine: Sequence[dict[str, Any]], axes: Any) -> None:
    left, middle, right, *processor = axes
    for name, style in STYLES.items():
        steps = [(one["nodes"], one["steps"][name]) for one in mine if name in one["steps"]]
        _line(left, [(nodes, step["seconds"]) for nodes, step in steps], style, f"{store}: {name}")
        if name in COUNTED:
            _line(middle, [(nodes, step["requests"]) for nodes, step in steps], style, f"{store}: {name}")
            kilobytes = [(nodes, (step["sent"] + step["received"]) / 1000) for nodes, step in steps]
            _line(right, kilobytes, style, f"{store}: {name}")
            for each in processor:
                used = [(nodes, 1000 * (step["cpu_s"] + step["etcd_cpu_s"]) / nodes) for nodes, step in steps]
                _line(each, used, style, f"{store}: {name}")
    idle = [(one["nodes"], one["idle_requests_a_second"]) for one in mine]
    _line(middle, idle, "x-.", f"{store}: idle, a second")


def _line(axes: Any, points: Sequence[tuple[int, float]], style: str, label: str) -> None:
    """Without points at 0, which a logarithmic axis cannot show."""
    points = [(x, y) for x, y in points if y > 0]
    if points:
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    path: Path = parser.parse_args(argv).json
    if not draw(json.loads(path.read_text())["lives"], path.with_suffix(".png")):
        print("matplotlib is missing: pip install 'elasticd[demo]'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
