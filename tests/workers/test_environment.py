"""What workers on a machine with GPUs are given for NCCL, and that the user's own word counts more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elasticd_agent.workers.environment import (
    FR_BUFFER_VARIABLES,
    FR_FILE_VARIABLES,
    FR_ON_TIMEOUT_VARIABLE,
    FR_PIPE_VARIABLE,
    NCCL_DEFAULTS,
    nccl_dump_paths,
    nccl_environment,
)

ROUND = Path("/run/round-7")
PAGE = Path(__file__).parents[2] / "docs" / "nccl.md"


def test_every_variable_is_on_the_page() -> None:
    env = nccl_environment({}, ROUND, None)
    assert set(env) == {*FR_BUFFER_VARIABLES, *FR_FILE_VARIABLES, FR_PIPE_VARIABLE, *NCCL_DEFAULTS}
    assert set(re.findall(r"`(TORCH_\w+)`", PAGE.read_text())) >= set(env)
    for name, value in NCCL_DEFAULTS.items():
        assert re.search(rf"`{name}`.*\b{value}\b", PAGE.read_text()), name


def test_flight_recorder_files_by_round_and_rank() -> None:
    env = nccl_environment({}, ROUND, None)
    assert nccl_dump_paths(env, 3) == (ROUND / "nccl-pipe-3.pipe", ROUND / "nccl-flight-3")


@pytest.mark.parametrize("name", [*FR_BUFFER_VARIABLES, *FR_FILE_VARIABLES, FR_PIPE_VARIABLE, *NCCL_DEFAULTS])
def test_user_settings_take_precedence(name: str) -> None:
    ours = nccl_environment({name: "/mine-"}, ROUND, None)
    assert name not in ours
    twins = next((names for names in (FR_BUFFER_VARIABLES, FR_FILE_VARIABLES) if name in names), ())
    assert {ours.get(twin, "/mine-") for twin in twins} <= {"/mine-"}, "both names of a setting say the same"


def test_where_the_user_wants_it_is_where_it_is_looked_for() -> None:
    given = {FR_PIPE_VARIABLE: "/tmp/p_", FR_FILE_VARIABLES[1]: "/tmp/f_"}
    assert nccl_dump_paths({**given, **nccl_environment(given, ROUND, None)}, 0) == (
        Path("/tmp/p_0.pipe"),
        Path("/tmp/f_0"),
    )


@pytest.mark.parametrize(
    "given",
    [
        {FR_BUFFER_VARIABLES[0]: "0"},
        {FR_BUFFER_VARIABLES[1]: "0"},
        {FR_PIPE_VARIABLE: ""},
        {FR_BUFFER_VARIABLES[0]: "many"},
    ],
)
def test_disabled_nccl_dump_paths(given: dict[str, str]) -> None:
    assert nccl_dump_paths({**given, **nccl_environment(given, ROUND, None)}, 0) is None


@pytest.mark.parametrize(
    ("torch", "names"),
    [((2, 6), "old"), ((2, 7), "old"), ((2, 8), "new"), ((2, 13), "new"), ((3, 0), "new"), (None, "both")],
)
def test_names_by_torch_version(torch: tuple[int, int] | None, names: str) -> None:
    """torch warns of a name that it has renamed, in every worker."""
    env = nccl_environment({}, ROUND, torch)
    new, old = (
        (FR_BUFFER_VARIABLES[0] in env, FR_FILE_VARIABLES[0] in env),
        (FR_BUFFER_VARIABLES[1] in env, FR_FILE_VARIABLES[1] in env),
    )
    assert (all(new), all(old)) == (any(new), any(old)) == (names != "old", names != "new")
    assert nccl_dump_paths(env, 3) == (ROUND / "nccl-pipe-3.pipe", ROUND / "nccl-flight-3")


@pytest.mark.parametrize(("torch", "given"), [((2, 14), True), ((2, 15), False), ((3, 0), False), (None, True)])
def test_default_that_a_hook_warns_of_is_not_given(torch: tuple[int, int] | None, given: bool) -> None:
    """At an error, from torch 2.15 on. Both classes of NCCL have it as their default there."""
    assert (FR_ON_TIMEOUT_VARIABLE in nccl_environment({}, ROUND, torch)) is given


def test_without_gpus_there_is_none() -> None:
    assert nccl_dump_paths({}, 0) is None
