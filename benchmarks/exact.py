"""`python -m benchmarks.exact [KIND …]`: scripts of many kinds are killed at every place of a step, and compared.

Each kind of `tests/faults/scripts/exact.py` trains undisturbed, and again with ranks killed at each place of a step:
rank 0 and rank 1 in turn, then the other one of them at each place, then all. A digest of everything at the beginning
of each step has to be that of the undisturbed run, bit for bit; else the job must have said why before the first step
that differs, or have refused the script in its first steps. Exit code 1 if not.
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

PLACES = (("forward", 4), ("backward", 9), ("optimizer", 15), ("step", 20), ("tail", 24), ("step", 30))
"""And the steps at which they are met: the last one ends an epoch, whose tail follows."""
STEPS = 36
"""After which the places come again, for other ranks."""
FAULTS = [
    (place, step + group * STEPS, -1 if group == 2 else (number + group) % 2)
    for group in range(3)
    for number, (place, step) in enumerate(PLACES)
]
"""Place, step, and the rank that is killed, -1 for all."""
FLAGS = ["--checkpoint-dir", "checkpoints"]
REFUSED = re.compile(r"(?:CheckpointRefused|StateDiffers|UsageError): (.*)")
SAID = re.compile(
    r"[\w ]+ changed after session\.step\(\)|random state of rank .* is lost|draws .*numbers.*"
    r"|communication hook is in no checkpoint|after a restart all have rank 0's"
    r"|[\w, ]+ differs? from rank 0's"
)
FIRST_STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """Of one kind. `result` is exact, refused, said, SILENT or FAILED."""

    kind: str
    result: str
    what: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<44}{self.result:<9}{self.what}".rstrip()


def run(directory: Path, kind: str, faults: Sequence[tuple[str, int, int]], more: Sequence[str] = ()) -> Job:
    """To its end."""
    directory.mkdir(parents=True)
    (directory / "places.json").write_text(json.dumps(faults))
    steps = ["--steps", str(3 * STEPS)]
    job = Job(directory, "exact.py", kind, *steps, *more, flags=FLAGS, env={"OMP_NUM_THREADS": "1"})
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


def compare(kind: str, directory: Path, more: Sequence[str] = ()) -> Outcome:
    with ThreadPoolExecutor() as pool:
        killed = pool.submit(run, directory / "killed", kind, FAULTS, more)
        whole = run(directory / "whole", kind, [])
    expected = [{step: found for _, step, found in noted(whole, rank)} for rank in (0, 1)]
    if refused := REFUSED.search(whole.err):
        steps = max(expected[0], default=0)
        return Outcome(kind, "refused" if steps <= FIRST_STEPS + 1 else "FAILED", f"at step {steps}: {refused[1]}")
    if whole.process.returncode:
        return Outcome(kind, "FAILED", whole.err[-600:])
    job = killed.result()
    if job.process.returncode:
        return Outcome(kind, "FAILED", job.err[-600:])
    if unmet := [fault for number, fault in enumerate(FAULTS) if not (job.work / f"fired-{number}").exists()]:
        return Outcome(kind, "FAILED", f"never at {unmet}")
    wrong = [
        (round_, step, rank)
        for rank in (0, 1)
        for round_, step, found in noted(job, rank)
        if expected[rank].get(step) != found
    ]
    if wrong:
        round_, step, rank = min(wrong)
        said = SAID.search(job.err.partition(f"round {round_}: training again")[0])
        what = f"rank {rank} from step {step} in round {round_}, after {FAULTS[round_ - 2]}"
        return Outcome(kind, "said" if said else "SILENT", f"{what}: {said[0] if said else 'not a word'}")
    if missing := [rank for rank in (0, 1) if expected[rank].keys() - {step for _, step, _ in noted(job, rank)}]:
        return Outcome(kind, "SILENT", f"steps of rank {missing[0]} are missing")
    return Outcome(kind, "exact", in_place(job) if more else "")


def in_place(job: Job) -> str:
    """The rounds in which the rank that lived kept its process, and else why it did not."""
    kept = sum(bool(event.get("kept")) for event in job.events("group_started"))
    why = re.search(r"a change of ranks restarts every process: .*", job.err)
    return f"{kept} of {len(FAULTS)} in place{f'; {why[0]}' if why else ''}"


def judge(kind: str, directory: Path, more: Sequence[str]) -> Outcome:
    """As `compare`; a job that does not end, or leaves something behind, ends only the part of this kind."""
    try:
        return compare(kind, directory, more)
    except AssertionError as error:
        return Outcome(kind, "FAILED", str(error)[-600:])


def all_kinds() -> list[str]:
    """In their order; the script cannot be imported outside of a job."""
    text = "".join((SCRIPTS / f"exact_{part}.py").read_text() for part in ("training", "data"))
    pattern = r'^(?:@kind\ndef (\w+)|(?:optimizer_kind|scheduled|augmented)\(\s*"(\w+)")'
    return [first or second for first, second in re.findall(pattern, text, re.MULTILINE)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--jobs", type=int, default=1, help="kinds at a time, each with two jobs")
    parser.add_argument("--keep", type=Path, help="the jobs' files, in a directory that does not exist yet")
    parser.add_argument(
        "--in-place", action="store_true", help="by session.run: the rank that is not killed stays in its process"
    )
    args = parser.parse_args(argv)
    more = ["--in-place"] * args.in_place
    kinds = args.kinds or all_kinds()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="elasticd-exact-") as made, ThreadPoolExecutor(args.jobs) as pool:
        directory = args.keep or Path(made)
        for outcome in pool.map(lambda kind: judge(kind, directory / kind, more), kinds):
            print(outcome, flush=True)
            outcomes.append(outcome)
    found = {result: sum(each.result == result for each in outcomes) for result in sorted({o.result for o in outcomes})}
    print(f"{len(outcomes)} kinds: {', '.join(f'{count} {result}' for result, count in found.items())}")
    return 1 if found.keys() & {"SILENT", "FAILED"} else 0


if __name__ == "__main__":
    sys.exit(main())
