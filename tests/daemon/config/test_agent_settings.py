"""agent.toml and its variables: what is wrong in one line, what counts, what SIGHUP changes, what `config` shows."""

from __future__ import annotations

import json
import os
import pwd
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from docs.generate import settings as pages
from elasticd.errors import UsageError
from elasticd_agent.cli.main import main
from elasticd_agent.config.quantities import Seconds, parse_seconds, parse_size
from elasticd_agent.config.run_model import POLICY_FIELDS
from elasticd_agent.model.job import EntrypointMode, JobSpec, Policy, Tls
from elasticd_agent.model.records import Member, Round
from elasticd_agent.workers.environment import WorkerPaths, worker_environment
from elasticd_daemon import agent
from elasticd_daemon.config import load as load_module
from elasticd_daemon.config.agent_settings import NodeSettings, StoreSettings
from elasticd_daemon.config.decode import meta_of
from elasticd_daemon.config.job_file import JobFile, read_job
from elasticd_daemon.config.load import config_keys, installed_config, load, merge_reloaded, variable_name
from elasticd_daemon.config.reference import agent_keys, job_keys, template
from elasticd_daemon.config.store_options import store_policy, store_rendezvous
from elasticd_daemon.state_dir import exclusive_use
from tests.cli.test_closed_directory import closed_directory
from tests.daemon.config.wrong_files import cases_of
from tests.etcd import Authority

ROOT = Path(__file__).parents[3]


ETCD = '[store]\nbackend="etcd"\nendpoints=["h:2379"]\n'
TLS = ETCD.replace("h:2379", "https://h")
BAD = cases_of("bad_settings.txt", ETCD=ETCD, TLS=TLS)
SECRET = "s3cret-of-32-characters-or-more-x"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """An authority, a certificate of its, with and without its key, and somebody else's key."""
    made = [Authority(tmp_path_factory.mktemp("pki")) for _ in range(2)]
    mine, other = (one.client(certified=True) for one in made)
    assert mine.ca is not None
    assert mine.cert is not None
    assert mine.key is not None
    assert other.key is not None
    found = {"pem": mine.ca, "cert": mine.cert, "key": mine.key, "otherkey": other.key}
    return {name: path.read_bytes() for name, path in found.items()}


@pytest.fixture
def here(tmp_path: Path, pems: dict[str, bytes]) -> Path:
    """A directory of files that may, and may not, hold secrets."""
    files = {"token": 0o600, "open": 0o644, "group": 0o640, "gw": 0o660, "short": 0o600, "text": 0o600}
    for name, mode in files.items():
        (tmp_path / name).write_text("s3cret\n" if name == "short" else f"{SECRET}\n")
        (tmp_path / name).chmod(mode)
    for name, data in pems.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o600 if name.endswith("key") else 0o644)
    (tmp_path / "empty").touch(0o600)
    (tmp_path / "two").write_text("a\nb\n")
    (tmp_path / "two").chmod(0o600)
    (tmp_path / "dir").mkdir()
    return tmp_path


def _file(here: Path, text: str, name: str = "agent.toml") -> Path:
    path = here / name
    path.write_text(text.replace("TMP", str(here)))
    path.chmod(0o644)
    return path


def _load(here: Path, text: str, **environ: str) -> NodeSettings:
    return load(_file(here, text), environ)


@pytest.mark.parametrize(("text", "says"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_one_line(here: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        _load(here, text)
    expected = f"{here / 'agent.toml'}: {says}".replace("TMP", str(here))
    assert str(raised.value).startswith(expected.partition("…")[0])
    assert "…" in says or str(raised.value) == expected
    assert str(raised.value).isprintable()
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"SLOTS": "many"}, "ELASTICD_SLOTS: must be a whole number or auto, not 'many'"),
        ({"HTTP_PORT": "70000"}, "ELASTICD_HTTP_PORT: must be from 0 to 65535"),
        ({"HTTP_PRT": "1"}, "ELASTICD_HTTP_PRT: is not a variable elasticd reads; did you mean ELASTICD_HTTP_PORT?"),
        ({"SLOT": "4"}, "ELASTICD_SLOT: is not a variable elasticd reads; did you mean ELASTICD_SLOTS?"),
        (
            {"STORE_PASSWORD": "hunter2"},
            "ELASTICD_STORE_PASSWORD: is not a variable elasticd reads; did you mean ELASTICD_STORE_PASSWORD_FILE?",
        ),
        (
            {"STORE_ENDPOINTS": "h:1"},
            'ELASTICD_STORE_ENDPOINTS: is etcd\'s, but store.backend is local; write backend = "etcd"',
        ),
        (
            {"HEALTH_ALL_REDUCE": "maybe"},
            "ELASTICD_HEALTH_ALL_REDUCE: must be true or false, not text; write it as in all_reduce = true",
        ),
        ({"LIMITS_DIRECTORIES": "/a,b"}, "ELASTICD_LIMITS_DIRECTORIES: 'b' is not an absolute path; begin it with /"),
        (
            {"DRAIN_TIMEOUT": "soon"},
            "ELASTICD_DRAIN_TIMEOUT: 'soon' is not a time; write seconds or a unit, as in 500ms, 5s, 2m, 1.5h or 7d",
        ),
    ],
)
def test_what_is_wrong_with_a_variable(environ: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        load(None, {f"ELASTICD_{name}": text for name, text in environ.items()})
    assert str(raised.value) == says


def test_a_file_that_anybody_can_write_or_nobody_can_read(here: Path) -> None:
    path = _file(here, "")
    path.chmod(0o666)
    with pytest.raises(
        UsageError, match=r"agent\.toml: anybody can write it, and so have this node run anything; chmod o-w"
    ):
        load(path, {})
    with pytest.raises(UsageError, match=r"^/no/such\.toml: cannot be read: No such file or directory$"):
        load(Path("/no/such.toml"), {})
    with pytest.raises(UsageError, match=r"dir: cannot be read: Is a directory$"):
        load(here / "dir", {})


# ---- what counts


def test_an_empty_file_is_a_node_that_works_alone(here: Path) -> None:
    assert _load(here, "") == load(None, {})
    alone = load(None, {})
    assert (alone.store.backend, alone.http.bind, alone.http.port) == ("local", "127.0.0.1", 9411)
    assert (alone.socket_path, alone.logs) == (Path("/run/elasticd/agent.sock"), Path("/var/lib/elasticd/logs"))
    assert store_rendezvous(alone).backend == "memory"
    assert store_policy(alone) == Policy()


FULL = """
node = "n7"
slots = 2
labels = ["rack=7"]
drain_timeout = "90s"
keep_ended = 3600
lease = "6s"
[store]
backend = "etcd"
endpoints = ["https://a:2379", "https://[::1]"]
user = "elasticd"
password_file = "TMP/group"
ca = "TMP/pem"
[http]
bind = "::"
token_file = "TMP/token"
[health]
disk_free_min = "2GiB"
[limits]
directories = ["/tmp"]
"""


def test_a_whole_one(here: Path) -> None:
    found = _load(here, FULL)
    assert (found.node, found.slots, found.labels) == ("n7", 2, ("rack=7",))
    assert (found.drain_timeout_s, found.keep_ended_s, found.health.disk_free_min_bytes) == (90, 3600, 2 << 30)
    place = store_rendezvous(found)
    assert place.endpoints == (("a", 2379), ("::1", 2379))
    assert (place.user, place.password, place.node) == ("elasticd", SECRET, "n7")
    assert place.tls == Tls(ca=here / "pem")
    assert "s3cret" not in repr(place)
    # The times that only follow from the lease follow, as they do for `elasticd run`.
    assert (store_policy(found).lease_s, store_policy(found).renewal_s, store_policy(found).store_timeout_s) == (
        6,
        1,
        0.9,
    )


def test_https_alone_means_tls_by_the_systems_authorities(here: Path) -> None:
    assert store_rendezvous(_load(here, TLS)).tls == Tls()
    assert store_rendezvous(_load(here, ETCD)).tls is None


def test_variables_count_more_than_the_file(here: Path) -> None:
    found = _load(
        here,
        FULL,
        ELASTICD_SLOTS="1",
        ELASTICD_HTTP_PORT="0",
        ELASTICD_STORE_ENDPOINTS="https://b:1, https://c:2",
        ELASTICD_LABELS="",
        ELASTICD_HEALTH_ALL_REDUCE="no",
        ELASTICD_DRAIN_TIMEOUT="2m",
        ELASTICD_STATE_DIR="/x",
        ELASTICD_LEASE="5",
    )
    assert (found.slots, found.http.port, found.labels, found.health.all_reduce) == (1, 0, ("rack=7",), False)
    assert (found.drain_timeout_s, found.state_dir, found.lease_s) == (120, Path("/x"), 5)
    assert found.store.endpoints == ("https://b:1", "https://c:2")


def test_every_key_has_a_variable_and_words() -> None:
    names = [variable_name(key) for key, _ in config_keys(NodeSettings)]
    assert len(set(names)) == len(names) >= 40
    assert all(row.help for row in (*agent_keys(), *job_keys()))
    assert [row.key for row in agent_keys()] == [key for key, _ in config_keys(NodeSettings)]


def test_what_workers_get_is_never_read_as_settings() -> None:
    round = Round(number=1, members=(Member("n", "i", (0,)),), reason="")
    spec = JobSpec("python", EntrypointMode.SCRIPT, "train.py", (), ROOT, "j", "r", checkpoint_dir=Path("/c"))
    told = worker_environment(round, "n", 0, WorkerPaths("b", "n", "e", "w"), spec, 3, "x")
    sources = "".join(path.read_text() for tree in ("elasticd", "agents") for path in (ROOT / tree).rglob("*.py"))
    mentioned = set(re.findall(r'"(ELASTICD_[A-Z_]+)"', sources)) | {n for n in told if n.startswith("ELASTICD_")}
    mentioned -= {"ELASTICD_NODE", "ELASTICD_SLOTS"}  # health plugins are told these two settings as what they are
    assert {"ELASTICD_ROUND", "ELASTICD_STACKS", "ELASTICD_WORKER_EVENTS", "ELASTICD_LAUNCH"} <= mentioned
    assert not mentioned & {variable_name(key) for key, _ in config_keys(NodeSettings)}
    assert load(None, dict.fromkeys(mentioned, "1")) == load(None, {})


def test_a_secret_that_its_group_reads_is_one(here: Path) -> None:
    assert _load(here, '[http]\ntoken_file = "TMP/group"').http.token_file == here / "group"


@pytest.mark.parametrize(
    ("text", "value"),
    [("500ms", 0.5), ("5s", 5), (" 2 m ", 120), ("1.5h", 5400), ("7d", 604800), ("3", 3), (3, 3), (0.25, 0.25), (0, 0)],
)
def test_times(text: Any, value: float) -> None:
    assert parse_seconds(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("10GiB", 10 << 30), ("500MB", 500_000_000), ("1.5 KiB", 1536), (7, 7), ("8", 8), ("9B", 9)]
)
def test_sizes(text: Any, value: int) -> None:
    assert parse_size(text) == value


# ---- SIGHUP


def test_what_reloads_counts_and_what_does_not_is_said(here: Path) -> None:
    old = _load(here, FULL)
    new = _load(
        here,
        FULL.replace('"90s"', '"2m"')
        .replace("slots = 2", "slots = 1")
        .replace("2GiB", "3GiB")
        .replace("https://a", "https://b"),
    )
    counts, sentences = merge_reloaded(old, new)
    assert (counts.drain_timeout_s, counts.health.disk_free_min_bytes) == (120, 3 << 30)
    assert (counts.slots, counts.store) == (2, old.store)
    later = "takes effect at the next start (SIGUSR2, which disturbs no job, or systemctl restart, which drains)"
    assert sentences == [
        f"slots: 1 instead of 2 {later}",
        'drain_timeout: "2m" instead of "90s" from now on',
        f'store.endpoints: ["https://b:2379", "https://[::1]"] instead of ["https://a:2379", "https://[::1]"] {later}',
        'health.disk_free_min: "3GiB" instead of "2GiB" from now on',
    ]
    assert merge_reloaded(new, new) == (new, [])


def test_limits_reload(here: Path) -> None:
    counts, sentences = merge_reloaded(_load(here, ""), _load(here, '[limits]\nusers=["root"]\ndirectories=["/tmp"]\n'))
    assert counts.limits.users == ("root",)
    assert sentences
    assert all(sentence.endswith(" from now on") for sentence in sentences)


def test_where_the_daemon_is_found_and_who_it_is_never_reloads() -> None:
    fixed = {field.encode_name for field in msgspec.structs.fields(NodeSettings) if not meta_of(field).reloadable}
    assert fixed >= {"node", "slots", "state_dir", "run_dir", "lease", "renewal"}
    assert not any(meta_of(field).reloadable for field in msgspec.structs.fields(StoreSettings))


# ---- elasticd config


def _config(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["config", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_check_is_one_line(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(here, FULL)
    valid = f"{path}: nothing is wrong with it; it is an agent's configuration"
    assert _config(capsys, "check", str(path)) == (0, f"{valid}\n", "")
    monkeypatch.setenv("ELASTICD_HTTP_PORT", "9999")
    assert (
        _config(capsys, "check", str(path))[1] == f"{valid}; these variables count more than it: ELASTICD_HTTP_PORT\n"
    )
    path = _file(here, 'command = ["t.py"]\nworkdir = "/tmp"\nlease = "6s"\n', "j.toml")
    assert _config(capsys, "check", str(path)) == (0, f"{path}: nothing is wrong with it; it is a job file\n", "")
    wrong = _file(here, "worker = 3\n", "j.toml")
    why = f"elasticd config: error: {wrong}: worker: is not a key; did you mean workers?\n"
    assert _config(capsys, "check", "--job", str(wrong)) == (2, "", why)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "the following arguments are required: verb"),
        (["chek"], "argument verb: invalid choice: 'chek'"),
        (["check", "a", "b"], "unrecognized arguments: b"),
        (["check", "--jsn", "a"], "unrecognized arguments: --jsn"),
        (["check", "--job", "--agent", "a"], "argument --agent: not allowed with argument --job"),
        (["example", "a"], "example reads no file; it prints one"),
        (["check", "/no/such"], "/no/such: cannot be read: No such file or directory"),
        (["check", "a\0b"], "'a\\x00b' cannot be the name of a file"),
        (["check", "j.yaml"], "j.yaml: YAML is not understood; write TOML, as elasticd config example --job prints it"),
    ],
)
def test_what_config_refuses(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    code, out, err = _config(capsys, *argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"elasticd config: error: {says}")


def test_templates_mean_the_defaults_and_every_line_of_them_is_understood(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, agent, _ = _config(capsys, "example")
    _, job, _ = _config(capsys, "example", "--job")
    assert (agent, job) == (template("agent"), template("job"))
    assert _load(here, agent) == load(None, {})
    assert read_job(job.encode(), "toml", "j").hang_floor is None
    written = set(re.findall(r"^#?([a-z_]+) = ", job, re.MULTILINE))
    assert written == {row.key for row in job_keys()}
    for line in re.findall(r"^#([a-z_]+ = .*)$", job, re.MULTILINE):
        if not line.startswith(("command", "workdir")):
            read_job(f'command = ["t.py"]\nworkdir = "/tmp"\n{line}\n'.encode(), "toml", "j")


def test_times_are_documented_with_the_policys_defaults() -> None:
    documented = {f.encode_name for f in msgspec.structs.fields(JobFile) if meta_of(f).help}
    times = {key.key: key.default for key in job_keys() if key.key in documented & POLICY_FIELDS.keys()}
    assert len(times) == 11
    for key, default in times.items():
        assert parse_seconds(default.strip('"')) == getattr(Policy(), POLICY_FIELDS[key]), key


@pytest.mark.parametrize("which", ["agent", "jobs"])
def test_pages_are_in_step(which: Any) -> None:
    assert (ROOT / "docs" / f"{which}.md").read_text() == getattr(pages, f"{which}_page")(), "make docs"


# ---- whatever is written

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=10),
    st.sampled_from(["/tmp", "etcd", "auto", "5s", "h:2379", "../x", "::", "root"]),
)
_NAMES = st.sampled_from(
    [part for key, _ in config_keys(NodeSettings) for part in key.split(".")]
    + ["job", "store", "http", "limits", "command"]
)
_TABLES = st.dictionaries(
    _NAMES,
    st.one_of(_SCALARS, st.lists(_SCALARS, max_size=3), st.dictionaries(_NAMES, _SCALARS, max_size=4)),
    max_size=5,
)


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    _TABLES,
    st.dictionaries(
        st.sampled_from([variable_name(key) for key, _ in config_keys(NodeSettings)]), st.text(max_size=9), max_size=2
    ),
)
def test_whatever_is_written_only_a_usage_error(tmp_path: Path, table: dict[str, Any], environ: dict[str, str]) -> None:
    path = tmp_path / "agent.json"
    path.write_text(json.dumps(table))
    path.chmod(0o600)
    found, said = None, ""
    try:
        found = load(path, environ)
    except UsageError as error:
        said = str(error)
    assert found is not None or (said.isprintable() and len(said) < 600)
    if found is not None:
        assert isinstance(found.lease_s, Seconds)
        assert merge_reloaded(found, found) == (found, [])


# ---- examples


def test_the_examples_are_right(here: Path) -> None:
    job = read_job((ROOT / "examples" / "job.toml").read_bytes(), "toml", "job.toml")
    assert (job.node_range, job.slot_range, job.env["OMP_NUM_THREADS"]) == ((2, 8), (8, 8), "8")
    text = (ROOT / "examples" / "agent.toml").read_text()
    for name, made in {"ca.pem": "pem", "node.pem": "cert", "node.key": "key"}.items():
        (here / made).rename(here / name)
    me = pwd.getpwuid(os.geteuid()).pw_name
    text = text.replace("/etc/elasticd", str(here)).replace('"elasticd"', f'"{me}"')
    found = _load(here, text)
    assert (found.http.bind, found.drain_timeout_s) == ("0.0.0.0", 90)
    assert store_rendezvous(found).tls == Tls(here / "ca.pem", here / "node.pem", here / "node.key")


@pytest.fixture
def shut() -> Iterator[Path]:
    main(["config", "check", str(ROOT / "examples" / "agent.toml")])
    with closed_directory() as path:
        yield path


@pytest.mark.parametrize(
    "variables",
    [
        ("STORE_CA=x", "STORE_BACKEND=etcd", "STORE_ENDPOINTS=https://h"),
        ("HTTP_TLS_CERT=x", "HTTP_TLS_KEY=/dev/null"),
        ("HEALTH_PLUGINS_DIR=x",),
        ("STATE_DIR=x",),
        ("HTTP_SOCKET=x",),
    ],
)
def test_path_in_a_closed_directory_is_one_line(shut: Path, variables: tuple[str, ...]) -> None:
    """SIGHUP ended the agent with a traceback, and every later start of it."""
    first, *others = (f"ELASTICD_{variable}".split("=") for variable in variables)
    with pytest.raises(UsageError, match=f"^the environment: '{shut}/x' cannot be reached: Permission denied$"):
        load(None, {first[0]: f"{shut}/x", **dict(others)})


def test_configuration_that_only_others_may_read_is_there(shut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As install.sh makes it: `elasticd doctor` and `elasticd report` of other users ended with a traceback."""
    monkeypatch.setattr(load_module, "DEFAULT_FILE", shut / "agent.toml")
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        load(installed_config(), {})
    monkeypatch.setattr(load_module, "DEFAULT_FILE", shut.parent / "agent.toml")
    assert installed_config() is None


def test_state_directory_that_is_closed_is_said_to_be(shut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICD_STATE_DIR", str(shut))
    assert agent.agent(["--check"]) == 0
    with pytest.raises(UsageError, match=f"state_dir {shut}: Permission denied"), exclusive_use(shut):
        pass
