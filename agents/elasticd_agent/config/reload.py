"""What SIGHUP changes: which keys of agent.toml count at once, and what is said of the others.

It exists so that an operator is never left to guess whether a new value counts. Pure; which keys are which is written
where they are declared (agent_settings.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from elasticd_agent.config.agent_settings import NodeSettings
from elasticd_agent.config.decode import meta_of, short_toml

_AFTER_RESTART = "counts from the next start (SIGUSR2, which disturbs no job, or systemctl restart, which drains)"


def merge_reloaded(old: NodeSettings, new: NodeSettings) -> tuple[NodeSettings, list[str]]:
    """The settings that count from now on, and a sentence for each key that differs."""
    differ = _differences(old, new, "")
    said = [
        f"{key}: {now} instead of {before} {'from now on' if at_once else _AFTER_RESTART}"
        for key, before, now, at_once in differ
    ]
    return _merge(old, new), said


def _merge(old: Any, new: Any) -> Any:
    kept: dict[str, Any] = {}
    for field in msgspec.structs.fields(type(old)):
        before, now = getattr(old, field.name), getattr(new, field.name)
        if isinstance(before, msgspec.Struct):
            kept[field.name] = _merge(before, now)
        elif not is_reloadable(field):
            kept[field.name] = before
    return msgspec.structs.replace(new, **kept)


def _differences(old: msgspec.Struct, new: msgspec.Struct, outer: str) -> list[tuple[str, str, str, bool]]:
    found: list[tuple[str, str, str, bool]] = []
    for field in msgspec.structs.fields(type(old)):
        before, now, key = getattr(old, field.name), getattr(new, field.name), outer + field.encode_name
        if isinstance(before, msgspec.Struct):
            found += _differences(before, now, f"{key}.")
        elif before != now:
            found.append((key, _value_text(key, before), _value_text(key, now), is_reloadable(field)))
    return found


def is_reloadable(field: msgspec.structs.FieldInfo) -> bool:
    """Does a new value of this key count without a restart?"""
    meta = meta_of(field)
    return bool(meta and meta.extra and meta.extra.get("reload"))


def _value_text(key: str, value: Any) -> str:
    if key == "job":
        return ", ".join(str(job.id) for job in value) or "none"
    return "nothing" if value is None else short_toml(value)
