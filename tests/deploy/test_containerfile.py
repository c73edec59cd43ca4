"""deploy/Containerfile as text: its pins and names match the repository, also for the CUDA variants.

test_image.py builds and starts the CPU variant; a CUDA one is gigabytes that nobody here can run, so its arguments are
read. The shell that the build runs is run here.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "Containerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def argument(name: str) -> list[str]:
    """Every default that it is given."""
    return re.findall(rf"^ARG {name}=(.*)$", TEXT, re.MULTILINE)


def run(script: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], **env}
    return subprocess.run(["sh", "-euc", script], cwd=tmp_path, env=environ, capture_output=True, text=True)


def chosen_extras(variant: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (case,) = re.findall(r"case .*?esac", TEXT, re.DOTALL)
    return run(case + '\necho "$extras"', tmp_path, VARIANT=variant)


def test_base_image_is_pinned_and_has_a_supported_python() -> None:
    (base,) = argument("BASE")
    assert re.fullmatch(r"docker\.io/library/debian:bookworm-[0-9]{8}-slim@sha256:[0-9a-f]{64}", base)
    assert re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE) == ["${BASE}", "base", "dependencies", "base"]
    assert PROJECT["requires-python"] == ">=3.10", "bookworm has 3.11"


@pytest.mark.parametrize("variant", ["cpu", *re.findall(r"VARIANT=(cu[0-9]+)", TEXT), "cu126", "cu128"])
def test_index_and_extras_of_a_variant(variant: str, tmp_path: Path) -> None:
    extras = chosen_extras(variant, tmp_path)
    assert extras.returncode == 0
    assert extras.stdout.split() == ([] if variant == "cpu" else ["gpu"])
    assert set(extras.stdout.split()) <= set(PROJECT["optional-dependencies"])
    (index,) = argument("TORCH_INDEX")
    assert index.replace("${VARIANT}", variant) == f"https://download.pytorch.org/whl/{variant}"


@pytest.mark.parametrize("variant", ["", "cuda", "cu13", "rocm6.4", "cu13.0", "CPU"])
def test_unknown_variant_is_refused(variant: str, tmp_path: Path) -> None:
    refused = chosen_extras(variant, tmp_path)
    assert refused.returncode == 2
    assert f"VARIANT={variant}: there are cpu, and cu" in refused.stderr


def test_all_stages_use_the_same_variant() -> None:
    assert set(argument("VARIANT")) == {"cpu"}
    assert TEXT.count("ARG BASE") == 2, "once for all stages, once for the label"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the image's Python has tomllib, this one has not")
def test_requirements_are_those_of_pyproject(tmp_path: Path) -> None:
    """The dependencies are one layer without elasticd itself, so they are read out of pyproject.toml."""
    (program,) = re.findall(r"python3 -c '(import sys, tomllib.*?)' \$", TEXT)
    for extras, more in (([], []), (["gpu"], PROJECT["optional-dependencies"]["gpu"])):
        said = subprocess.run([sys.executable, "-c", program, *extras], cwd=ROOT, capture_output=True, text=True)
        assert said.stdout.split("\n")[:-1] == [*PROJECT["dependencies"], *more]


@pytest.mark.parametrize(
    ("variant", "cuda", "code"), [("cpu", None, 0), ("cu130", "13.0", 0), ("cu130", None, 1), ("cpu", "13.0", 1)]
)
def test_wrong_torch_ends_the_build(variant: str, cuda: str | None, code: int, tmp_path: Path) -> None:
    (program,) = re.findall(r"bin/python -c '(import sys, torch.*?)' \"", TEXT)
    (tmp_path / "torch.py").write_text(f"class version:\n    cuda = {cuda!r}\n")
    looked = subprocess.run([sys.executable, "-c", program, variant], cwd=tmp_path, capture_output=True, text=True)
    assert looked.returncode == code, looked.stderr
    assert bool(code) == (f"VARIANT={variant}, but pip installed the torch for" in looked.stderr)


def test_versions_and_names_match_the_repository() -> None:
    version = PROJECT["version"]
    assert f'org.opencontainers.image.version="{version}"' in TEXT
    assert f'org.opencontainers.image.licenses="{PROJECT["license"]}"' in TEXT
    assert set(re.findall(r"elasticd:([0-9.]+\d)", TEXT)) == {version}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split("\n") if "==" in line)
    assert re.fullmatch(r"[0-9.]+", pins["torch"]), "a pin of one build (+cpu) would rule the other variants out"
    for manifest in (ROOT / "deploy" / "k8s").rglob("*.yaml"):
        text = manifest.read_text()
        assert set(re.findall(r"image: elasticd:(\S+)", text)) <= {version}, manifest
        assert set(re.findall(r"runAs(?:User|Group): (\d+)", text)) <= {"0", "10001"} or "etcd" in manifest.name, (
            manifest
        )


def test_image_does_not_contain_the_package_index() -> None:
    allowed = {"https://download.pytorch.org/whl/${VARIANT}"}
    assert set(re.findall(r"https?://\S+", TEXT)) <= allowed
    assert "index-url =" not in TEXT and "trusted-host" not in TEXT


def test_build_context_is_minimal() -> None:
    first, *rest = [
        line for line in (ROOT / ".containerignore").read_text().split("\n") if line and not line.startswith("#")
    ]
    assert first == "*"
    sent = {line[1:] for line in rest if line.startswith("!")}
    copied = {
        name
        for words in re.findall(r"^COPY (?!--from)(.*)$", TEXT, re.MULTILINE)
        for name in words.split()[:-1]
    }  # fmt: skip
    assert sent == copied, "what is copied is sent, and nothing else"
    assert all((ROOT / name).exists() for name in sent)
    assert os.readlink(ROOT / ".dockerignore") == ".containerignore", "docker reads no other name"


def test_page_has_the_tested_command() -> None:
    """test_image.py starts containers with these rights and mounts, the agent with these words."""
    page = (ROOT / "docs" / "container.md").read_text()
    (command,) = [line for line in page.replace("\\\n", " ").split("\n") if line.startswith("podman run ")]
    words, tested = shlex.split(command), (ROOT / "tests" / "deploy" / "test_image.py").read_text()
    rights = [word for word in words if re.match("--(read-only|cap-drop|security-opt|mount|network)", word)]
    assert len(rights) == 7
    assert [word for word in rights if f'"{word}"' not in tested] == []
    assert words[words.index("agent") : words.index("agent") + 3] == ["agent", "--supervised", "--config"]
    assert '["agent", "--supervised", "--config", ' in tested
    written = set(re.findall(r"^\| `(/[\w/]+)`", page, re.MULTILINE))
    mounted = {word.split(":")[1] for word in words if word.startswith("--volume") and not word.endswith(":ro")}
    mounted |= {word.split("destination=")[1].split(",")[0] for word in words if "destination=" in word}
    assert written == mounted | {"/dev/shm"}
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE)) == set(
        re.findall(r"^ARG (\w+)=", TEXT, re.MULTILINE)
    )
