"""Where several nodes meet, as the command line says it: torchrun's words, our words, and what cannot work."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.errors import UsageError
from elasticd_agent.config.run_options import parse_run
from elasticd_agent.model.job import JobSpec, Policy, Rendezvous, Tls
from elasticd_agent.workers.launcher.requests import worker_base_environment

HERE = Path("/somewhere")
MEET = "--nnodes 2:8 --rdzv-id bert --rdzv-backend"


def job(command: str, **environ: str) -> JobSpec:
    return parse_run(shlex.split(command), environ, HERE)[0]


def policy(command: str, **environ: str) -> Policy:
    return parse_run(shlex.split(command), environ, HERE)[1]


def test_the_command_of_the_readme() -> None:
    spec = job(f"{MEET} etcd --rdzv-endpoint one:2379,two:2380 t.py")
    assert spec.rendezvous == Rendezvous("etcd", (("one", 2379), ("two", 2380)), min_nodes=2, max_nodes=8)
    assert (spec.job_id, spec.run) == ("bert", "0")
    assert (spec.master_addr, spec.master_port) == ("localhost", None)
    assert policy(f"{MEET} etcd --rdzv-endpoint one t.py") == Policy()


def test_a_job_of_one_node_meets_nobody_unless_told_where() -> None:
    alone = ("", "--standalone", "--rdzv-backend c10d", "--rdzv-backend c10d --rdzv-endpoint localhost:0", "--nnodes 1")
    assert [job(f"{options} t.py").rendezvous for options in alone] == [Rendezvous()] * len(alone)
    ignored = "--standalone --rdzv-backend etcd --rdzv-endpoint x:1:2"
    assert job(f"{ignored} t.py").rendezvous == Rendezvous()
    for nnodes in ("1", "1:1"):
        spec = job(f"--nnodes {nnodes} --rdzv-backend c10d --rdzv-endpoint h t.py")
        assert spec.rendezvous == Rendezvous("c10d", (("h", 29400),))
        assert spec.run != job(f"--nnodes {nnodes} --rdzv-backend c10d --rdzv-endpoint h t.py").run
    assert job("--nnodes 1:4 --rdzv-id j --rdzv-backend c10d --rdzv-endpoint h t.py").rendezvous.max_nodes == 4


ENDPOINTS = [
    ("c10d", "host", [("host", 29400)], False),
    ("c10d", "host:1234", [("host", 1234)], False),
    ("c10d", "10.0.0.7:1", [("10.0.0.7", 1)], False),
    ("c10d", "[::1]", [("::1", 29400)], False),
    ("c10d", "[fe80::1%eth0]:65535", [("fe80::1%eth0", 65535)], False),
    ("c10d", "a_b-c.example.org.:9", [("a_b-c.example.org.", 9)], False),
    ("etcd", "host", [("host", 2379)], False),
    ("etcd", "a:1, b ,[2001:db8::1]:3,a:1", [("a", 1), ("b", 2379), ("2001:db8::1", 3)], False),
    ("etcd", "http://a:1", [("a", 1)], False),
    ("etcd", "https://a:1/,HTTPS://[::1]", [("a", 1), ("::1", 2379)], True),
]


@pytest.mark.parametrize(("backend", "text", "wanted", "tls"), ENDPOINTS, ids=[text for _, text, _, _ in ENDPOINTS])
def test_endpoints(backend: str, text: str, wanted: list[tuple[str, int]], tls: bool) -> None:
    meets = job(f"{MEET} {backend} --rdzv-endpoint '{text}' t.py").rendezvous
    assert (meets.backend, list(meets.endpoints), meets.tls) == (backend, wanted, Tls() if tls else None)


def test_who_this_node_is() -> None:
    meets = job(
        f"{MEET} c10d --rdzv-endpoint h --local-addr 10.0.0.5 --node-id n7 --rdzv-conf is_host=Yes t.py"
    ).rendezvous
    assert (meets.local_addr, meets.node, meets.is_host) == ("10.0.0.5", "n7", True)
    meets = job(f"{MEET} c10d --rdzv-endpoint h t.py", PET_RDZV_CONF="is_host=0", PET_LOCAL_ADDR="h5").rendezvous
    assert (meets.local_addr, meets.node, meets.is_host) == ("h5", None, False)


def test_slurm_stands_in_for_the_id_and_the_run() -> None:
    several = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h"
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "3"}
    spec = job(f"{several} t.py", **slurm)
    assert (spec.job_id, spec.run) == ("4711", "3")
    spec = job(f"{several} --rdzv-id mine --run 12 t.py", **slurm)
    assert (spec.job_id, spec.run) == ("mine", "12")
    assert job(f"{several} t.py", PET_RDZV_ID="pet").job_id == "pet"
    spec = job("t.py", **slurm)  # steps of one allocation are jobs of their own
    assert spec.job_id != "4711"
    assert spec.run != "3"


TIMES = [
    ("timeout=30", {"join_timeout_s": 30}),
    ("join_timeout=4", {"join_timeout_s": 4, "last_call_timeout_s": 2}),
    ("last_call_timeout=1", {"last_call_timeout_s": 1}),
    ("keep_alive_interval=5", {"renewal_s": 5, "lease_s": 15, "store_timeout_s": 0.9}),
    ("keep_alive_max_attempt=6", {"renewal_s": 1, "lease_s": 6, "store_timeout_s": 0.9}),
    ("keep_alive_interval=1,keep_alive_max_attempt=2", {"renewal_s": 1, "lease_s": 2, "store_timeout_s": 0.45}),
    ("lease=9", {"lease_s": 9, "renewal_s": 3, "store_timeout_s": 0.9}),
    ("lease=1", {"lease_s": 1, "renewal_s": 1 / 3, "store_timeout_s": 0.3}),
    ("lease=9,renewal=1,store_timeout=2,seen_timeout=2.5", {"lease_s": 9, "renewal_s": 1, "store_timeout_s": 2}),
    ("seen_timeout=0.5", {"seen_timeout_s": 0.5, "store_timeout_s": 0.45}),
    ("replace_timeout=0,hold_timeout=9", {"replace_timeout_s": 0, "hold_timeout_s": 9}),
    ("adopt_timeout=7,store_away=8", {"adopt_timeout_s": 7, "store_away_s": 8}),
    ("grow_debounce=0,node_cooloff=0", {"grow_debounce_s": 0, "node_cooloff_s": 0}),
    (r"\'join_timeout=5,last_call_timeout=1\'", {"join_timeout_s": 5, "last_call_timeout_s": 1}),
    ("close_timeout=30,read_timeout=60,heartbeat_timeout=5,use_libuv=1", {"lease_s": 3, "store_timeout_s": 0.9}),
]


@pytest.mark.parametrize(("conf", "wanted"), TIMES, ids=[conf for conf, _ in TIMES])
def test_times_come_from_the_rendezvous_conf(conf: str, wanted: dict[str, float]) -> None:
    got = policy(f"{MEET} c10d --rdzv-endpoint h --rdzv-conf {conf} t.py")
    assert {name: getattr(got, name) for name in wanted} == pytest.approx(wanted)


def test_times_and_growth_have_flags_of_their_own() -> None:
    got = policy("--replace-timeout 5 --hold-timeout 7.5 --grow never t.py")
    assert got == Policy(replace_timeout_s=5, hold_timeout_s=7.5, grow="never")
    assert policy("--hold-timeout 7 --rdzv-conf hold_timeout=7.0 t.py").hold_timeout_s == 7


def test_tls_and_credentials(tmp_path: Path) -> None:
    etcd = f"{MEET} etcd --rdzv-endpoint"
    assert job(f"{etcd} h --rdzv-conf protocol=HTTPS t.py").rendezvous.tls == Tls()
    assert job(f"{etcd} h --rdzv-conf cacert=ca.pem t.py").rendezvous.tls == Tls(HERE / "ca.pem")
    for names in ("cacert=a,cert=/b,key=c", "ca_cert=a,ssl_cert=/b,ssl_cert_key=c"):
        tls = job(f"{etcd} https://h --rdzv-conf {names},protocol=https t.py").rendezvous.tls
        assert tls == Tls(HERE / "a", Path("/b"), HERE / "c")
    (tmp_path / "secret").write_text("p, w=d\n")
    meets = job(f"{etcd} h --rdzv-conf user=root,password_file={tmp_path}/secret t.py").rendezvous
    assert (meets.user, meets.password) == ("root", "p, w=d")
    assert "w=d" not in repr(meets)
    meets = job(f"{etcd} h t.py", ELASTICD_ETCD_USER="u", ELASTICD_ETCD_PASSWORD="p").rendezvous
    assert (meets.user, meets.password) == ("u", "p")
    meets = job(f"{etcd} h --rdzv-conf user=v,password=q t.py", ELASTICD_ETCD_PASSWORD="p").rendezvous
    assert (meets.user, meets.password) == ("v", "q")
    c10d = job(f"{MEET} c10d --rdzv-endpoint h t.py", ELASTICD_ETCD_PASSWORD="p").rendezvous
    assert c10d.password is None


@pytest.mark.parametrize(
    ("line", "endpoint", "job_id"),
    [
        ("--master-addr a.b --master-port 5", ("a.b", 5), "static-a.b-5"),
        ("--master-addr fe80::1 --master-port 5", ("fe80::1", 5), "static--fe80-1-5"),
        ("--master-addr [::1] --master-port 5 --rdzv-id j", ("::1", 5), "j"),
        ("--rdzv-endpoint a:6", ("a", 6), "static-a-6"),
        ("--master-addr a.b", ("a.b", 29500), "static-a.b-29500"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_nodes_with_ranks_meet_at_the_master(line: str, endpoint: tuple[str, int], job_id: str, rank: int) -> None:
    given = job(f"--nnodes 2 --node-rank {rank} {line} t.py")
    meets = given.rendezvous
    assert (meets.backend, meets.endpoints, meets.node_rank, meets.is_host) == ("c10d", (endpoint,), rank, rank == 0)
    assert (meets.min_nodes, meets.max_nodes, given.job_id, given.master_port) == (2, 2, job_id, None)


@pytest.mark.parametrize(
    ("line", "environ", "job_id"),
    [("", {}, "c10d-h-1"), ("", {"SLURM_JOB_ID": "7"}, "7"), ("--rdzv-id j", {"SLURM_JOB_ID": "7"}, "j")],
)
def test_endpoint_of_c10d_names_the_job(line: str, environ: dict[str, str], job_id: str) -> None:
    assert job(f"--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint h:1 {line} t.py", **environ).job_id == job_id


H = "--rdzv-endpoint h"
WRONG = [
    ("--nnodes 0", "at least 1 is needed"),
    ("--nnodes -1", "at least 1 is needed"),
    ("--nnodes 0:2", "at least 1 is needed"),
    ("--nnodes 4:2", "MIN 4 exceeds MAX 2; write 2:4"),
    ("--nnodes x", "neither a number nor MIN:MAX"),
    ("--nnodes 1:2:3", "neither a number nor MIN:MAX"),
    ("--nnodes 1:", "neither a number nor MIN:MAX"),
    ("--nnodes ''", "neither a number nor MIN:MAX"),
    ("--nnodes ²", "neither a number nor MIN:MAX"),
    ("--nnodes 1.5", "neither a number nor MIN:MAX"),
    (f"--nnodes {'9' * 5000}", "neither a number nor MIN:MAX"),
    ("--nnodes 2", "needs --master-addr HOST --master-port PORT of the first node"),
    ("--nnodes 1:4", "a number of nodes that changes needs --rdzv-backend c10d or etcd"),
    ("--nnodes 2 --master-addr a --master-port 5 --node-rank 2", "--node-rank 2: --nnodes 2 have the ranks 0 to 1"),
    ("--nnodes 2 --master-addr a --master-port 5 --node-rank -1", "--node-rank -1: --nnodes 2 have the ranks 0 to 1"),
    ("--nnodes 2 --standalone", "--standalone is one node"),
    ("--nnodes 2 --rdzv-backend c10d", "needs --rdzv-endpoint HOST:PORT, where the nodes meet"),
    ("--rdzv-backend etcd", "--nnodes 1:1 with --rdzv-backend etcd needs --rdzv-endpoint"),
    (f"--nnodes 2 --rdzv-backend etcd {H}", "needs --rdzv-id JOB, the same on every node"),
    (f"--nnodes 1:2 --rdzv-backend etcd {H} --rdzv-id none", "random ids, one per node, cannot meet"),
    (f"{MEET} etcd-v2 {H}", "write --rdzv-backend etcd, which speaks v3 here"),
    (f"{MEET} zeus {H}", "'zeus' is not supported: give static, c10d or etcd"),
    (f"{MEET} etcd {H} --rdzv-id a/b", "job id 'a/b' must be printable"),
    (f"{MEET} etcd {H} --node-id a/b", "node id 'a/b' must be printable"),
    (f"{MEET} etcd {H} --node-id ''", "node id '' must be printable"),
    (f"{MEET} etcd {H} --run ''", "--run '': several nodes need a number"),
    (f"{MEET} etcd {H} --run nightly-b", "--run 'nightly-b': several nodes need a number"),
    (f"{MEET} c10d --rdzv-endpoint a,b", "c10d has one host; several endpoints are etcd's"),
    (f"{MEET} c10d --rdzv-endpoint https://a", "https:// is not understood for c10d; nothing goes before the host"),
    (f"{MEET} etcd --rdzv-endpoint ftp://a", "ftp:// is not understood for etcd; http:// or https:// is"),
    (f"{MEET} etcd --rdzv-endpoint https://a,b", "before all of them, or before none"),
    (f"{MEET} c10d --rdzv-endpoint h:0", "0 is no port nodes can meet at"),
    (f"{MEET} c10d --rdzv-endpoint h:65536", "--rdzv-endpoint 'h:65536' has no valid port"),
    (f"{MEET} etcd --rdzv-endpoint a,,b", "is not HOST:PORT"),
    (f"{MEET} etcd --rdzv-endpoint https:///x", "is not the name of a host"),
    (f"{MEET} etcd --rdzv-endpoint https://root:pw@h", "holds a user name: give --rdzv-conf user=NAME"),
    ("--rdzv-conf a", "'a' is not KEY=VALUE"),
    ("--rdzv-conf =1", "'=1' is not KEY=VALUE"),
    ("--rdzv-conf lease=", "'lease=' is not KEY=VALUE"),
    ("--rdzv-conf leese=3", r"unknown key 'leese'; did you mean lease\?"),
    ("--rdzv-conf zzz=3", "unknown key 'zzz'; there are adopt_timeout, "),
    ("--rdzv-conf lease=3,lease=4", "lease is given twice"),
    ("--rdzv-conf timeout=3,join_timeout=4", "timeout=3 and join_timeout=4 contradict each other"),
    ("--hold-timeout 3 --rdzv-conf hold_timeout=4", "hold_timeout=4 and --hold-timeout 3 contradict each other"),
    ("--rdzv-conf lease=4,keep_alive_interval=1", "lease=4 and keep_alive_interval .* = 3 contradict each other"),
    ("--rdzv-conf lease=soon", "lease=soon must be a number"),
    ("--rdzv-conf keep_alive_max_attempt=0", "must be a whole number, at least 1"),
    ("--rdzv-conf keep_alive_max_attempt=nan", "must be a whole number, at least 1"),
    ("--rdzv-conf lease=nan", "lease nan s must be more than 0 seconds"),
    ("--rdzv-conf lease=-3", "lease -3 s must be more than 0 seconds"),
    ("--rdzv-conf lease=inf", "lease inf s is longer than a year"),
    ("--rdzv-conf join_timeout=0", "join_timeout 0 s must be more than 0"),
    ("--rdzv-conf last_call_timeout=-1", "last_call_timeout -1 s cannot be negative"),
    ("--replace-timeout -1", "replace_timeout -1 s cannot be negative"),
    ("--replace-timeout 1e300", r"replace_timeout 1e\+300 s is longer than a year"),
    ("--replace-timeout x", "'x' is not a time as in 500ms, 5s"),
    ("--grow sometimes", "invalid choice: 'sometimes'"),
    (
        "--rdzv-conf keep_alive_interval=5,keep_alive_max_attempt=1",
        r"lease 5 s must exceed renewal 5 s \+ 2 × store_timeout 0.9 s, .*; raise it by more than 1.8 s",
    ),
    (f"{MEET} etcd {H} --rdzv-conf is_host=1", "is_host is for c10d, not for etcd"),
    (f"{MEET} c10d {H} --rdzv-conf cacert=x", "cacert is for etcd, not for c10d"),
    (f"{MEET} c10d {H} --rdzv-conf is_host=maybe", "is_host=maybe must be 1 or 0"),
    (f"{MEET} c10d {H} --rdzv-conf store_type=file", "store_type=file is not supported"),
    (f"{MEET} etcd {H} --rdzv-conf protocol=grpc", "protocol=grpc is neither http nor https"),
    (f"{MEET} etcd --rdzv-endpoint http://h --rdzv-conf protocol=https", "contradicts the scheme"),
    (f"{MEET} etcd --rdzv-endpoint http://h --rdzv-conf cacert=x", "cacert for TLS, but the endpoint is http"),
    (f"{MEET} etcd {H} --rdzv-conf cacert=x,ca_cert=y", "ca_cert is given twice, under two names"),
    (f"{MEET} etcd {H} --rdzv-conf cert=x", "cert without key; a client certificate is both, or neither"),
    (f"{MEET} etcd {H} --rdzv-conf key=x", "key without cert"),
    (f"{MEET} etcd {H} --rdzv-conf user=u", "the etcd user 'u' needs a password: .*password_file=FILE"),
    (f"{MEET} etcd {H} --rdzv-conf password=u", "an etcd password without a user: .*ELASTICD_ETCD_USER"),
    (f"{MEET} etcd {H} --rdzv-conf user=u,password=u,password_file=x", "password and password_file contradict"),
    (f"{MEET} etcd {H} --rdzv-conf user=u,password_file=/nope", "password_file: '/nope' cannot be read: No such file"),
    (f"{MEET} etcd {H} --rdzv-conf user=u,password_file=/dev/null", "must hold one line, the secret"),
    (f"{MEET} etcd {H} --rdzv-conf user=u,password_file=/dev/zero", "must hold one line, the secret"),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG, ids=[options[:70] for options, _ in WRONG])
def test_one_sentence_says_what_is_wrong(options: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        job(f"{options} t.py")
    assert "\n" not in str(caught.value)


SCRAPS = st.sampled_from([*"h:/[]@%,.=-0 9\n", "c10d", "::1", "https://", "1.2", "2379", "ü", "\0", "lease", "=3"])
TEXTS = st.lists(SCRAPS, max_size=8).map("".join)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(["--nnodes", "--rdzv-endpoint", "--rdzv-conf", "--node-id", "--run", "--rdzv-id"]), TEXTS, TEXTS)
def test_whatever_is_typed_is_understood_or_refused(option: str, text: str, endpoint: str) -> None:
    for backend in ("c10d", "etcd"):
        argv = [*shlex.split(f"{MEET} {backend}"), f"--rdzv-endpoint={endpoint}", f"{option}={text}", "t.py"]
        with contextlib.suppress(UsageError):
            meets = parse_run(argv, {}, HERE)[0].rendezvous
            for host, port in meets.endpoints:  # what was understood can be written down again
                again = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                assert job(f"{MEET} c10d --rdzv-endpoint {shlex.quote(again)} t.py").rendezvous.endpoints == (
                    (host, port),
                )


def test_a_password_file_that_is_not_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read: it is not text"):
        job(f"{MEET} etcd {H} --rdzv-conf user=u,password_file={tmp_path}/secret t.py")


def test_the_stores_credentials_stay_with_the_agent() -> None:
    theirs = worker_base_environment({"ELASTICD_ETCD_PASSWORD": "p", "ELASTICD_ETCD_USER": "u", "HOME": "/h"}, 1)
    assert {name for name in theirs if name.startswith("ELASTICD")} == set()
    assert theirs["HOME"] == "/h"
