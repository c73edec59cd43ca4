"""The promises of docs/security.md: a role for exactly our keys, secrets nowhere, nothing unpickled."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.errors import StoreRefused
from elasticd_agent.model.job import Tls
from elasticd_agent.model.keys import Keys
from elasticd_agent.store.etcd.store import EtcdStore
from elasticd_daemon import keys as names
from elasticd_daemon.api.client import AgentClient, Unreachable, client_tls_context
from tests.daemon.conftest import MakeNode
from tests.daemon.node import COLD, AgentNode, until
from tests.etcd import Authority, EtcdServers, ServerTls, etcd_servers
from tests.faults.job import REPOSITORY

PAGE = REPOSITORY / "docs" / "security.md"
PASSWORD, ROOT_PASSWORD, TOKEN = "hush-etcd-5f1e", "root-etcd-77aa", "hush-token-0a4b8c6d-0a4b8c6d-0a4b8c6d"


# --- etcd: the commands of the page -----------------------------------------------------------------------------------


def commands(first: str = "user add root") -> list[str]:
    """The etcdctl lines of the page's block that begins with these words."""
    block = re.search(rf"```sh\n(etcdctl {first}.*?)```", PAGE.read_text(), re.DOTALL)
    assert block
    return block[1].strip().splitlines()


def as_root(etcd: EtcdServers, line: str) -> None:
    program, *arguments = shlex.split(line.replace("$PASSWORD", PASSWORD))
    assert program == "etcdctl"
    etcd.ctl(f"--user=root:{ROOT_PASSWORD}", *arguments)


@pytest.fixture
def guarded() -> Iterator[EtcdServers]:
    """An etcd as the page sets it up."""
    with etcd_servers() as etcd:
        for line in commands():
            line = line.replace("$ROOT_PASSWORD", ROOT_PASSWORD).replace("$PASSWORD", PASSWORD)
            program, *arguments = shlex.split(line)
            assert program == "etcdctl"
            etcd.ctl(*arguments)
        yield etcd


def our_keys() -> list[str]:
    """One of every kind of key there is."""
    ours = [
        value + ("x" if value.endswith("/") else "")
        for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and name != "ROOT"
    ]
    keys = Keys("job")
    for name in (name for name in dir(keys) if not name.startswith("_") and name != "job"):
        value = getattr(keys, name)
        ours.append(value if isinstance(value, str) else value(1) if value.__code__.co_argcount == 2 else value(1, "n"))
    return [key for key in ours if isinstance(key, str)]


def test_role_of_the_page_covers_exactly_our_keys(guarded: EtcdServers) -> None:
    ours = our_keys()
    assert len(ours) > 12
    store = EtcdStore(guarded.endpoints, user="elasticd", password=PASSWORD, timeout_s=5)
    try:
        for key in ours:
            assert store.compare_and_swap(key, None, b"1"), key
            assert store.read(key) is not None, key
        for prefix in {key.rsplit("/", 1)[0] + "/" for key in ours if key.startswith(names.ROOT + "/")}:
            assert store.list(prefix) is not None
        for key in ("/elasticd/v2/placer", "/elasticd/", "/registry/secrets/x", "elasticd/v1/placer"):
            with pytest.raises(StoreRefused):
                store.read(key)
            with pytest.raises(StoreRefused):
                store.compare_and_swap(key, None, b"1")
    finally:
        store.close()
    nobody = EtcdStore(guarded.endpoints, timeout_s=5)
    try:
        with pytest.raises(StoreRefused):
            nobody.read(names.SCHEDULER)
    finally:
        nobody.close()


def test_certificate_authenticates_the_user_in_its_name(guarded: EtcdServers, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    guarded.kill()
    guarded.certify(authority.server(ask_clients=True))
    guarded.restart()
    store = EtcdStore(guarded.endpoints, tls=authority.client(certified=True, user="elasticd"), timeout_s=5)
    try:
        assert store.compare_and_swap(names.SCHEDULER, None, b"1")
        with pytest.raises(StoreRefused):
            store.read("/elasticd/v2/placer")
    finally:
        store.close()


NODE_USER = "elasticd-gpu-9"


@pytest.fixture
def node_role(guarded: EtcdServers) -> EtcdServers:
    for line in commands("role add elasticd-gpu-9"):
        as_root(guarded, line)
    return guarded


def test_a_nodes_own_role_writes_nothing_that_starts_programs(node_role: EtcdServers) -> None:
    store = EtcdStore(node_role.endpoints, user=NODE_USER, password=PASSWORD, timeout_s=5)
    others = [
        names.SUBMISSIONS,
        names.PLACEMENTS,
        names.CORDONS,
        names.SCHEDULER,
        names.SUBMISSION_SEQUENCE,
        names.NODES + "gpu-8",
    ]
    try:
        lease = store.announce(names.NODES + "gpu-9", b"1", 60.0)
        assert lease is not None and lease.renew()
        for key in (Keys("lm").round, Keys("lm").nodes + "gpu-9", names.RESULTS + "lm"):
            assert store.compare_and_swap(key, None, b"1"), key
        for key in others:
            name = key + "lm" if key.endswith("/") else key
            with pytest.raises(StoreRefused):
                store.compare_and_swap(name, None, b"1")
            with pytest.raises(StoreRefused):
                store.announce(name, b"1", 5.0)
            assert store.read(name) is None
        lease.withdraw()
    finally:
        store.close()


@pytest.mark.system
def test_node_with_its_own_role_runs_jobs_and_submits_none(
    node: MakeNode, node_role: EtcdServers, tmp_path: Path
) -> None:
    secret = secret_file(tmp_path / "password", PASSWORD)
    store = {"backend": "etcd", "endpoints": [f"127.0.0.1:{node_role.port}"], "password_file": secret}
    head = node("head", store=store | {"user": "elasticd"}, local_addr="127.0.0.1", slots=1)
    gpu = node("gpu-9", store=store | {"user": NODE_USER}, local_addr="127.0.0.1", slots=2, scheduler=False)
    head.job("one", "chatty.py", COLD, workers=2)
    gpu.start()
    head.start()
    gpu.workers("one")
    asked = gpu.unix()
    reply = asked.post("/v1/jobs", b'command = ["x.py"]\nworkdir = "/tmp"\n', "application/toml")
    assert reply.code == 403, reply
    (head.work / "go").touch()
    (gpu.work / "go").touch()
    assert gpu.wait_for_exit("one").outcome == "succeeded"
    assert {gpu.drain(), head.drain()} == {0}


def openssl_lines() -> str:
    """The openssl block of the page, for servers and nodes on loopback."""
    block = re.search(r"```sh\n(umask 077\nopenssl.*?)```", PAGE.read_text(), re.DOTALL)
    assert block
    text = block[1].replace("IP:10.0.0.1", "IP:127.0.0.1").replace("IP:10.0.1.1", "IP:127.0.0.1")
    return text + "issue gpu-2 elasticd IP:127.0.0.2\nissue other other IP:127.0.0.1\n"


@pytest.fixture
def issued(tmp_path: Path) -> Path:
    """A folder with what the page's openssl lines make."""
    folder = tmp_path / "pki"
    folder.mkdir()
    done = subprocess.run(
        ["bash", "-euc", openssl_lines()], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def certified(guarded: EtcdServers, issued: Path) -> EtcdServers:
    """The guarded etcd, which from now on only talks to those with a certificate."""
    guarded.kill()
    guarded.certify(ServerTls(issued / "etcd-1.pem", issued / "etcd-1.key", issued / "ca.pem"))
    guarded.restart()
    return guarded


def test_certificates_of_the_page(certified: EtcdServers, issued: Path) -> None:
    """They authenticate nodes as etcd's user, and nobody else."""
    assert {path.stat().st_mode & 0o077 for path in issued.glob("*.key")} == {0}
    strictly = ["openssl", "verify", "-x509_strict", "-CAfile", str(issued / "ca.pem"), str(issued / "gpu-1.pem")]
    assert subprocess.run(strictly, stdout=subprocess.DEVNULL).returncode == 0, "as Python 3.13 looks at it"
    for name, welcome in (("gpu-1", True), ("gpu-2", True), ("other", False)):
        tls = Tls(issued / "ca.pem", issued / f"{name}.pem", issued / f"{name}.key")
        store = EtcdStore(certified.endpoints, tls=tls, timeout_s=5)
        try:
            if welcome:
                assert store.compare_and_swap(f"{names.SUBMISSIONS}{name}", None, b"1")
            else:
                with pytest.raises(StoreRefused):
                    store.read(names.SCHEDULER)
        finally:
            store.close()


@pytest.mark.system
def test_two_nodes_with_tls_run_a_job_and_read_each_others_logs(
    node: MakeNode, certified: EtcdServers, issued: Path, tmp_path: Path
) -> None:
    token = secret_file(tmp_path / "token", TOKEN)

    def made(number: int) -> AgentNode:
        pem, key = issued / f"gpu-{number}.pem", issued / f"gpu-{number}.key"
        store = {"backend": "etcd", "endpoints": [f"https://127.0.0.1:{certified.port}"], "ca": issued / "ca.pem"}
        http = {"bind": f"127.0.0.{number}", "port": 0, "token_file": token}
        tls = {"tls_cert": pem, "tls_key": key, "tls_ca": issued / "ca.pem"}
        store |= {"cert": pem, "key": key}
        return node(f"n{number}", store=store, http=http | tls, local_addr=f"127.0.0.{number}", slots=1)

    n1, n2 = made(1), made(2)
    n1.job("both", "chatty.py", COLD, nodes=2, workers=1, env={"WORK": str(n1.work)})
    n2.start()
    n1.start()
    for one in (n1, n2):
        one.workers("both")
    socket = n1.unix()
    address = {row["node"]: row["address"] for row in socket.get("/v1/nodes").document()["nodes"]}
    for rank in (0, 1):
        body = until(lambda rank=rank: socket.get(f"/v1/jobs/both/logs?rank={rank}").body, n1.diagnostics)
        assert body
    where = {socket.get(f"/v1/jobs/both/logs?rank={rank}").headers["elasticd-node"] for rank in (0, 1)}
    assert where == {"n1", "n2"}, "one of them came over TLS, with the token"
    trusted = client_tls_context(issued / "ca.pem")
    host, port = address["n2"].split(":")
    assert AgentClient(None, host, int(port), TOKEN, trusted).get("/v1/jobs").code == 200
    assert AgentClient(None, host, int(port), None, trusted).get("/v1/jobs").code == 401
    assert AgentClient(None, host, int(port), None, trusted).get("/healthz").code == 200
    with pytest.raises(Unreachable, match="certificate cannot be trusted"):
        AgentClient(None, host, int(port), TOKEN, client_tls_context(None)).get("/healthz")
    (n1.work / "go").touch()
    assert {n1.wait_for_exit("both").outcome, n2.wait_for_exit("both").outcome} == {"succeeded"}
    assert {n1.drain(), n2.drain()} == {0}


def test_access_of_other_etcd_users_to_leases(guarded: EtcdServers) -> None:
    ours, other, root = f"elasticd:{PASSWORD}", "other:pw", f"root:{ROOT_PASSWORD}"
    guarded.ctl("user", "add", other, user=root)
    lease = guarded.ctl("lease", "grant", "60", user=ours).split()[1]
    guarded.ctl("put", f"--lease={lease}", f"{names.NODES}n1", "x", user=ours)
    with pytest.raises(AssertionError, match="permission denied"):
        guarded.ctl("lease", "revoke", lease, user=other)
    # What the page warns of.
    assert "keepalived" in guarded.ctl("lease", "keep-alive", "--once", lease, user=other)
    assert f"{names.NODES}n1" in guarded.ctl("lease", "timetolive", "--keys", lease, user=other)


# --- secrets ----------------------------------------------------------------------------------------------------------


def secret_file(path: Path, secret: str) -> Path:
    path.touch(0o600)
    path.write_text(secret + "\n")
    return path


def shown(node: AgentNode, etcd: EtcdServers) -> dict[str, bytes]:
    """Everything somebody could look at: where → what is there."""
    found: dict[str, bytes] = {}
    for pid, comm in {**node.processes(), node.pid: "agent"}.items():
        for name in ("cmdline", "environ"):
            path = Path(f"/proc/{pid}/{name}")
            try:
                found[f"{comm}[{pid}] {name}"] = path.read_bytes()
            except OSError:  # it has just ended
                continue
    # Written by the agent and its jobs; not what the test itself wrote.
    found["agent.log"] = (node.root / "agent.log").read_bytes()
    # Whoever ends meanwhile takes its own folder along: os.walk passes over it, as glob would not.
    for top in (node.state, node.root / "run", *Path("/dev/shm").glob("elasticd-*")):
        for path in (Path(folder, name) for folder, _, inside in os.walk(top) for name in inside):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    found[str(path)] = path.read_bytes()
    found["etcd"] = etcd.ctl("get", "--prefix", "/", user=f"root:{ROOT_PASSWORD}").encode()
    client = node.unix()
    pages = [
        "/metrics",
        "/healthz",
        "/readyz",
        "/status",
        "/v1/jobs",
        "/v1/jobs/one",
        "/v1/nodes",
        "/v1/jobs/one/logs?rank=0",
    ]
    for page in pages:
        found[page] = client.get(page).body
    found["dump"] = client.post("/v1/jobs/one/dump", within_s=60).body
    return found


def test_state_directory_is_private_and_secrets_appear_nowhere(
    node: MakeNode, guarded: EtcdServers, tmp_path: Path
) -> None:
    password = secret_file(tmp_path / "password", PASSWORD)
    token = secret_file(tmp_path / "token", TOKEN)
    endpoint = f"127.0.0.1:{guarded.port}"
    store = {"backend": "etcd", "endpoints": [endpoint], "user": "elasticd", "password_file": password}
    one = node("n1", store=store, http={"port": 0, "token_file": token}, local_addr="127.0.0.1")
    one.job("one", "chatty.py", COLD, workers=1)
    one.start()
    one.workers("one")
    # A new agent finds the runner again, and an upgrade hands secrets on: they must not be in what is handed on.
    one.kill()
    one.start()
    one.upgrade()
    until(lambda: one.request("one", "status"), one.diagnostics)

    looked = shown(one, guarded)
    for where in ("etcd", "/status", "/metrics", "/v1/jobs/one", "dump"):
        assert looked[where], f"nothing was looked at: {where}"
    assert any(name.startswith("elasticd-job") for name in looked), sorted(looked)
    assert b'"one"' in looked["/v1/jobs"]
    for secret in (PASSWORD, TOKEN):
        assert [where for where, what in looked.items() if secret.encode() in what] == []
    assert_private(one.state)
    (one.work / "go").touch()
    one.wait_for_exit("one")
    assert one.drain() == 0
    left = [path for path in one.state.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    assert left == []


def assert_private(state: Path) -> None:
    """The state directory, and what is in it: a backup may lie elsewhere."""
    assert state.stat().st_mode & 0o777 == 0o700
    code = state / "versions"  # public: job users run it, and must not be able to change it
    paths = [p for p in state.rglob("*") if not p.is_symlink()]
    others = {p: 0o022 if p == code or code in p.parents else 0o077 for p in paths}

    def mode(path: Path) -> int:
        try:
            return path.stat().st_mode
        except FileNotFoundError:  # another has just taken its place
            return 0

    assert [p for p in paths if mode(p) & others[p]] == []
    assert any(p.parent == code for p in paths)


# --- nothing is unpickled or evaluated -----------------------------------------------------------------------------


FORBIDDEN = {"marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
PICKLE = {
    "elasticd/checkpointing/at_fault/committed_state.py": "copies small objects within its own process",
    "elasticd/checkpointing/at_fault/late_changes.py": "compares small objects of its own process, loads none",
    "elasticd/process_group.py": "ranks of one job send each other objects, as torch's own collectives for them do",
    "elasticd/launching.py": "a function and its values, between a process and its workers, by private files",
    "elasticd/checkpointing/state/shard_plan.py": "DCP's metadata is a pickle: its own classes only",
    "elasticd/checkpointing/state/layout.py": "writes what torch.load(weights_only=True) reads",
}
LOADS_ITS_JOBS_OWN = {
    *("elasticd/checkpointing/at_fault/committed_state.py", "elasticd/process_group.py", "elasticd/launching.py"),
}
"""Of bytes that a process of the same job has made, within the process, over the job's process group, or in a directory
that only its user may open."""
CALLS = {"eval", "exec", "__import__"}


def sources() -> list[Path]:
    tops = ("elasticd", "agents", "examples", "deploy")
    return [path for top in tops for path in (REPOSITORY / top).rglob("*.py")]


def sins(path: Path, tree: ast.Module) -> list[str]:
    """Each as LINE: what."""
    name = str(path.relative_to(REPOSITORY))
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=imported):
                modules = {alias.name.split(".")[0] for alias in imported}
            case ast.ImportFrom(module=str(module), level=0):
                modules = {module.split(".")[0]}
            case _:
                modules = set()
        found += [f"{node.lineno}: imports {module}" for module in modules & FORBIDDEN]  # type: ignore[attr-defined]
        if "pickle" in modules and name not in PICKLE:
            found.append(f"{node.lineno}: imports pickle")  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            how = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called == "pickle.loads" and name in LOADS_ITS_JOBS_OWN:
                continue
            if called in CALLS or called in (
                "pickle.loads",
                "pickle.load",
                "os.system",
                "yaml.load",
                "yaml.unsafe_load",
            ):
                found.append(f"{node.lineno}: calls {called}")
            if called == "torch.load" and how.get("weights_only") != "True":
                found.append(f"{node.lineno}: torch.load without weights_only=True")
            if how.get("shell") == "True":
                found.append(f"{node.lineno}: shell=True")
    return found


def test_shipped_code_neither_unpickles_nor_evaluates() -> None:
    paths = sources()
    assert len(paths) > 150
    found = {str(path.relative_to(REPOSITORY)): sins(path, ast.parse(path.read_text())) for path in paths}
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "import torch; torch.load('x')",
        "import subprocess; subprocess.run('x', shell=True)",
        "import yaml; yaml.load('x', yaml.Loader)",
    ],
)
def test_the_search_finds_violations(code: str) -> None:
    assert sins(REPOSITORY / "elasticd" / "made_up.py", ast.parse(code))
