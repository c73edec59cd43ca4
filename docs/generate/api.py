"""The site's page of the public API: the signature and the docstring of each name in `elasticd.__all__`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import elasticd

HEAD = """\
# The library, name by name

From the docstrings of `elasticd.__all__`, which follows semantic versioning.
[The library](library.md) explains it by task.
"""


def page() -> str:
    names = sorted(elasticd.__all__, key=lambda name: (name != "init", is_error(name), name))
    return "\n".join([HEAD, *(part for name in names for part in described(name, getattr(elasticd, name)))])


def is_error(name: str) -> bool:
    found = getattr(elasticd, name)
    return isinstance(found, type) and issubclass(found, Exception)


def described(name: str, found: Any) -> Iterator[str]:
    yield f"## {name}\n"
    if is_error(name):
        yield f"Kind of: `{found.__base__.__name__}`\n\n{text(found)}"
        return
    yield f"```python\nelasticd.{name}{signature(found)}\n```\n\n{text(found)}"
    for member, value in vars(found).items() if isinstance(found, type) else ():
        function = value.fget if isinstance(value, property) else value
        if member.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        yield f"### {name}.{member}\n"
        if not isinstance(value, property):
            yield f"```python\n{member}{signature(function)}\n```\n"
        yield text(function)


def signature(function: Any) -> str:
    """Without `self`, and without the default of a private sentinel."""
    found = inspect.signature(function)
    given = [one for one in found.parameters.values() if one.name != "self"]
    return re.sub(r"<[^<>]*>", "…", str(found.replace(parameters=given))).replace("'", "")


def text(found: Any) -> str:
    """The docstring; its arguments as a list, and `<` begins no tag."""
    plain = (inspect.getdoc(found) or "").replace("<", "&lt;")
    return re.sub(r"(?m)^    (\w[\w, ]*): ", r"- `\1`: ", re.sub(r"(?m)^(Args):$", "\\1:\n", plain)) + "\n"
