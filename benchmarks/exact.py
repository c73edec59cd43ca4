"""`python -m benchmarks.exact [KIND …]`: scripts of many kinds are killed at every place of a step, and compared.

Each kind of `tests/faults/scripts/exact.py` trains undisturbed, then with a rank killed at each place in turn, then
with all ranks killed. A digest of everything at the beginning of each step has to be that of the undisturbed run, bit
for bit; else the job must have said why before, or have refused the script in its first steps. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.faults.job import SCRIPTS, Job

FAULTS = (("forward", 4), ("backward", 9), ("optimizer", 15), ("step", 20), ("tail", 24), ("step", 30))
"""Places, and the steps at which they are met: the last one ends an epoch, whose tail follows."""
FLAGS = ["--checkpoint-dir", "checkpoints"]
REFUSED = re.compile(r"CheckpointRefused: (.*changed after session\.step\(\).*)")
SAID = re.compile(r"[\w ]+ changed after session\.step\(\)|random state of rank .* is lost|draws .*numbers.*")
FIRST_STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """Of one kind. `result` is exact, refused, said or SILENT."""

    kind: str
    result: str
    what: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<34}{self.result:<9}{self.what}".rstrip()


def run(directory: Path, kind: str, who: int | None) -> Job:
    """To its end. `who`: the rank that is killed, -1 for all; None for nobody."""
    directory.mkdir(parents=True)
    places = [] if who is None else [(place, step, who if who < 0 else n % 2) for n, (place, step) in enumerate(FAULTS)]
    (directory / "places.json").write_text(json.dumps(places))
    job = Job(directory, "exact.py", kind, flags=FLAGS, env={"OMP_NUM_THREADS": "1"})
    try:
        job.wait(within=600)
    finally:
        job.end()
    return job


def noted(job: Job, rank: int) -> list[tuple[int, int, str]]:
    """Round, step and digest, in order."""
    path = job.work / f"steps-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(round_), int(step), found) for round_, step, found in (line.split() for line in lines)]


def compare(kind: str, directory: Path) -> Outcome:
    whole = run(directory / "whole", kind, None)
    expected = [{step: found for _, step, found in noted(whole, rank)} for rank in (0, 1)]
    if refused := REFUSED.search(whole.err):
        steps = max(expected[0], default=0)
        return Outcome(kind, "refused" if steps <= FIRST_STEPS + 1 else "SILENT", f"at step {steps}: {refused[1]}")
    if whole.process.returncode:
        return Outcome(kind, "FAILED", whole.err[-600:])
    differs: list[str] = []
    for name, who in (("one rank", 1), ("all ranks", -1)):
        job = run(directory / name.partition(" ")[0], kind, who)
        if job.process.returncode:
            return Outcome(kind, "FAILED", f"{name}: {job.err[-600:]}")
        wrong = [
            (round_, step, rank)
            for rank in (0, 1)
            for round_, step, found in noted(job, rank)
            if expected[rank].get(step) != found
        ]
        missing = [rank for rank in (0, 1) if expected[rank].keys() - {step for _, step, _ in noted(job, rank)}]
        unmet = [place for number, (place, _) in enumerate(FAULTS) if not (job.work / f"fired-{number}").exists()]
        said = next((found[0] for found in SAID.finditer(job.err)), "")
        if wrong or missing:
            round_, step, rank = min(wrong, default=(0, 0, missing[:1]))
            result = "said" if said else "SILENT"
            differs.append(f"{result}: {name}, rank {rank} from step {step} in round {round_}: {said}")
        elif unmet:
            differs.append(f"{name}: never at {', '.join(unmet)}")
    result = next((each for each in ("SILENT", "said") if any(found.startswith(each) for found in differs)), "exact")
    return Outcome(kind, result, "; ".join(differs))


def all_kinds() -> list[str]:
    """In their order; the script cannot be imported outside of a job."""
    text = (SCRIPTS / "exact.py").read_text()
    pattern = r'^(?:@kind\ndef (\w+)|(?:optimizer_kind|scheduled|augmented)\(\s*"(\w+)")'
    return [first or second for first, second in re.findall(pattern, text, re.MULTILINE)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--keep", type=Path, help="the jobs' files, in a directory that does not exist yet")
    args = parser.parse_args(argv)
    kinds = args.kinds or all_kinds()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="elasticd-exact-") as made, ThreadPoolExecutor(args.jobs) as pool:
        directory = args.keep or Path(made)
        for outcome in pool.map(lambda kind: compare(kind, directory / kind), kinds):
            print(outcome, flush=True)
            outcomes.append(outcome)
    found = {result: sum(each.result == result for each in outcomes) for result in sorted({o.result for o in outcomes})}
    print(f"{len(outcomes)} kinds: {', '.join(f'{count} {result}' for result, count in found.items())}")
    return 1 if found.keys() & {"SILENT", "FAILED"} else 0


if __name__ == "__main__":
    sys.exit(main())
