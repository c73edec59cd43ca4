"""docs/states.md, and the diagram in docs/architecture.md, from the table of transitions."""

from __future__ import annotations

from elasticd_agent.job.state_machine import TRANSITIONS

FROM, TO = "<!-- Written by `make docs` from here … -->\n", "<!-- … to here. -->\n"

HEAD = """\
# Where an agent can be

Written by `make docs` from the table `TRANSITIONS` in `agents/elasticd_agent/job/state_machine.py`; every transition is
checked against it. An agent runs at most one group of workers; it leaves `Stopping` for `Running` only when every
process of the old group has been reaped, is parked without a process group, or has been sent SIGKILL and hangs in the
kernel.

| phase | what it means | waits for | turns into |
|---|---|---|---|
"""


def page() -> str:
    rows = []
    for phase, (targets, waits_for) in TRANSITIONS.items():
        meaning = (phase.__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ")
        after = ", ".join(f"`{t.__name__}`" for t in targets) or "nothing"
        rows.append(f"| `{phase.__name__}` | {meaning} | {waits_for} | {after} |\n")
    return HEAD + "".join(rows) + "\n" + diagram()


def diagram() -> str:
    """Mermaid: GitHub draws it, and it can be read as it is."""
    arrows = []
    for phase, (targets, _) in TRANSITIONS.items():
        arrows += [f"    {phase.__name__} --> {target.__name__}\n" for target in targets]
        arrows += [] if targets else [f"    {phase.__name__} --> [*]\n"]
    return "".join(["```mermaid\nstateDiagram-v2\n    [*] --> Joining\n", *arrows, "```\n"])


def with_diagram(text: str) -> str:
    """The page with the diagram between its two marks, whatever was there."""
    before, _, rest = text.partition(FROM)
    _, _, after = rest.partition(TO)
    return f"{before}{FROM}{diagram()}{TO}{after}"
