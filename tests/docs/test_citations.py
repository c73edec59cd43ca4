"""Every file that a page, a comment or a docstring of the repository cites exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CITED = re.compile(r"(?<![\w/.$*{}-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|sbatch|yaml))(?![\w/*-])")
FOLDERS = ("docs", "agents", "elasticd", "benchmarks", "examples", "deploy")
NOT_OURS = {
    # of users
    *("train.py", "script.py", "job.yaml", "llama.toml", "bert.toml", "a.py", "b.py", "x.py"),
    *("gpu-day/report.md", "report.md", "gpu-day-kernel.py"),
    *(
        "my-cluster/kustomization.yaml",
        "my-job/kustomization.yaml",
        "my-values.yaml",
        "default_config.yaml",
        "service/agent.toml",
        "service/job.toml",
    ),
    # of the docs site
    *("api.md", "changelog.md", "../CHANGELOG.md", "adr/index.md", "index.md"),
    # of Python and torch
    *("selectors.py", "site.py", "c10d_logger.py", "local_elastic_agent_test.py", "multigpu_torchrun.py"),
    *("torch/nn/parallel/distributed.py", "torch/distributed/elastic/multiprocessing/api.py"),
}


@cache
def tracked() -> frozenset[str]:
    skip = {"__pycache__", ".git", ".venv"}
    return frozenset(
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and not skip & set(path.parts)
    )


def exists(cited: str, page: Path) -> bool:
    """A path is relative to the repository, which may be a clone in the directory above, to the page, or the tail of a
    path: `launcher/owner.py` is enough.
    """
    cited = cited.removeprefix("../elasticd/")
    return (
        cited in NOT_OURS
        or (page.parent / cited).exists()
        or any(path == cited or path.endswith(f"/{cited}") for path in tracked())
    )


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def missing(page: Path, text: str) -> list[str]:
    return sorted({f"{page.relative_to(ROOT)}: {cited}" for cited in CITED.findall(text) if not exists(cited, page)})


def test_cited_files_exist() -> None:
    assert [line for page in pages() for line in missing(page, page.read_text())] == []


def test_each_decision_has_its_own_number() -> None:
    pages = {path: path.name[:4] for path in (ROOT / "docs" / "adr").glob("*.md")}
    assert len(set(pages.values())) == len(pages)
    assert [path.name for path, number in pages.items() if not path.read_text().startswith(f"# {number}: ")] == []


def test_missing_file_is_found() -> None:
    page = ROOT / "docs" / "cli.md"
    text = "[x](hangs.md) `launcher/owner.py` DESIGN.md tests/nowhere/test_x.py deploy/prometheus/alerts.yaml train.py"
    assert missing(page, text) == ["docs/cli.md: DESIGN.md", "docs/cli.md: tests/nowhere/test_x.py"]
