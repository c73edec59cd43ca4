"""Pure: which of new settings count at once, and what is said of those that do not."""

from __future__ import annotations

from typing import Any

import msgspec

from elasticd_agent.daemon.settings import RELOADED, Settings


def merged(old: Settings, new: Settings) -> tuple[Settings, list[str]]:
    """`old` with what of `new` can be had without a restart; a sentence on everything that differs."""
    said: list[str] = []
    return _merged(old, new, "", said), said


def _merged(old: Any, new: Any, outer: str, said: list[str]) -> Any:
    changes: dict[str, Any] = {}
    for field in msgspec.structs.fields(type(old)):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before == after:
            continue
        key = f"{outer}{field.encode_name}"
        if isinstance(before, msgspec.Struct) and type(before) is type(after):
            changes[field.name] = _merged(before, after, f"{key}.", said)
        elif _reloaded(field.type):
            changes[field.name] = after
            said.append(f"{key} is new")
        else:
            said.append(
                f"{key} has changed, and counts from the next start (systemctl restart, which drains, or SIGUSR2)"
            )
    return msgspec.structs.replace(old, **changes) if changes else old


def _reloaded(kind: Any) -> bool:
    return any(getattr(one, "extra", None) == RELOADED for one in getattr(kind, "__metadata__", ()))
