"""What a command line of `elasticd run` means, and the one line a wrong one is answered with."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from elasticd.errors import UsageError
from elasticd_agent.config.run_model import RunModel
from elasticd_agent.config.run_options import help_text, parse_run
from elasticd_agent.model.job import EntrypointMode, JobSpec, Policy, RunnerSettings, Streams
from elasticd_agent.system.gpus.devices import cpu_count, visible_gpus

HERE = Path("/somewhere")


def parse(command: str, **environ: str) -> RunModel:
    return parse_run(shlex.split(command), environ, HERE)


def job(command: str, **environ: str) -> JobSpec:
    return parse(command, **environ)[0]


def test_the_plainest_command() -> None:
    spec, policy, settings = parse("train.py --lr 0.1")
    assert (spec.mode, spec.entrypoint, spec.args) == (EntrypointMode.SCRIPT, "train.py", ("--lr", "0.1"))
    assert (spec.min_workers, spec.max_workers, spec.role, spec.cwd) == (1, 1, "default", HERE)
    assert (spec.master_addr, spec.master_port, spec.redirects, spec.tee) == ("localhost", None, {}, {})
    assert policy == Policy()
    assert policy.max_restarts is None
    assert settings == RunnerSettings()


def test_ids_are_random_unless_given() -> None:
    first, second = job("train.py"), job("train.py")
    assert first.job_id != second.job_id
    assert re.fullmatch(r"train-[0-9a-f]{8}", first.job_id), "scripts name their folders by TORCHELASTIC_RUN_ID"
    assert re.fullmatch(r"train-lm-[0-9a-f]{8}", job("-m pkg.train_lm").job_id)
    assert first.run != second.run
    assert job("--rdzv-id bert train.py").job_id == "bert"
    assert job("--rdzv-id bert --standalone train.py").job_id != "bert"
    assert job("--run 7 train.py").run == "7"


FIELDS = [
    ("-m pkg.train", {"mode": EntrypointMode.MODULE, "entrypoint": "pkg.train"}),
    ("--no-python ./job.sh a b", {"mode": EntrypointMode.EXEC, "entrypoint": "./job.sh", "args": ("a", "b")}),
    ("--run-path --no-python /x/train.py", {"mode": EntrypointMode.SCRIPT}),
    ("--nproc-per-node 4 t.py", {"min_workers": 4, "max_workers": 4, "devices": ()}),
    ("--nproc_per_node=2:8 t.py", {"min_workers": 2, "max_workers": 8}),
    ("--nproc-per-node cpu t.py", {"max_workers": cpu_count()}),
    ("--nproc-per-node auto t.py", {"max_workers": len(visible_gpus(os.environ)) or cpu_count()}),
    ("-r 3 --nproc-per-node 2 t.py", {"redirects": {0: Streams.BOTH, 1: Streams.BOTH}}),
    ("-t 0:1,3:2 --nproc-per-node 4 t.py", {"tee": {0: Streams.OUT, 3: Streams.ERR}}),
    ("-t 0:1,9:2 --nproc-per-node 4 t.py", {"tee": {0: Streams.OUT, 9: Streams.ERR}}),
    ("--local-ranks-filter 0,2 --nproc-per-node 4 t.py", {"local_ranks_filter": frozenset({0, 2})}),
    ("--duplicate-stdout-filters 'a b,c,,d' t.py", {"duplicate_stdout_filters": ("a b", "c,d")}),
    ("--master-port 29512 t.py", {"master_port": 29512, "master_addr": "127.0.0.1"}),
    ("--master-port 0 t.py", {"master_port": None, "master_addr": "127.0.0.1"}),
    ("--master-addr '[::1]' --master-port 29512 t.py", {"master_port": 29512, "master_addr": "::1"}),
    ("--rdzv-endpoint localhost:29512 t.py", {"master_port": 29512, "master_addr": "localhost"}),
    ("--rdzv-backend c10d --rdzv-endpoint h:1 --master-port 5 --node-rank 3 t.py", {"master_port": None}),
    ("--standalone --rdzv-backend etcd --master-port 5 t.py", {"master_port": None, "master_addr": "localhost"}),
    ("--nnodes 1 --nnodes 1:1 t.py", {"entrypoint": "t.py"}),
    ("--rdzv-conf timeout=3,rank=0 t.py", {"entrypoint": "t.py"}),
    ("--signals-to-handle SIGTERM,SIGUSR1,SIGTERM t.py", {"signals": ("SIGTERM", "SIGUSR1")}),
    ("--checkpoint-dir ck --log-dir /l t.py", {"checkpoint_dir": HERE / "ck", "log_dir": Path("/l")}),
    ("--log-dir '' --checkpoint-dir '' t.py", {"log_dir": None, "checkpoint_dir": None}),
    ("--log-dir /dev/null t.py", {"log_dir": Path("/dev/null")}),
    ("--preload numpy,torch.nn --preload numpy,x t.py", {"preload": ("numpy", "torch.nn", "x")}),
    ("--numa-binding core-complex t.py", {"numa_binding": "core-complex"}),
    ("--virtual-local-rank --role trainer t.py", {"virtual_local_rank": True, "role": "trainer"}),
    ("--start-method fork --monitor-interval 9 --local-addr h --event-log-handler null t.py", {"entrypoint": "t.py"}),
]


@pytest.mark.parametrize(("command", "wanted"), FIELDS, ids=[command for command, _ in FIELDS])
def test_what_the_job_becomes(command: str, wanted: dict[str, object]) -> None:
    spec = job(command)
    assert {name: getattr(spec, name) for name in wanted} == wanted


def test_rules_and_presentation() -> None:
    _, policy, settings = parse(
        "--max-restarts 5 --max-restarts-per-hour 9 --shutdown-timeout 3 --event-log e.jsonl --metrics-port 9401 "
        "--metrics-addr :: t.py"
    )
    assert policy == Policy(max_restarts=5, max_restarts_per_hour=9, shutdown_timeout_s=3.0)
    assert settings == RunnerSettings(HERE / "e.jsonl", 9401, "::")


def test_how_long_a_group_may_be_quiet() -> None:
    _, policy, _ = parse(
        "--hang-floor 1.5s --hang-factor 4 --stopped-after 900ms --slow-ceiling 2m --slow-factor 2 "
        "--evidence-timeout 1 --on-hang report "
        "--startup-ceiling 3m --first-step-ceiling 1.5h --progress-ceiling .5h t.py"
    )
    assert policy == Policy(
        hang_floor_s=1.5,
        hang_factor=4,
        stopped_after_s=0.9,
        slow_ceiling_s=120,
        slow_factor=2,
        evidence_timeout_s=1,
        on_hang="report",
        startup_ceiling_s=180,
        first_step_ceiling_s=5400,
        progress_ceiling_s=1800,
    )


@pytest.mark.parametrize("given", ["", "--evidence-timeout 20s"])
@pytest.mark.parametrize("floor", ["1s", "1m"])
def test_evidence_has_its_time_however_soon_hangs_are_seen(floor: str, given: str) -> None:
    expected = 20 if given else Policy().evidence_timeout_s
    assert parse(f"--hang-floor {floor} {given} t.py")[1].evidence_timeout_s == expected


def test_the_environment_stands_in() -> None:
    variables = {"PET_NPROC_PER_NODE": "3", "PET_STANDALONE": "1", "PET_MODULE": "0", "PET_MAX_RESTARTS": "0"}
    spec, policy, _ = parse("t.py", PYTHON_EXEC="/opt/python", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4", **variables)
    assert (spec.max_workers, spec.mode, spec.python) == (3, EntrypointMode.SCRIPT, "/opt/python")
    assert (policy.max_restarts, policy.shutdown_timeout_s) == (0, 4.0)
    assert job("--nproc-per-node 2 t.py", **variables).max_workers == 2
    assert parse("--shutdown-timeout 8 t.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="no")[1].shutdown_timeout_s == 8.0


def test_the_variable_of_the_checkpoint_directory_stands_in() -> None:
    """The agent has to know the directory: the first round is numbered above those that are in it."""
    own = {"ELASTICD_CHECKPOINT_DIR": "ck"}
    assert job("t.py", **own).checkpoint_dir == HERE / "ck"
    assert job("--checkpoint-dir /other t.py", **own).checkpoint_dir == Path("/other")
    assert job("t.py", ELASTICD_CHECKPOINT_DIR="").checkpoint_dir is None
    assert job("t.py", **own, ELASTICD_JOB="train-1").checkpoint_dir is None, (
        "a job that a worker of another one starts"
    )


WRONG = [
    ("", "the script to run is missing"),
    ("--standalone", "the script to run is missing"),
    ("--nprocs 2 t.py", r"unknown option --nprocs; elasticd run --help lists them"),
    ("--nodes 2 t.py", r"unknown option --nodes; did you mean --nnodes\?"),
    ("--checkpoints-dir c t.py", r"unknown option --checkpoints-dir; did you mean --checkpoint-dir\?"),
    ("--nproc-per-nood 3 t.py", r"unknown option --nproc-per-nood; did you mean --nproc-per-node\?"),
    ("--num_gpus 2 t.py", "--num_gpus is another launcher's option; write --nproc-per-node N"),
    ("--main_process_ip=a t.py", "--main_process_ip is another launcher's option; write --master-addr A"),
    ("--integrate auto t.py", "--integrate auto needs --checkpoint-dir"),
    ("--integrate auto --checkpoint-dir c --nproc-per-node 1:2 t.py", "a range lets that change: give one number"),
    ("--integrate auto --checkpoint-dir c --no-python t", "--no-python starts a program"),
    ("--zzz=3 t.py", "unknown option --zzz; elasticd run --help lists them"),
    ("--nproc-per-node 0 t.py", "at least 1 is needed"),
    ("--nproc-per-node -3 t.py", "at least 1 is needed"),
    ("--nproc-per-node 4:2 t.py", "MIN 4 exceeds MAX 2; write 2:4"),
    ("--nproc-per-node 1:2:3 t.py", "neither a number"),
    ("--nproc-per-node xpu t.py", "neither a number"),
    ("--nproc-per-node 1.5 t.py", "neither a number"),
    ("--node-rank 1 t.py", "rank 0"),
    ("--rdzv-endpoint host t.py", "not HOST:PORT"),
    ("--rdzv-id a/b t.py", "job id 'a/b' must be printable"),
    (f"--rdzv-id {'x' * 129} t.py", "129 bytes; at most 128"),
    ("--run '' t.py", "run token '' must be"),
    ("--max-restarts -1 t.py", "cannot be negative"),
    ("--max-restarts many t.py", "invalid int value: 'many'"),
    ("--max-restarts-per-hour 0 t.py", "must be at least 1"),
    ("--shutdown-timeout -1 t.py", "cannot be negative"),
    ("--no-python -m t", "contradict"),
    ("-r 4 t.py", "neither 0, 1, 2, 3 nor"),
    ("-t 0:1;1:1 t.py", "neither 0, 1, 2, 3 nor"),
    ("-t 2:3,5:1 --nproc-per-node 2 t.py", r"tee names local rank 2, 5, but 2 worker\(s\) have local ranks 0 to 1"),
    ("--local-ranks-filter 4 t.py", "names local rank 4"),
    ("--local-ranks-filter a t.py", "not a list of local ranks"),
    ("--log-dir /dev/null -r 3 t.py", "nothing to write to"),
    ("--master-port 70000 t.py", "ports go from 1 to 65535"),
    ("--master-port -5 t.py", "ports go from 1 to 65535"),
    ("--metrics-port 65536 t.py", "ports go from 0 to 65535"),
    ("--signals-to-handle SIGKILL t.py", "cannot be handled by any process"),
    ("--signals-to-handle TERM t.py", "no signal 'TERM'"),
    ("--preload a-b t.py", "not a module's name"),
    ("--preload a,,b t.py", "not a module's name"),
    ("--event-log-handler console t.py", "--event-log-handler is not supported: .*--event-log FILE"),
    ("--logs-specs mine t.py", "--logs-specs is not supported"),
    ("--numa-binding nodes t.py", "invalid choice: 'nodes'"),
    ("--start-method thread t.py", "invalid choice: 'thread'"),
    ("--hang-floor 5min t.py", "--hang-floor: '5min' is not a time as in 500ms, 5s, 2m or 1.5h"),
    ("--stopped-after -1s t.py", "stopped.after"),
    ("--evidence-timeout 0 t.py", "evidence_timeout 0 s must be more than 0"),
    ("--hang-factor 1 t.py", "hang_factor 1 must be more than 1"),
    ("--slow-factor 1 t.py", "slow_factor 1 must be more than 1"),
    ("--on-hang ignore t.py", "invalid choice: 'ignore'"),
]


@pytest.mark.parametrize(("command", "sentence"), WRONG, ids=[command[:60] for command, _ in WRONG])
def test_one_sentence_says_what_is_wrong(command: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        parse(command)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PET_STANDALONE", "yes"),
        ("PET_MAX_RESTARTS", "x"),
        ("PET_START_METHOD", "thread"),
        ("PET_MONITOR_INTERVAL", ""),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}={value!r} must be"):
        parse("t.py", **{name: value})


def test_without_a_gpu_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="no NVIDIA GPU can be seen"):
        parse("--nproc-per-node gpu t.py", CUDA_VISIBLE_DEVICES="")


def test_help_tells_the_restart_budget_and_every_option() -> None:
    text = help_text()
    assert "after 3 in a row without progress" in re.sub(r"\s+", " ", text)
    assert max(map(len, text.splitlines())) <= 120
    from elasticd_agent.config.elasticd_flags import ELASTICD_FLAGS
    from elasticd_agent.config.torchrun_flags import TORCHRUN_FLAGS

    assert [flag.dest for flag in (*TORCHRUN_FLAGS, *ELASTICD_FLAGS) if flag.documented_spellings[-1] not in text] == []
