"""`python -m docs.generate`: writes the generated pages of docs/."""

from __future__ import annotations

from pathlib import Path

from docs.generate import events, man, metrics, options, settings, states

DOCS = Path(__file__).parents[1]
PAGES = {
    "agent.md": settings.agent_page,
    "events.md": events.page,
    "jobs.md": settings.jobs_page,
    "man/elasticd.1": man.page,
    "metrics.md": metrics.job_page,
    "node-metrics.md": metrics.node_page,
    "states.md": states.page,
    "torchrun.md": options.page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(page())
    architecture = DOCS / "architecture.md"
    architecture.write_text(states.with_diagram(architecture.read_text()))
