"""What a script sees of its process under elasticd is what it sees under torchrun, fact by fact."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from elasticd.heartbeat.record import STACKS_SIGNAL
from tests.torchrun_parity.conftest import NO_LOADERS, QUICKLY, Runs
from tests.torchrun_parity.launching import DEADLINE_S, Facts, Outcome, differences

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)

LEFT_OUT = {"script": NO_LOADERS, "thorough": "", "module": NO_LOADERS, "directory": QUICKLY, "cold": QUICKLY}
SLOW = ("thorough", "directory", "module")
SECTIONS = [
    "first",
    "main",
    "interpreter",
    "process",
    "signals",
    "streams",
    "states",
    "hooks",
    "random",
    "uninstalled",
    "children",
    "prepared",
    "numpy",
    "torch",
    "consequences",
    "lasting",
    "streams of torch",
    "training",
    "loaders",
    "fault handler",
    "traceback",
    "descriptors at the end",
    "children at the end",
]
RANDOM = ("random/unseeded", "numpy/unseeded", "streams of torch/unseeded")
ENVIRONMENT = ("first/environment", "consequences/environment")

# Where the two may differ, and why. Everything here but the first group has a test of its own below.
ALLOWED = {
    # chosen anew by whoever starts the job
    rf"({'|'.join(ENVIRONMENT)})/(MASTER_PORT|TORCHELASTIC_(RUN_ID|ERROR_FILE)|PROBE_(MARK|LEAVES_OUT))": "a run's own",
    rf"({'|'.join(ENVIRONMENT)})/TORCHELASTIC_MAX_RESTARTS": "the default budget is another one than torchrun's 0",
    rf"({'|'.join(RANDOM)})(/.*)?": "random",
    # what DESIGN.md lists
    rf"({'|'.join(ENVIRONMENT)})/ELASTICD_[A-Z_]+": "elasticd's own variables",
    r"first/modules": "the standard library stays loaded",
    r"(first|torch|children/[a-z]+/0)/meta path": "the finder that hands out what is preloaded",
    r"(states|consequences)/copyreg": "types of preloaded modules that know how to be copied",
    r"torch/names of its modules/torch\.ops": "operators of preloaded modules are registered",
    r"(numpy/modules|(torch|lasting|training)/third party|torch/names of its modules/numpy\.fft.*)": "tested below",
    r"first/descriptors beyond stderr|descriptors at the end|process/status/SigCgt": "for stacks: tested below",
    r"torch/threads/2": "the heartbeat thread: tested below",
    r"streams/<std(out|err)>/buffering/2": "a terminal that has gone ends no training",
}


def marked(way: str, *values: str) -> Any:
    return pytest.param(way, *values, marks=[pytest.mark.system] if way in SLOW else [])


WAYS = [marked(way) for way in LEFT_OUT]
WARM = [marked(way) for way in LEFT_OUT if way != "cold"]

# The cold run has another last argument than torchrun's, and starts no child by spawn, which changes what follows.
ALLOWED_COLD = {
    r"(interpreter/(orig_)?argv|process/command line|children/fork/0/argv)(/.*)?": "the last argument",
    r"children/(spawn|forkserver)|children at the end": "left out, and what they need to be started",
    r"(prepared|consequences)/temporary": "multiprocessing had chosen one",
}


def unexpected(ours: Any, theirs: Any, section: str, cold: bool) -> list[str]:
    patterns = [*ALLOWED, *(ALLOWED_COLD if cold else {})]
    found = differences(ours, theirs, section)
    return [line for line in found if not any(re.match(rf"{pattern}: ", line) for pattern in patterns)]


def taken(way: str) -> list[str]:
    return [section for section in SECTIONS if section not in LEFT_OUT[way].split()]


@pytest.mark.parametrize(("way", "section"), [marked(way, section) for way in LEFT_OUT for section in taken(way)])
def test_equals_torchrun(runs: Runs, way: str, section: str) -> None:
    """Is what torchrun shows."""
    both = runs(way)
    for rank in (0, 1) if way in ("script", "thorough", "cold") else (0,):
        ours, theirs = both.elasticd.facts(rank)[section], both.torchrun.facts(rank)[section]
        assert "raised" not in str(theirs), theirs
        assert unexpected(ours, theirs, section, way == "cold") == []


@pytest.mark.parametrize("way", WARM)
def test_was_forked_from_the_warm_launcher(runs: Runs, way: str) -> None:
    outcome = runs(way).elasticd
    assert outcome.code == 0, outcome.stderr
    assert outcome.warm, outcome.why_cold


def test_cold_start_says_why(runs: Runs) -> None:
    outcome = runs("cold").elasticd
    assert outcome.code == 0, outcome.stderr
    assert not outcome.warm
    assert "${local_rank}" in outcome.why_cold
    assert [outcome.facts(rank)["interpreter"]["argv"][-1] for rank in (0, 1)] == ["0", "1"]


@pytest.mark.parametrize("way", WAYS)
def test_leaves_no_process_behind(runs: Runs, way: str) -> None:
    assert runs(way).elasticd.remains == []


@pytest.mark.parametrize("way", WARM)
def test_only_the_standard_library_is_loaded_before_the_script(runs: Runs, way: str) -> None:
    both = runs(way)
    ours, theirs = (set(outcome.facts()["first"]["modules"]) for outcome in (both.elasticd, both.torchrun))
    known = {"__mp_main__", *sys.stdlib_module_names}
    assert {name for name in ours - theirs if name.partition(".")[0] not in known} == set()
    assert theirs - ours == set()
    assert "torch" not in ours


@pytest.mark.parametrize("way", WARM)
def test_side_effects_of_importing_numpy(runs: Runs, way: str) -> None:
    """Preloading knows which package loaded a module, not which statement: numpy.fft may come with numpy.random."""
    both = runs(way)
    for section, key in (("numpy", "modules"), ("torch", "third party"), ("training", "third party"))[
        : 2 if way == "directory" else 3
    ]:
        ours, theirs = (set(outcome.facts()[section][key]) for outcome in (both.elasticd, both.torchrun))
        assert theirs - ours == set()
        assert {name for name in ours - theirs if not name.startswith("numpy.")} == set()


@pytest.mark.parametrize("way", WAYS)
def test_environment_is_torchruns_and_our_own(runs: Runs, way: str) -> None:
    both = runs(way)
    for where in ("first", "consequences"):
        ours, theirs = (outcome.facts()[where]["environment"] for outcome in (both.elasticd, both.torchrun))
        assert all(name.startswith("ELASTICD_") for name in ours.keys() - theirs.keys())
        assert theirs.keys() - ours.keys() == set()
        assert ours["MASTER_PORT"].isdigit()
        assert ("ELASTICD_LAUNCH" in ours) is (way != "cold")


@pytest.mark.parametrize("way", WAYS)
def test_stack_signal_and_its_file(runs: Runs, way: str) -> None:
    """A signal for stacks is caught and one file is open for them; libffi opens itself at the first callback."""
    both = runs(way)
    ours, theirs = both.elasticd.facts(), both.torchrun.facts()
    caught, usual = (int(facts["process"]["status"]["SigCgt"], 16) for facts in (ours, theirs))
    assert caught ^ usual == 1 << (STACKS_SIGNAL - 1)
    for found, expected in (
        (ours["first"]["descriptors beyond stderr"], theirs["first"]["descriptors beyond stderr"]),
        (ours["descriptors at the end"], theirs["descriptors at the end"]),
    ):
        known = [*expected, ours["first"]["environment"]["ELASTICD_STACKS"]]
        more = [one for one in found if "/libffi.so" not in one or one in expected]
        more = [one for one in more if not one.startswith("socket:") or one in expected or way == "cold"]
        assert sorted(more) == sorted(known)


@pytest.mark.parametrize("way", WAYS)
def test_heartbeat_thread_after_import_torch(runs: Runs, way: str) -> None:
    """The heartbeat thread is one more once torch is imported."""
    both = runs(way)
    ours, theirs = both.elasticd.facts(), both.torchrun.facts()
    assert ours["first"]["threads"] == theirs["first"]["threads"] == 1
    assert ours["torch"]["threads"][2] == theirs["torch"]["threads"][2] + 1
    assert ours["consequences"]["threads"] == theirs["consequences"]["threads"] == 1, "threading knows nothing of it"


def unseeded(facts: Facts) -> dict[str, Any]:
    return {**facts["random"]["unseeded"], **facts["streams of torch"]["unseeded"], "numpy": facts["numpy"]["unseeded"]}


def test_random_streams_differ_from_rank_to_rank(runs: Runs) -> None:
    ranks = [unseeded(runs("script").elasticd.facts(rank)) for rank in (0, 1)]
    assert [name for name in ranks[0] if ranks[0][name] == ranks[1][name]] == []


@pytest.mark.parametrize("way", WARM)
def test_exit_handlers_run_last_in_first_out(runs: Runs, way: str) -> None:
    def order(outcome: Outcome) -> list[str]:
        return (outcome.out / "exits-0").read_text().splitlines()

    both = runs(way)
    assert order(both.elasticd) == order(both.torchrun) == ["thread", "registered last", "registered first"]


@pytest.mark.system
def test_a_compiled_function_is_the_same(runs: Runs) -> None:
    both = runs("thorough")
    assert both.elasticd.facts()["compiled"] == both.torchrun.facts()["compiled"]
    assert "raised" not in both.elasticd.facts()["compiled"]
