"""What two nodes of a job must have been asked alike, and how they say where they differ."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from elasticd_agent.agreement import differences, digest, spec_document
from elasticd_agent.arguments import parse_run
from elasticd_agent.config import JobSpec

MEET = "--nnodes 2:4 --rdzv-id j --rdzv-backend etcd --rdzv-endpoint h"


def job(command: str, cwd: str = "/here", **environ: str) -> JobSpec:
    return parse_run(shlex.split(command), environ, Path(cwd))[0]


MINE = job(f"{MEET} train.py --lr 0.1")


def test_what_is_a_machines_own_affair_does_not_count() -> None:
    other = job(
        "--nproc-per-node 3:8 --nnodes 2:4 --rdzv-id j --rdzv-backend etcd --rdzv-endpoint a,b --node-id n2 "
        "--local-addr 10.0.0.2 --log-dir /logs --checkpoint-dir /mnt/ck -t 3 --master-port 7 --preload numpy "
        "--shutdown-timeout 9 /opt/code/train.py --lr 0.1",
        cwd="/there",
        PYTHON_EXEC="/opt/python",
    )
    assert digest(other) == digest(MINE)
    assert differences(spec_document(MINE), spec_document(other)) == ""


DIFFERENT = [
    (f"{MEET} other.py --lr 0.1", "the script is 'train.py' here, 'other.py' there"),
    (f"{MEET} train.py --lr 0.2", "the script's arguments are '--lr 0.1' here, '--lr 0.2' there"),
    (f"{MEET} --no-python train.py --lr 0.1", "how the script is started is 'script' here, 'exec' there"),
    (f"{MEET} --role eval train.py --lr 0.1", "--role is 'default' here, 'eval' there"),
    (f"{MEET} --run 1 train.py --lr 0.1", "--run is '0' here, '1' there"),
    (f"{MEET} --nnodes 3:5 train.py --lr 0.1", "--nnodes MIN is 2 here, 3 there; --nnodes MAX is 4 here, 5 there"),
]


@pytest.mark.parametrize(("command", "phrase"), DIFFERENT, ids=[phrase for _, phrase in DIFFERENT])
def test_what_differs_is_named(command: str, phrase: str) -> None:
    other = job(command)
    assert digest(other) != digest(MINE)
    assert differences(spec_document(MINE), spec_document(other)) == phrase


def test_a_module_is_its_whole_name() -> None:
    assert digest(job(f"{MEET} -m a.train")) != digest(job(f"{MEET} -m b.train"))


def test_arguments_are_not_merely_joined() -> None:
    assert digest(job(f"{MEET} t.py 'a b'")) != digest(job(f"{MEET} t.py a b"))
    mine, other = spec_document(job(f"{MEET} t.py 'a b'")), spec_document(job(f"{MEET} t.py a b"))
    assert differences(mine, other) == "the script's arguments are \"'a b'\" here, 'a b' there"


def test_long_values_are_shown_where_they_begin_to_differ() -> None:
    mine, other = (spec_document(job(f"{MEET} t.py {'x' * 500} {end}")) for end in ("a", "b"))
    phrase = differences(mine, other)
    assert len(phrase) < 300
    assert "xx a' here" in phrase
    assert "xx b' there" in phrase


def test_the_digest_is_the_same_in_every_process_and_the_document_survives_json() -> None:
    look = (
        "from pathlib import Path; from elasticd_agent.agreement import digest\n"
        "from elasticd_agent.arguments import parse_run; import sys\n"
        "print(digest(parse_run(sys.argv[1:], {}, Path('/x'))[0]))\n"
    )
    argv = [sys.executable, "-c", look, *shlex.split(f"{MEET} train.py --lr 0.1")]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    assert run.stdout.strip() == digest(MINE)
    # Agents of neighbouring versions compare digests: as long as the document does not change, it must not, either.
    assert digest(MINE) == "21f808c65d1f4087"
    document = spec_document(MINE)
    assert json.loads(json.dumps(document)) == document


def test_a_name_that_is_not_text_can_be_agreed_on() -> None:
    spec = job(f"{MEET} bad\udcff.py \udcfe")
    assert len(digest(spec)) == 16
    assert "bad" in differences(spec_document(MINE), spec_document(spec))


def test_a_field_only_a_newer_version_knows_differs_for_nobody() -> None:
    document = spec_document(MINE)
    assert differences(document, {**document, "colour": "red"}) == ""
    assert differences({**document, "colour": "red"}, document) == ""
