"""Where output goes: ours against what torchrun's own code answers for the same flags."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.model.job import EntrypointMode, JobSpec, Streams
from elasticd_agent.workers.logs import (
    STREAM_NAMES,
    OutputTarget,
    keeps_files,
    line_prefix,
    plan_stream,
    shows_all_ranks_apart,
)

WORKERS = 2
CHOICES: list[Mapping[int, Streams]] = [
    {},
    {0: Streams.OUT, 1: Streams.OUT},
    {0: Streams.BOTH, 1: Streams.BOTH},
    {0: Streams.OUT, 1: Streams.ERR},
    {1: Streams.BOTH},
]


def spec(**given: Any) -> JobSpec:
    return JobSpec(
        python=sys.executable, mode=EntrypointMode.SCRIPT, entrypoint="t.py", args=(), cwd=Path("/"), job_id="j",
        run="r", max_workers=WORKERS, **given,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [None, frozenset({0}), frozenset({1})])
def test_the_same_as_torchrun(tmp_path: Path, ranks: frozenset[int] | None) -> None:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std

    for redirects, tee in itertools.product(CHOICES, CHOICES):
        if not redirects and not tee:
            continue
        theirs = DefaultLogsSpecs(
            log_dir=str(tmp_path),
            redirects={rank: Std(int(streams)) for rank, streams in redirects.items()},
            tee={rank: Std(int(streams)) for rank, streams in tee.items()},
            local_ranks_filter=set(ranks) if ranks is not None else None,
        ).reify({rank: {} for rank in range(WORKERS)})
        ours = spec(log_dir=tmp_path, redirects=redirects, tee=tee, local_ranks_filter=ranks)
        for rank, (which, paths, teed) in itertools.product(
            range(WORKERS),
            [(Streams.OUT, theirs.stdouts, theirs.tee_stdouts), (Streams.ERR, theirs.stderrs, theirs.tee_stderrs)],
        ):
            planned = plan_stream(ours, which, tmp_path / "dir", rank, b"p:")
            expected = {"": None, os.devnull: Path(os.devnull)}.get(
                paths[rank], tmp_path / "dir" / f"{STREAM_NAMES[which]}.log"
            )
            assert (planned.path, planned.tailed) == (expected, rank in teed), (redirects, tee, ranks, rank, which)
            assert planned.prefix == (b"p:" if rank in teed else b"")


def test_log_dir_alone_keeps_and_shows_output(tmp_path: Path) -> None:
    ours = spec(log_dir=tmp_path, local_ranks_filter=frozenset({1}))
    assert plan_stream(ours, Streams.ERR, tmp_path, 1, b"p:") == OutputTarget(tmp_path / "stderr.log", tailed=True)
    assert plan_stream(ours, Streams.ERR, tmp_path, 0, b"p:") == OutputTarget(tmp_path / "stderr.log")


def test_filter_without_a_log_dir() -> None:
    assert plan_stream(spec(), Streams.OUT, Path("x"), 0, b"p:") == OutputTarget()
    filtered = spec(local_ranks_filter=frozenset({1}))
    assert plan_stream(filtered, Streams.OUT, Path("x"), 0, b"p:") == OutputTarget(Path(os.devnull))
    assert plan_stream(filtered, Streams.OUT, Path("x"), 1, b"p:") == OutputTarget()


def test_when_files_are_kept(tmp_path: Path) -> None:
    assert not keeps_files(spec())
    assert not keeps_files(spec(log_dir=Path(os.devnull)))
    assert keeps_files(spec(log_dir=tmp_path))
    assert keeps_files(spec(tee=CHOICES[1])), "in a temporary directory"


def test_prefixes_are_torchruns() -> None:
    assert line_prefix(None, "default", 5, 1) == b"[default1]:"
    template = "${role_name}/${rank}/${local_rank}/${unknown} "
    assert line_prefix(template, "trainer", 5, 1) == b"trainer/5/1/${unknown} "


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"max_workers": 2}, False),
        ({"max_workers": 2, "tee": {0: Streams.BOTH, 1: Streams.ERR}}, True),
        ({"max_workers": 2, "tee": {0: Streams.BOTH, 1: Streams.OUT}}, False),
        ({"tee": {0: Streams.ERR}, "log_dir": Path("logs")}, True),
        ({"redirects": {0: Streams.ERR}}, False),
        ({"local_ranks_filter": frozenset()}, False),
        ({"log_dir": Path("logs")}, True),
        ({"log_dir": Path("logs"), "max_workers": 2}, False),
    ],
)
def test_stderr_on_the_console_can_be_told_apart(given: dict[str, Any], expected: bool) -> None:
    assert shows_all_ranks_apart(replace(spec(), **{"max_workers": 1, **given}), Streams.ERR) is expected
