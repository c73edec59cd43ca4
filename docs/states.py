"""Writes docs/states.md from the agent's table of moves: `python docs/states.py`."""

from __future__ import annotations

from pathlib import Path

from elasticd_agent.core import MOVES

PAGE = Path(__file__).with_name("states.md")

HEAD = """\
# Where an agent can be

Made by `python docs/states.py` from the table `MOVES` in `agents/elasticd_agent/core.py`, which every move is checked
against. An agent runs at most one group of workers; it leaves `Stopping` for `Running` only when every process of the
old group has been reaped, or has been sent SIGKILL and hangs in the kernel.

| phase | what it means | waits for | turns into |
|---|---|---|---|
"""


def page() -> str:
    rows, arrows = [], []
    for phase, (targets, waits_for) in MOVES.items():
        name = phase.__name__
        meaning = (phase.__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ")
        after = ", ".join(f"`{t.__name__}`" for t in targets) or "nothing"
        rows.append(f"| `{name}` | {meaning} | {waits_for} | {after} |\n")
        arrows += [f"    {name} --> {t.__name__}\n" for t in targets] or [f"    {name} --> [*]\n"]
    diagram = "".join(["\n```mermaid\nstateDiagram-v2\n    [*] --> Joining\n", *arrows, "```\n"])
    return HEAD + "".join(rows) + diagram


if __name__ == "__main__":
    PAGE.write_text(page())
