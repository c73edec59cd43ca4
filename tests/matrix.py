"""`make matrix`: the tests that measure no time, on each Python and torch that can be had here; writes README's table.

What needs no torch runs once for each Python, with the newest torch; what needs torch runs in each cell.

A cell is an environment below .venv-matrix, removed when its tests have ended: with CUDA's libraries it holds 5 GB, and
uv keeps them once for all cells. What ran is kept in tests/matrix.json, and README's table is made from that alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-matrix"
RESULTS = ROOT / "tests" / "matrix.json"
README = ROOT / "README.md"
FROM, TO = "<!-- Written by `make matrix` from here … -->\n", "<!-- … to here. -->\n"

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
NEWEST = "newest"
TORCHES = ("2.6.0", "2.13.0", NEWEST)
HEAD = (
    "`make matrix` runs the tests that measure no time, on CPUs. Tests that need torch run with each torch, the others",
    "with the newest torch only. A cell shows its own last run. Earlier runs had fewer tests. In the column of",
    "torch 2.13, cells above 2,000 date from a time when all tests ran with it.",
    "",
)
TESTS = (
    "tests/config/test_torchrun_flags.py",
    "tests/examples/test_demo.py::test_demo_kills_recovers_and_draws",
    "tests/hangs/collector",
    "tests/hangs/test_evidence.py",
    "tests/library",
    "tests/torchrun_parity/test_endings.py",
    "tests/torchrun_plugin",
    "tests/workers",
)
WITHOUT_TORCH = (
    "tests/config",
    "tests/job",
    "tests/model",
    "tests/scenarios",
    "tests/store",
    "tests/system",
)
TIMED = (
    "tests/library/test_checkpoint_faults.py",
    "tests/library/test_checkpoint_histories.py",
    "tests/library/test_sampler_histories.py",
    "tests/library/test_session_barrier.py",
    "tests/library/test_session_barrier_costs.py",
    "tests/library/test_session_barrier_launchers.py",
    "tests/library/test_session_memory.py",
    "tests/library/test_session_missed_call.py",
    "tests/library/test_session_pause.py",
)
"""They measure, or take long."""
ALSO_TIMED = ("tests/torchrun_plugin/test_member.py::test_torchrun_restarts_after_a_killed_node",)
# Each torch names its own versions of these.
OF_TORCH = ("torch", "sympy", "networkx", "fsspec", "setuptools")
DEADLINE_S = 1800
FEW = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--python", action="append", default=[], metavar="PATH", help="an interpreter, besides those found"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="CELL", help="such as 3.12-2.6.0 or 3.14-newest")
    parser.add_argument("--table", action="store_true", help="write README's table from tests/matrix.json; run nothing")
    options = parser.parse_args()
    ended_well = options.table or run_cells(interpreters(options.python), options.only)
    results = json.loads(RESULTS.read_text())
    README.write_text(with_table(README.read_text(), results))
    return 0 if ended_well else 1


def run_cells(pythons: dict[str, str], only: list[str]) -> bool:
    """False if a test has failed; a cell that cannot be made is said, and is no failure."""
    for missing in sorted(set(PYTHONS) - set(pythons)):
        print(f"Python {missing}: no interpreter here; give its path with --python", flush=True)
    tools = FOLDER / "tools"
    if not (tools / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", tools], check=True)
        subprocess.run([tools / "bin" / "python", "-m", "pip", "install", "-q", "uv"], check=True)
    well = True
    for python, path in sorted(pythons.items()):
        for torch in TORCHES:
            cell = f"{python}-{torch}"
            if only and cell not in only:
                continue
            result = run_cell(cell, path, torch)
            well = well and not result.get("failed")
            # Read only now: another cell may have ended meanwhile.
            results = (json.loads(RESULTS.read_text()) if RESULTS.exists() else {}) | {cell: result}
            RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
            print(f"{cell}: {told(result)}", flush=True)
    return well


def interpreters(given: list[str]) -> dict[str, str]:
    """PYTHONS' minor versions -> a path: those given, on PATH, in pyenv's folder."""
    candidates = [
        *given,
        *filter(None, (shutil.which(f"python{minor}") for minor in PYTHONS)),
        *map(str, sorted(Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob("versions/*/bin/python"))),
    ]
    found: dict[str, str] = {}
    for path in candidates:
        asked = subprocess.run([path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True)
        minor = asked.stdout.decode().strip()
        if asked.returncode == 0 and minor in PYTHONS:
            found.setdefault(minor, path)
    return found


def run_cell(cell: str, python: str, torch: str) -> dict[str, object]:
    environment = FOLDER / cell
    shutil.rmtree(environment, ignore_errors=True)
    try:
        why = install(environment, python, torch)
        return {"not_had": why} if why else tested(environment, (*TESTS, *(WITHOUT_TORCH if torch == NEWEST else ())))
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def install(environment: Path, python: str, torch: str) -> str:
    """Empty, or why this torch cannot be had for this Python."""
    uv = FOLDER / "tools" / "bin" / "uv"
    pins = [
        pin
        for pin in (ROOT / "constraints.txt").read_text().splitlines()
        if not pin.startswith(tuple(f"{n}=" for n in OF_TORCH))
    ]
    constraints = FOLDER / "constraints.txt"
    constraints.write_text("\n".join(pins))
    variables = os.environ | {
        "UV_CACHE_DIR": str(FOLDER / "cache"),
        "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""),
    }
    subprocess.run([uv, "venv", "-q", "--python", python, environment], check=True, env=variables)
    wanted = "torch" if torch == NEWEST else f"torch=={torch}"
    done = subprocess.run(
        [uv, "pip", "install", "-q", "--python", environment, "-c", constraints, wanted, "-e", f"{ROOT}[dev,demo]"],
        capture_output=True,
        text=True,
        env=variables,
    )
    return " ".join(done.stderr.split()) if done.returncode else ""


def tested(environment: Path, tests: Sequence[str]) -> dict[str, object]:
    python = environment / "bin" / "python"
    asked = "import platform, torch; print(platform.python_version(), torch.__version__)"
    version, torch = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    cases = run_tests(environment, *tests, "--numprocesses=2", "--dist=loadfile")
    once = {name for name, outcome in cases.items() if outcome == "failed"}
    if 0 < len(once) <= FEW:  # the machine may have been too busy for them
        cases |= run_tests(environment, *tests, "--last-failed")
    return {
        "python": version,
        "torch": torch,
        "passed": sum(outcome == "passed" for outcome in cases.values()),
        "failed": sorted(name for name, outcome in cases.items() if outcome == "failed"),
        "passed_alone": sorted(name for name in once if cases[name] == "passed"),
    }


def run_tests(environment: Path, *arguments: str) -> dict[str, str]:
    """Each test's name -> passed, skipped, failed."""
    report = environment / "report.xml"
    command = [
        environment / "bin" / "python",
        "-m",
        "pytest",
        "-q",
        f"--override-ini=cache_dir={environment / 'cache'}",
    ]
    command += [f"--junitxml={report}", *arguments, *(f"--ignore={path}" for path in TIMED)]
    command += [f"--deselect={test}" for test in ALSO_TIMED]
    variables = os.environ | {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
    with (FOLDER / f"{environment.name}.log").open("a") as log:
        subprocess.run(command, cwd=ROOT, env=variables, stdout=log, stderr=log, timeout=DEADLINE_S)
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        failed = case.find("failure") is not None or case.find("error") is not None or outcomes.get(name) == "failed"
        outcomes[name] = "failed" if failed else "passed" if case.find("skipped") is None else "skipped"
    return outcomes


def told(result: dict[str, object]) -> str:
    """What a cell of README's table says."""
    if "not_had" in result:
        return "no such build"
    failed = result["failed"]
    assert isinstance(failed, list)
    version = str(result["torch"]).partition("+")[0]
    twice = result["passed_alone"]
    assert isinstance(twice, list)
    again = f" ({len(twice)} on a second try)" if twice else ""
    return f"{version}: {result['passed']:,} passed{again}" + (f", {len(failed)} failed" if failed else "")


def with_table(text: str, results: dict[str, dict[str, object]]) -> str:
    """README with the table between its two marks, whatever was there."""
    lines = [*HEAD, "| Python | torch 2.6 | torch 2.13 | newest torch |", "|---|---|---|---|"]
    for python in PYTHONS:
        cells = [results.get(f"{python}-{torch}") for torch in TORCHES]
        ran = [str(cell["python"]) for cell in cells if cell and "python" in cell]
        said = [told(cell) if cell else "not run" for cell in cells]
        lines.append(f"| {ran[0] if ran else python} | " + " | ".join(said) + " |")
    before, _, rest = text.partition(FROM)
    _, _, after = rest.partition(TO)
    assert after, f"{README} has no marks for the table"
    return before + FROM + "\n".join(lines) + "\n" + TO + after


if __name__ == "__main__":
    sys.exit(main())
