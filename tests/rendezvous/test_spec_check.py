"""What two nodes of a job must have in common, what each may choose, and how a difference is worded."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.config.run_options import parse_run
from elasticd_agent.rendezvous.spec_check import differences, mismatch, spec_document

MEET = "--nnodes 2:4 --rdzv-id j --rdzv-backend etcd --rdzv-endpoint h"


def asked(command: str, cwd: str = "/here", **environ: str) -> dict[str, Any]:
    spec, policy, _ = parse_run(shlex.split(command), environ, Path(cwd))
    return spec_document(spec, policy)


MINE = asked(f"{MEET} train.py --lr 0.1")


def heard(mine: dict[str, Any], theirs: object) -> tuple[str | None, list[str]]:
    """Why a node may not take part, and what was remarked."""
    said: list[str] = []
    raw = theirs if isinstance(theirs, bytes) else json.dumps(theirs).encode()
    return mismatch(json.dumps(mine).encode(), raw, said.append), said


def test_machine_settings_are_not_compared() -> None:
    """Slots, interpreters, directories, names and addresses are each machine's own."""
    other = asked(
        "--nproc-per-node 3:8 --nnodes 2:4 --rdzv-id j --rdzv-backend etcd --rdzv-endpoint a,b --node-id n2 "
        "--local-addr 10.0.0.2 --log-dir /logs -t 3 --master-port 7 --preload numpy "
        "--shutdown-timeout 9 /opt/code/train.py --lr 0.1",
        cwd="/there",
        PYTHON_EXEC="/opt/python",
    )
    assert heard(MINE, other) == (None, [])
    one, two = (asked(f"--rdzv-backend etcd --rdzv-endpoint h --rdzv-id j --run 1 --spares {n} a.py") for n in (0, 1))
    assert heard(one, two) == (None, []), "a job on one node may move to a machine with more slots"


DIFFERENT = [
    (f"{MEET} other.py --lr 0.1", "the script is 'train.py' here, 'other.py' there"),
    (f"{MEET} --no-python train.py --lr 0.1", "how the script is started is 'script' here, 'exec' there"),
    (f"{MEET} --run 1 train.py --lr 0.1", "--run is '0' here, '1' there"),
    (f"{MEET} --nnodes 3:5 train.py --lr 0.1", "--nnodes MIN is 2 here, 3 there; --nnodes MAX is 4 here, 5 there"),
    (f"{MEET} --checkpoint-dir /ck train.py --lr 0.1", "--checkpoint-dir is not given here, given there"),
    (f"{MEET} --max-restarts 3 train.py --lr 0.1", "--max-restarts is not given here, 3 there"),
    (f"{MEET} --grow never train.py --lr 0.1", "--grow is 'auto' here, 'never' there"),
    (f"{MEET} --rdzv-conf last_call_timeout=9 train.py --lr 0.1", "last_call_timeout is 5.0 here, 9.0 there"),
    (f"{MEET} --spares 1 train.py --lr 0.1", "--spares is 0 here, 1 there"),
    (f"{MEET} --evidence-timeout 9 train.py --lr 0.1", "evidence_timeout is 3.0 here, 9.0 there"),
    (f"{MEET} --replace-timeout 9 train.py --lr 0.1", "replace_timeout is 600.0 here, 9.0 there"),
]


@pytest.mark.parametrize(("command", "phrase"), DIFFERENT, ids=[phrase for _, phrase in DIFFERENT])
def test_difference_is_named_and_refused(command: str, phrase: str) -> None:
    assert heard(MINE, asked(command)) == (phrase, [])


def test_other_role_may_run_another_script() -> None:
    assert heard(MINE, asked(f"{MEET} --role eval -m evaluate --every 5")) == (None, [])
    refused, _ = heard(MINE, asked(f"{MEET} --role eval --nnodes 2:5 -m evaluate"))
    assert refused == "--nnodes MAX is 4 here, 5 there", "but they are one job"


def test_other_arguments_within_a_role_are_logged() -> None:
    """They are allowed, and sometimes a mistake."""
    refused, remarks = heard(MINE, asked(f"{MEET} train.py --lr 0.2"))
    assert refused is None
    assert remarks == [
        "allowed, but of one role: the script's arguments are '--lr 0.1' here, '--lr 0.2' there, the job's first node"
    ]


def test_module_is_compared_by_its_whole_name() -> None:
    assert differences(asked(f"{MEET} -m a.train"), asked(f"{MEET} -m b.train"))


def test_arguments_are_compared_one_by_one() -> None:
    _, remarks = heard(asked(f"{MEET} t.py 'a b'"), asked(f"{MEET} t.py a b"))
    assert "arguments are \"'a b'\" here, 'a b' there" in remarks[0]


def test_long_values_are_shown_where_they_differ() -> None:
    mine, other = (asked(f"{MEET} -m t.{'x' * 500}{end}") for end in ("a", "b"))
    phrase = differences(mine, other)
    assert len(phrase) < 300
    assert "xxa' here" in phrase
    assert "xxb' there" in phrase


def test_document_survives_json() -> None:
    assert json.loads(json.dumps(MINE)) == MINE


def test_undecodable_name_can_be_compared() -> None:
    refused, _ = heard(MINE, asked(f"{MEET} bad\udcff.py \udcfe"))
    assert refused is not None
    assert "bad" in refused


def test_field_of_a_newer_version_is_no_difference() -> None:
    newer = {**MINE, "version": "1.9", "colour": "red"}
    assert heard(MINE, newer) == heard(newer, MINE) == (None, [])
    first = {name: MINE[name] for name in ("entrypoint", "args", "mode", "role", "min_nodes", "max_nodes", "run")}
    assert heard(MINE, first) == (None, []), "the first version wrote no more"


def test_other_major_version_is_refused() -> None:
    refused, _ = heard(MINE, {"version": "2.0", "script": "train.py"})
    assert refused == "its first node speaks version 2.0, this one 1.0; run the same major version everywhere"


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"[]", b"17", b'"x"', b"null", b"[" * 100_000])
def test_undecodable_spec_is_refused(garbage: bytes) -> None:
    assert heard(MINE, garbage) == ("the spec written by its first node cannot be decoded", [])
