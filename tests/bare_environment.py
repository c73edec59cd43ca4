"""An environment that has what `pip install .` brings and nothing else: torch without numpy, for one.

Its packages are links into this environment's, so it is made within a second and without a network.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement


def make(folder: Path) -> Path:
    """The path of its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name in distributions("elasticd"):
        found = importlib.metadata.distribution(name)
        for file in found.files or []:
            top, target = file.parts[0], Path(str(found.locate_file(file)))
            if top == "..":  # a script names its interpreter, and is left out; py-spy is none
                if file.parts[-2] == "bin" and target.read_bytes()[:2] != b"#!":
                    (folder / "bin" / target.name).symlink_to(target)
            elif top != "__pycache__" and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(found.locate_file(top))))
    return folder / "bin" / "python"


def distributions(*names: str) -> set[str]:
    """These, and all that they depend on."""
    found: set[str] = set()
    unseen = list(names)
    while unseen:
        name = re.sub(r"[-_.]+", "-", unseen.pop()).lower()
        if name in found:
            continue
        found.add(name)
        every = map(Requirement, importlib.metadata.requires(name) or ())
        unseen += [each.name for each in every if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found
