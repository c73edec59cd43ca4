"""What SIGHUP changes: which keys of agent.toml count at once, and what to say of the others.

It exists so that an operator is never left to guess whether a new value counts. Pure; which keys are which is written
where they are declared (settings.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from elasticd_agent.daemon.decoding import meta_of, shown
from elasticd_agent.daemon.settings import Settings


def reloadable(old: Settings, new: Settings) -> tuple[Settings, list[str]]:
    """The settings that count from now on, and a sentence for each key that differs and does not."""
    settings, sentences = _mixed(old, new, "")
    assert isinstance(settings, Settings)
    return settings, sentences


def changed(old: Settings, new: Settings) -> list[str]:
    """A sentence for each key that differs and counts at once."""
    return [
        f"{key}: {_said(key, now)} from now on, not {_said(key, before)}"
        for key, before, now, reloads in _differences(old, new, "")
        if reloads
    ]


def _mixed(old: msgspec.Struct, new: msgspec.Struct, outer: str) -> tuple[msgspec.Struct, list[str]]:
    kept: dict[str, Any] = {}
    sentences = []
    for field in msgspec.structs.fields(type(old)):
        before, now, key = getattr(old, field.name), getattr(new, field.name), outer + field.encode_name
        if isinstance(before, msgspec.Struct):
            kept[field.name], inner = _mixed(before, now, f"{key}.")
            sentences += inner
        elif before != now and not _reloads(field):
            kept[field.name] = before
            sentences.append(
                f"{key}: goes on as {_said(key, before)}; {_said(key, now)} needs a restart of the agent, which "
                "disturbs no job"
            )
    return msgspec.structs.replace(new, **kept), sentences


def _differences(old: msgspec.Struct, new: msgspec.Struct, outer: str) -> list[tuple[str, Any, Any, bool]]:
    found = []
    for field in msgspec.structs.fields(type(old)):
        before, now, key = getattr(old, field.name), getattr(new, field.name), outer + field.encode_name
        if isinstance(before, msgspec.Struct):
            found += _differences(before, now, f"{key}.")
        elif before != now:
            found.append((key, before, now, _reloads(field)))
    return found


def _reloads(field: msgspec.structs.FieldInfo) -> bool:
    meta = meta_of(field)
    return bool(meta and meta.extra and meta.extra.get("reload"))


def _said(key: str, value: Any) -> str:
    if key == "job":
        return f"{len(value)} job(s)"
    return "not given" if value is None else shown(value)
