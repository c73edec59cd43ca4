"""Job files: what is wrong with them, in one line; what they mean, by the command line's own rules; and that nothing
anybody writes into one does more than that.
"""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticd.errors import UsageError
from elasticd_agent.config.elasticd_flags import ELASTICD_FLAGS
from elasticd_agent.config.run_model import POLICY_FIELDS
from elasticd_agent.config.run_options import parse_run
from elasticd_agent.config.torchrun_flags import TORCHRUN_FLAGS
from elasticd_agent.model.job import EntrypointMode, JobSpec, Policy, Rendezvous, Streams
from elasticd_daemon.config import documents
from elasticd_daemon.config.job_file import (
    JOB_KEY_HINTS,
    JobFile,
    decode_job,
    from_json,
    read_job,
    runner_model,
    to_json,
)
from elasticd_daemon.job_dir import JobFiles
from tests.daemon.config.wrong_files import cases_of

ABOUT = 'command = ["train.py"]\nworkdir = "/tmp"\n'
TOML = cases_of("bad_jobs.txt", ABOUT=ABOUT)
JSON: list[tuple[bytes, str]] = [
    (b"\xff", "is not text: byte 0 is not UTF-8"),
    (b'{"a":1,"a":2}', "a: is given twice; keep one"),
    (b"[1]", "must be a table of keys and values, not a list"),
    (b'{"a":NaN}', "NaN is not a number JSON knows"),
    (b'{"a":"\\ud800"}', "'\\ud800' holds half a character (a lone surrogate)"),
    (b'{"command":["a"],"workdir":"/tmp","id":1e999}', 'id: must be text, not a number; write it as in id = "llm-7b"'),
    (b"null", "must be a table of keys and values, not nothing"),
    (b"", "is not JSON: …"),
    (b'{"command":["a"],"workdir":"/tmp","\\ud800":1}', "'\\ud800' holds half a character (a lone surrogate)"),
]


@pytest.mark.parametrize(("text", "says"), TOML, ids=range(len(TOML)))
def test_what_is_wrong_is_one_line(text: str, says: str) -> None:
    assert _said(text.encode(), "toml").startswith(f"job.toml: {says.removesuffix('…')}")
    if not says.endswith("…"):
        assert _said(text.encode(), "toml") == f"job.toml: {says}"


@pytest.mark.parametrize(("text", "says"), JSON, ids=range(len(JSON)))
def test_what_is_wrong_with_json(text: bytes, says: str) -> None:
    assert _said(text, "json").startswith(f"job.json: {says.removesuffix('…')}")


def _said(data: bytes, kind: documents.FileFormat) -> str:
    with pytest.raises(UsageError) as raised:
        read_job(data, kind, f"job.{kind}")
    return str(raised.value)


def test_the_same_in_two_languages() -> None:
    toml = b"""
        id = "llm"
        command = ["train.py", "--lr", "1e-3"]
        workdir = "/srv/train"
        nodes = "2:8"
        workers = 4
        hang_floor = "6s"
        env = { OMP_NUM_THREADS = "4" }
        module = false
    """
    job = read_job(toml, "toml", "t")
    assert job == from_json(to_json(job))
    assert job == read_job(json.dumps(json.loads(to_json(job))).encode(), "json", "j")
    assert (job.node_range, job.slot_range) == ((2, 8), (4, 4))
    assert job.hang_floor == 6


def test_a_file_too_long_is_not_even_parsed() -> None:
    assert _said(b"#" * (documents.MAX_JOB_FILE_BYTES + 1), "toml").startswith(
        "job.toml: is longer than the 65536 bytes"
    )


def test_a_job_of_an_agents_file_must_fit_into_the_store_as_well() -> None:
    with pytest.raises(UsageError, match=r"^env: makes a job of \d+ bytes; at most 65536 are kept$"):
        decode_job({"command": ["t.py"], "workdir": "/tmp", "env": {"A": "x" * documents.MAX_JOB_FILE_BYTES}})
    whole = decode_job(
        {"command": ["t.py"], "workdir": "/tmp", "env": {"A": "x" * (documents.MAX_JOB_FILE_BYTES - 100)}}
    )
    assert from_json(to_json(whole)) == whole


@pytest.mark.parametrize(
    ("text", "nodes", "labels"),
    [
        ('nodes = { gpu = "h100" }', (1, 1), ("gpu=h100",)),
        ('nodes = { count = "2:8", gpu = "h100", rack = 7 }', (2, 8), ("gpu=h100", "rack=7")),
        ('nodes = { gpu = "h100" }\nnode_labels = ["ssd"]', (1, 1), ("ssd", "gpu=h100")),
        ("nodes = {}", (1, 1), ()),
    ],
)
def test_labels_beside_the_number_of_nodes(text: str, nodes: tuple[int, int], labels: tuple[str, ...]) -> None:
    job = read_job((ABOUT + text).encode(), "toml", "t")
    assert (job.node_range, job.node_labels) == (nodes, labels)
    assert from_json(to_json(job)) == job


def test_every_flag_is_a_key_or_says_why_not() -> None:
    keys = {field.encode_name for field in msgspec.structs.fields(JobFile)}
    flags = {flag.dest for flag in (*TORCHRUN_FLAGS, *ELASTICD_FLAGS)}
    assert not flags - keys - set(JOB_KEY_HINTS)
    assert not keys & set(JOB_KEY_HINTS)
    assert keys - flags - set(POLICY_FIELDS) == {
        "id",
        "limits",
        "node_labels",
        "priority",
        "command",
        "workdir",
        "python",
        "env",
        "user",
        "nodes",
        "workers",
    }


def _choices(job: JobFile, **given: Any) -> tuple[JobSpec, Policy]:
    asked: dict[str, Any] = {
        "job_id": "llm",
        "run": "7",
        "node": "n1",
        "slots": (0,),
        "rendezvous": Rendezvous(),
        "files": JobFiles(Path("/state/jobs/llm.7")),
        "devices": (),
    }
    spec, policy, agent = runner_model(job, **{**asked, **given})
    assert agent.event_log == Path("/state/jobs/llm.7/events.jsonl")
    return spec, policy


RULES = """
    max_restarts = 4
    max_restarts_per_hour = 9
    grow = "never"
    replace_timeout = "2m"
    hold_timeout = "20s"
    hang_floor = "7s"
    hang_factor = 3
    stopped_after = "4s"
    slow_ceiling = "1h"
    slow_factor = 2.5
    evidence_timeout = "2s"
    on_hang = "report"
    startup_ceiling = "5m"
    first_step_ceiling = "6m"
    progress_ceiling = "7m"
    join_timeout = "8m"
    last_call_timeout = "9s"
    lease = "5s"
    renewal = "1.5s"
    store_timeout = "0.8s"
    seen_timeout = "1.1s"
    adopt_timeout = "50s"
    store_away = "4m"
    grow_debounce = "2s"
    node_cooloff = "6s"
    shutdown_timeout = "1.5s"
"""


def test_a_job_file_and_the_command_line_mean_the_same() -> None:
    job = read_job((ABOUT + RULES).encode(), "toml", "t")
    spec, policy = _choices(job)
    command = (
        "--max-restarts=4 --max-restarts-per-hour=9 --grow=never --replace-timeout=2m --hold-timeout=20s "
        "--hang-floor=7s --hang-factor=3 --stopped-after=4s --slow-ceiling=1h --slow-factor=2.5 --evidence-timeout=2s "
        "--on-hang=report --startup-ceiling=5m --first-step-ceiling=6m --progress-ceiling=7m "
        "--rdzv-conf=join_timeout=480,last_call_timeout=9,lease=5,renewal=1.5,store_timeout=0.8,seen_timeout=1.1,"
        "adopt_timeout=50,store_away=240,grow_debounce=2,node_cooloff=6 train.py"
    )
    _, told, _ = parse_run(command.split(), {}, Path("/tmp"))
    assert policy == replace(told, shutdown_timeout_s=1.5)
    assert spec.entrypoint == "train.py"
    usual = Policy()
    same = [f.name for f in fields(Policy) if getattr(policy, f.name) == getattr(usual, f.name)]
    # Only what no flag can say is as it is for everybody: each of the keys above has done something.
    assert set(same) == {"no_progress_limit", "backoff_s", "user_error_wait_s", "slot_strikes", "slot_cooloff_s"}


def test_what_is_not_given_is_what_the_command_line_takes() -> None:
    _, policy = _choices(read_job(ABOUT.encode(), "toml", "t"))
    assert policy == parse_run(["train.py"], {}, Path("/tmp"))[1]


def test_one_time_alone_brings_the_others_along_as_on_the_command_line() -> None:
    _, policy = _choices(read_job((ABOUT + 'lease = "1s"\n').encode(), "toml", "t"))
    assert policy == parse_run(["--rdzv-conf=lease=1", "train.py"], {}, Path("/tmp"))[1]


def test_variables_of_torchrun_in_the_daemons_environment_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    _, policy = _choices(read_job(ABOUT.encode(), "toml", "t"))
    assert (policy.max_restarts, policy.shutdown_timeout_s) == (None, 30)


def test_arguments_reach_the_script_whatever_they_look_like() -> None:
    words = ["a b.py", "--nnodes", "3", "--", "-m", "x=y,z", "$HOME", ""]
    job = msgspec.structs.replace(read_job(ABOUT.encode(), "toml", "t"), command=tuple(words))
    spec, _ = _choices(from_json(to_json(job)))
    assert [spec.entrypoint, *spec.args] == words


def test_where_and_as_whom() -> None:
    text = (
        ABOUT + 'checkpoint_dir = "/c"\nmodule = true\npreload = ["a.b", "c"]\nvirtual_local_rank = true\nrole = "r"\n'
    )
    spec, _ = _choices(
        read_job((text + 'python = "/v/bin/python"\nnodes = 2\n').encode(), "toml", "t"), rendezvous=ETCD
    )
    assert (spec.mode, spec.python, spec.cwd, spec.checkpoint_dir) == (
        EntrypointMode.MODULE,
        "/v/bin/python",
        Path("/tmp"),
        Path("/c"),
    )
    assert (spec.preload, spec.virtual_local_rank, spec.role) == (("a.b", "c"), True, "r")
    assert (spec.job_id, spec.run, spec.log_dir) == ("llm", "7", Path("/state/jobs/llm.7/logs"))
    assert (spec.rendezvous.node, spec.rendezvous.min_nodes, spec.rendezvous.max_nodes) == ("n1", 2, 2)
    assert spec.redirects == {0: Streams.BOTH}


ETCD = Rendezvous(backend="etcd", endpoints=(("h", 2379),))


def test_slots_stand_for_the_nodes_gpus() -> None:
    job = read_job((ABOUT + 'workers = "1:3"\n').encode(), "toml", "t")
    spec, _ = _choices(job, slots=(1, 3), devices=("0", "GPU-a", "2", "GPU-b"))
    assert (spec.devices, spec.min_workers, spec.max_workers) == (("GPU-a", "GPU-b"), 1, 2)
    assert _choices(job, slots=(1, 3), devices=())[0].devices == ()
    hidden = read_job((ABOUT + 'workers = "1:3"\nenv = { CUDA_VISIBLE_DEVICES = "" }\n').encode(), "toml", "t")
    spec, _ = _choices(hidden, slots=(1, 3), devices=("0", "1", "2", "3"))
    assert spec.devices == ()
    assert spec.base_environment({})["CUDA_VISIBLE_DEVICES"] == ""


def test_too_few_slots_and_too_few_nodes_are_said() -> None:
    job = read_job((ABOUT + "workers = 2\n").encode(), "toml", "t")
    with pytest.raises(UsageError, match=r"^workers: 2, but the job has 1 slot on node n1$"):
        _choices(job)
    job = read_job((ABOUT + "nodes = 2\n").encode(), "toml", "t")
    with pytest.raises(
        UsageError, match=r"^nodes: 2, but a local store is one node's; the job needs store\.backend etcd$"
    ):
        _choices(job)


def test_spares_are_nodes_or_the_slots_of_the_only_node() -> None:
    def asked(text: str, slots: int, backend: Literal["memory", "etcd"]) -> tuple[int, int, int]:
        store = Rendezvous(backend, (("h", 1),)) if backend == "etcd" else Rendezvous()
        spec, _ = _choices(read_job((ABOUT + text).encode(), "toml", "t"), slots=tuple(range(slots)), rendezvous=store)
        return spec.max_workers, spec.spares, spec.slots

    assert asked("spares = 2\nworkers = 4", 5, "memory") == (4, 1, 5), "the node had no more"
    assert asked("spares = 2\nnodes = 2\nworkers = 4", 4, "etcd") == (4, 2, 4)
    assert asked('spares = 2\nnodes = "1:2"\nworkers = 4', 4, "memory") == (4, 0, 4)
    with pytest.raises(UsageError, match="spares: -1"):
        read_job((ABOUT + "spares = -1").encode(), "toml", "t")


def test_an_elastic_job_takes_the_one_node_of_a_local_store() -> None:
    spec, _ = _choices(read_job((ABOUT + 'nodes = "1:4"\n').encode(), "toml", "t"))
    assert (spec.rendezvous.min_nodes, spec.rendezvous.max_nodes) == (1, 1)


def test_what_the_job_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "ELASTICD_HTTP_PORT",
        "PYTHONPATH",
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "PET_NNODES",
        "RANK",
        "VIRTUAL_ENV",
    ):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/machine")
    job = read_job((ABOUT + 'env = { PATH = "/own", LD_LIBRARY_PATH = "/jobs" }\n').encode(), "toml", "t")
    environment = _choices(job)[0].environment
    assert environment["NCCL_SOCKET_IFNAME"] == "eth7"
    assert (environment["PATH"], environment["LD_LIBRARY_PATH"]) == ("/own", "/jobs")
    assert not [name for name in environment if environment[name] == "x"]


def test_a_user_brings_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/var/empty")
    environment = _choices(read_job((ABOUT + 'user = "root"\n').encode(), "toml", "t"))[0].environment
    assert (environment["HOME"], environment["USER"]) == ("/root", "root")
    with pytest.raises(UsageError, match=r"^user: 'nobody-at-all' does not exist on this machine;"):
        _choices(read_job((ABOUT + 'user = "nobody-at-all"\n').encode(), "toml", "t"))


# ---- whatever is written


_WORDS = st.one_of(
    st.sampled_from([*(f.encode_name for f in msgspec.structs.fields(JobFile)), *JOB_KEY_HINTS, "x"]),
    st.text(max_size=8),
)
_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=12),
        st.sampled_from(["/tmp", "2:8", "5s", "1.5h", "-1s", "0", "auto", "${local_rank}", "--x", "\x00", "é"]),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=6,
)
_BOUNDED = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@_BOUNDED
@given(st.dictionaries(_WORDS, _VALUES, max_size=6), st.booleans())
def test_whatever_the_values_only_a_usage_error(table: dict[str, Any], whole: bool) -> None:
    if whole:
        table = {"command": ["t.py"], "workdir": "/tmp", **table}
    _read(json.dumps(table).encode(), "json")


def _read(data: bytes, kind: documents.FileFormat) -> None:
    job, said = None, ""
    try:
        job = read_job(data, kind, "job")
    except UsageError as error:
        said = str(error)
    if job is None:
        assert said.startswith("job: ")
        assert said.isprintable(), "one line"
        assert len(said) < 600
        return
    assert from_json(to_json(job)) == job
    spec, policy = _choices(job, slots=tuple(range(job.slot_range[0])), rendezvous=ETCD)
    assert spec.entrypoint == job.command[0]
    assert math.isfinite(policy.hang_factor)


LARGE = {
    "dotted key": ("toml", b"a." * 30_000 + b"a = 1"),
    "quoted parts": ("toml", b'"a" . ' * 10_000 + b"a = 1"),
    "header": ("toml", b"[" + b"a." * 30_000 + b"a]"),
    "inline": ("toml", b'x = { y = """z"""", ' + b"a." * 30_000 + b"a = 1 }"),
    "tables": ("toml", b"[[a.b]]\n" * 7_000),
    "quotes": ("toml", b'"' + b'\\"' * 30_000),
    "lists": ("json", b'{"x": [' + b"1," * 30_000 + b"1]}"),
    "numbers": ("json", b'{"nodes": ' + b"9" * 60_000 + b"}"),
}


@pytest.mark.parametrize("name", LARGE)
def test_file_of_a_stranger_takes_little_memory_and_time(name: str) -> None:
    """An agent parses it: 60 kB must not take the memory that the node's training needs."""
    kind, data = LARGE[name]
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(UsageError):
            read_job(data, kind, "the job")  # type: ignore[arg-type]  # mypy: a str for its Literal
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        assert time.process_time() - began < 20, "tracing makes it ten times slower"
    finally:
        tracemalloc.stop()


def test_text_with_many_dots_is_no_deep_table() -> None:
    dots = ".".join("abcdefghijklmnopqrstuvwxyz")
    text = f'command = ["train.py", "{dots}", \'{dots}\', """{dots}"""] # {dots}\nworkdir = "/tmp"'
    assert read_job(text.encode(), "toml", "the job").command == ("train.py", dots, dots, dots)
