"""What cannot work on this machine is one sentence before anything starts. Real files, ports and permissions."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from elasticd.errors import UsageError
from elasticd_agent.config.run_options import parse_run
from elasticd_agent.job import preflight
from elasticd_agent.telemetry.event_log import EventLog
from tests.etcd import free_ports


@pytest.fixture
def here(tmp_path: Path) -> Path:
    place = tmp_path / "a place with späces"
    place.mkdir()
    (place / "train.py").write_text("raise SystemExit('was run')\n")
    (place / "a file").touch()
    (place / "dir").mkdir()
    (place / "app").mkdir()
    (place / "app" / "__main__.py").touch()
    (place / "mine").mkdir()
    (place / "mine" / "__init__.py").write_text("raise SystemExit('was imported')\n")
    (place / "tool").write_text("#!/bin/sh\n")
    (place / "tool").chmod(0o755)
    os.mkfifo(place / "pipe")
    (place / "loop").symlink_to("loop")
    return place


def check(here: Path, *argv: str, **environ: str) -> None:
    environ = {"PATH": os.environ["PATH"], **environ}
    spec, _, settings = parse_run(argv, environ, here)
    preflight.check(spec, settings, environ)


RIGHT = [
    ["train.py"],
    ["app"],
    ["-m", "mine.train"],
    ["-m", "json.tool"],
    ["--preload", "train,json.no_such_part", "train.py"],
    ["-m", "sys"],
    ["--no-python", "./tool"],
    ["--no-python", "true"],
    ["--checkpoint-dir", "new/deep", "--log-dir", "dir", "--event-log", "dir/events.jsonl", "train.py"],
    ["--log-dir", "/dev/null", "train.py"],
    ["--metrics-port", "0", "train.py"],
    ["--metrics-port", "0", "--metrics-addr", "::1", "train.py"],
    ["--master-addr", "no.such.host.invalid", "--master-port", "29500", "train.py"],  # the job waits for the name
]


@pytest.mark.parametrize("argv", RIGHT, ids=" ".join)
def test_possible_job_passes_unchanged(here: Path, argv: list[str]) -> None:
    """What can work passes and changes nothing."""
    before = sorted(here.rglob("*"))
    check(here, *argv)
    assert sorted(here.rglob("*")) == before


WRONG = [
    (["nope.py"], "the script 'nope.py' does not exist in "),
    (["/nope.py"], "the script '/nope.py' does not exist$"),
    (["dir"], "is a directory without a __main__.py"),
    (["pipe"], "is not a file"),
    (["train.py/x"], "does not exist"),
    (["loop"], "/loop' cannot be read: Too many levels of symbolic links"),
    (["--", "--lr", "3"], "name is missing before '--lr'"),
    (["-m", "nonesuch.train"], "there is no module 'nonesuch'"),
    (["--preload", "nonesuch.deep", "train.py"], "--preload nonesuch.deep: there is no module 'nonesuch' in "),
    (["-m", "train.py"], "write -m train, or leave -m out"),
    (["-m", "./train.py"], "without -m it is a script's path"),
    (["--no-python", "nonesuch"], "cannot be found or is not executable"),
    (["--no-python", "./train.py"], "cannot be found or is not executable"),
    (["--checkpoint-dir", "a file", "train.py"], "--checkpoint-dir .* is a file, not a directory"),
    (["--checkpoint-dir", "a file/deep", "train.py"], "deep'?: '.*a file' is a file, not a directory"),
    (["--log-dir", "a file", "train.py"], "--log-dir .* is a file"),
    (["--event-log", "dir", "train.py"], "is a directory; name a file"),
    (["--event-log", "no/such/e.jsonl", "train.py"], "there is no directory"),
    (["--metrics-port", "0", "--metrics-addr", "no.such.host.invalid", "train.py"], "cannot be resolved"),
    (["--metrics-port", "0", "--metrics-addr", "192.0.2.1", "train.py"], "not an address of this machine"),
    (["--master-addr", "192.0.2.1", "--master-port", "0", "train.py"], "not an address of this machine"),
]


@pytest.mark.parametrize(("argv", "sentence"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_obstacles(here: Path, argv: list[str], sentence: str) -> None:
    """What cannot work is said."""
    with pytest.raises(UsageError, match=sentence):
        check(here, *argv)


def test_missing_working_directory_comes_first(here: Path) -> None:
    """A working directory that is none is said before what is missing in it."""
    with pytest.raises(UsageError, match=r"the working directory '.*nowhere' does not exist"):
        check(here / "nowhere", "train.py")
    with pytest.raises(UsageError, match=r"the working directory '.*a file' is a file"):
        check(here / "a file", "train.py")


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that others may pass through, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="elasticd-preflight-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("shut", "workdir", "argv", "sentence"),
    [
        ("dir", "dir", ["train.py"], "the working directory '.*dir' cannot be entered: permission denied"),
        ("dir", "dir/deep", ["train.py"], "the working directory '.*deep' cannot be entered: permission denied"),
        ("dir", ".", ["dir/train.py"], "the script 'dir/train.py' cannot be reached: permission denied"),
        ("dir", ".", ["--checkpoint-dir", "dir/deep/x", "-m", "json.tool"], "--checkpoint-dir '.*x' cannot be reached"),
    ],
)
def test_directory_without_access(open_place: Path, shut: str, workdir: str, argv: list[str], sentence: str) -> None:
    """A job's user is often not who wrote the job file."""
    (open_place / "dir" / "deep").mkdir(parents=True)
    (open_place / shut).chmod(0)
    if os.geteuid() == 0:
        os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        with pytest.raises(UsageError, match=sentence):
            check(open_place / workdir, *argv, PYTHON_EXEC="/bin/sh")  # ours may lie in root's home
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        (open_place / shut).chmod(0o700)


def test_event_log_in_a_future_log_directory(here: Path) -> None:
    """Where `elasticd explain` looks for it."""
    check(here, "--log-dir", "new", "--event-log", "new/events.jsonl", "train.py")
    EventLog(here / "new" / "events.jsonl", "job", "node").close()
    assert (here / "new").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("option", ["--master-port", "--metrics-port"])
def test_port_in_use(here: Path, option: str) -> None:
    """A port in use is said."""
    port = str(*free_ports(1))
    in_use = pytest.raises(UsageError, match=f"port {port} on 127.0.0.1 is in use")
    with socket.create_server(("127.0.0.1", int(port))), in_use:
        check(here, option, port, "train.py")
    check(here, option, port, "train.py")


def test_another_interpreter(here: Path) -> None:
    """Another interpreter must be there and is not asked for modules."""
    with pytest.raises(UsageError, match="PYTHON_EXEC"):
        check(here, "train.py", PYTHON_EXEC="/no/such/python")
    check(here, "-m", "nonesuch", PYTHON_EXEC=str(here / "tool"))


ETCD = ["--rdzv-backend", "etcd", "--rdzv-endpoint", "https://h"]


def test_the_address_others_shall_use_must_be_this_machines(here: Path) -> None:
    check(here, *ETCD, "--local-addr", "127.0.0.1", "train.py")
    check(here, "--local-addr", "192.0.2.1", "train.py")  # nobody uses it
    with pytest.raises(UsageError, match=r"--local-addr: 192\.0\.2\.1 is not an address of this machine"):
        check(here, *ETCD, "--local-addr", "192.0.2.1", "train.py")
    with pytest.raises(UsageError, match=r"--local-addr: the address 'no\.such\.host\.invalid' cannot be resolved"):
        check(here, *ETCD, "--local-addr", "no.such.host.invalid", "train.py")


@pytest.fixture
def certificates(here: Path) -> Path:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(here / "ca.pem")
    for name in ("one", "two"):
        mine = ca.issue_cert("client")
        mine.cert_chain_pems[0].write_to_path(here / f"{name}.pem")
        mine.private_key_pem.write_to_path(here / f"{name}.key")
    key = ec.generate_private_key(ec.SECP256R1())
    locked = serialization.BestAvailableEncryption(b"a passphrase")
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    (here / "locked.key").write_bytes(key.private_bytes(*form, locked))
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "an old authority")])
    old = x509.CertificateBuilder(who, who, key.public_key(), 1, datetime(2000, 2, 3), datetime(2001, 2, 3))
    old = old.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    (here / "old.pem").write_bytes(old.sign(key, hashes.SHA256()).public_bytes(form[0]))
    return here


def test_tls_files_that_fit_pass(certificates: Path) -> None:
    check(certificates, *ETCD, "train.py")
    check(certificates, *ETCD, "--rdzv-conf", "cacert=ca.pem,cert=one.pem,key=one.key", "train.py")


TLS = [
    ("cacert=nope.pem", "--rdzv-conf cacert '.*/nope.pem' does not exist"),
    ("cacert=dir", "--rdzv-conf cacert '.*/dir' is not a file"),
    ("cacert=train.py", "holds no certificate in PEM form"),
    ("cacert=one.key", "holds no certificate in PEM form"),
    ("cert=one.pem,key=nope.key", "--rdzv-conf key '.*/nope.key' does not exist"),
    ("cert=one.pem,key=two.key", "cert '.*/one.pem' and key '.*/two.key' do not belong together"),
    ("cert=one.key,key=one.pem", "are not a certificate and its key in PEM form"),
    ("cert=train.py,key=train.py", "are not a certificate and its key in PEM form"),
    ("cert=one.pem,key=locked.key", "key '.*/locked.key' is protected by a passphrase"),
    ("cacert=old.pem", "cacert '.*/old.pem' expired on 2001-02-03; get a new one"),
]


@pytest.mark.parametrize(("conf", "sentence"), TLS, ids=[conf for conf, _ in TLS])
def test_unusable_tls_files(certificates: Path, conf: str, sentence: str) -> None:
    """Tls files that cannot work are said."""
    with pytest.raises(UsageError, match=sentence):
        check(certificates, *ETCD, "--rdzv-conf", conf, "train.py")


def test_unreadable_script(here: Path) -> None:
    """A script that may not be read is said."""
    (here / "train.py").chmod(0)
    (here / "dir").chmod(0o555)
    if os.geteuid() != 0:
        with pytest.raises(UsageError, match="permission denied"):
            check(here, "train.py")
        return
    # Root may read everything, so it is another user's process that looks.
    look = (
        "import os, sys; from pathlib import Path\n"
        "from elasticd_agent.config import run_options\nfrom elasticd_agent.job import preflight\n"
        "from elasticd.errors import UsageError\n"
        "commands = (['train.py'], ['--event-log', 'dir/e.jsonl', 'app'])\n"
        "asked = [run_options.parse_run(argv, {'PYTHON_EXEC': '/bin/sh'}, Path('.')) for argv in commands]\n"
        "os.chdir(sys.argv[1]); os.setregid(65534, 65534); os.setreuid(65534, 65534)\n"
        "for spec, _, settings in asked:\n"
        "    try: preflight.check(spec, settings, {})\n"
        "    except UsageError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", look, str(here)], capture_output=True, text=True, timeout=30, check=False
    )
    assert run.stdout.splitlines() == [
        "the script 'train.py' cannot be read: permission denied",
        "--event-log 'dir/e.jsonl' cannot be written: permission denied",
    ], run.stderr


def test_a_read_only_file_system_stops_logs_and_not_training(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are tried again once a person has repaired it."""
    statvfs, flag = os.statvfs, os.ST_RDONLY

    class ReadOnly:
        f_flag = flag

    monkeypatch.setattr(os, "access", lambda place, mode, **_: not str(place).endswith("/dir") and bool(mode))
    monkeypatch.setattr(os, "statvfs", lambda place: ReadOnly() if str(place).endswith("/dir") else statvfs(place))
    check(here, "--checkpoint-dir", "dir", "train.py")
    with pytest.raises(UsageError, match=r"--log-dir .*: no permission to write to .*dir'"):
        check(here, "--log-dir", "dir", "train.py")
    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.raises(UsageError, match=r"--checkpoint-dir .*: no permission to write to .*dir'"):
        check(here, "--checkpoint-dir", "dir/new", "train.py")
