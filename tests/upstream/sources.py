"""PyTorch's own tests, from Debian's source package of pytorch: prints the folder that holds them.

The wheels have no tests. apt fetches the package with lists of its own, so that the machine's sources stay as they are,
and the version nearest to the installed torch that can be had. Exits with 77 and the reason where none can be had.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SUITES = ("sid", "trixie")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PARTS = ("*/test/distributed/elastic/*", "*/test/distributed/launcher/*")
DEADLINE_S = 300
NOT_HAD = 77


def fail(why: str) -> None:
    print(f"tests/upstream: PyTorch's tests were not run: {why}", file=sys.stderr)
    sys.exit(NOT_HAD)


def main(folder: Path) -> None:
    torch = numbers(importlib.metadata.version("torch"))
    had = sorted(folder.glob("pytorch-*/test/distributed"), key=lambda path: distance(path.parts[-3], torch))
    if not had:
        had = [fetch(folder, torch)]
    print(had[0])


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall("[0-9]+", version)[:3]))


def distance(version: str, torch: tuple[int, ...]) -> list[int]:
    return [abs(one - other) for one, other in zip(numbers(version), torch, strict=False)]


def fetch(folder: Path, torch: tuple[int, ...]) -> Path:
    apt = Apt(folder / "apt")
    shown = apt.run("apt-cache", "showsrc", "--only-source", "pytorch")
    versions = sorted(set(re.findall("(?m)^Version: (.+)$", shown)), key=lambda version: distance(version, torch))
    for version in versions:
        found = folder / f"pytorch-{version.partition('+')[0].partition('-')[0]}"
        try:
            apt.run("apt-get", "source", "-q", "--download-only", "--tar-only", f"pytorch={version}")
            part = folder / "unpacking"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            archive = next(apt.folder.glob("pytorch_*.orig.tar.*"))
            wanted = ["--wildcards", *PARTS]
            subprocess.run(["tar", "-xf", archive, "-C", part, "--strip-components=1", *wanted], check=True)
            archive.unlink()
            part.rename(found)
            return found / "test" / "distributed"
        except subprocess.SubprocessError as error:
            print(f"tests/upstream: pytorch {version} cannot be fetched: {error}", file=sys.stderr)
    fail(f"apt offers {', '.join(versions) or 'no version'} of the source package pytorch, and none could be fetched")
    raise AssertionError


class Apt:
    """apt with its lists, sources and downloads in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("lists/partial", "archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()
        mirror = self.mirror()
        lines = [f"deb-src [signed-by={KEYRING}] {mirror} {suite} main\n" for suite in SUITES]
        (folder / "sources.list").write_text("".join(lines))
        places = {
            "Dir::State::lists": folder / "lists", "Dir::State::status": folder / "status", "Dir::Cache": folder,
            "Dir::Etc::sourcelist": folder / "sources.list", "Dir::Etc::sourceparts": "-", "Acquire::Languages": "none",
        }  # fmt: skip
        settings = [f'{name} "{value}";\n' for name, value in places.items()]
        (folder / "conf").write_text("".join(settings) + f'APT::Sandbox::User "{os.environ.get("USER", "root")}";\n')
        try:
            self.run("apt-get", "update", "-q")
        except (OSError, subprocess.SubprocessError) as error:
            fail(f"apt cannot fetch the lists of Debian's source packages: {error}")

    def mirror(self) -> str:
        """The Debian mirror of this machine."""
        files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
        text = "\n".join(path.read_text(errors="replace") for path in files if path.is_file())
        found = re.search(r"(?m)^(?:URIs:|deb(?: \[.*\])?) *(\S+/debian)/?(?:\s|$)", text)
        if found is None or not KEYRING.exists():
            fail("this machine has no Debian mirror in its apt sources")
            raise AssertionError
        return found[1]

    def run(self, *command: str) -> str:
        """Standard output. Raises SubprocessError."""
        environ = {**os.environ, "APT_CONFIG": str(self.folder / "conf")}
        done = subprocess.run(
            command, cwd=self.folder, env=environ, timeout=DEADLINE_S, check=True, stdout=subprocess.PIPE, text=True
        )
        return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
