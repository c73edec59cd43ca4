"""From the daemon's settings to what is looked at, and to the thread that does. It looks at nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from elasticd_agent.config.agent_settings import Settings
from elasticd_agent.node.health.checks import Checks, Places
from elasticd_agent.node.health.monitor import Renewed, Watching
from elasticd_agent.node.health.persistence import Remembered, boot_id
from elasticd_agent.node.health.policy import Rules

FILE = "health.json"


def places(settings: Settings, environ: Mapping[str, str]) -> Places:
    health, devices = settings.health, settings.devices(environ)
    own = (settings.state_dir, *([settings.log_dir] if settings.log_dir is not None else []))
    return Places(
        node=settings.node,
        slots=settings.slot_count(environ),
        devices=devices,
        own=own,
        directories=health.directories,
        disk_free_min_bytes=health.disk_free_min_bytes,
        plugins_dir=health.plugins_dir,
        plugin_timeout_s=health.plugin_timeout_s,
        chosen=devices if "CUDA_VISIBLE_DEVICES" in environ else None,
        gpus=health.gpus,
    )


def remembered(settings: Settings) -> Remembered:
    return Remembered(settings.state_dir / FILE, boot_id())


def open_health(settings: Settings, environ: Mapping[str, str], idle: Callable[[], bool]) -> Watching:
    """`idle`: no runner lives on this node; asked from another thread, so it must be cheap."""
    asked = renewed(settings, environ)
    return Watching(
        lambda heard: Checks(asked.places, environ, heard),
        asked.rules,
        remembered(settings),
        every_s=asked.every_s,
        all_reduce=asked.all_reduce,
        idle=idle,
        count_gpus=len(asked.places.devices),
    )


def renewed(settings: Settings, environ: Mapping[str, str]) -> Renewed:
    """What these settings ask for."""
    health = settings.health
    rules = Rules(health.strikes, float(health.cooloff_s), float(health.cooloff_max_s))
    return Renewed(places(settings, environ), rules, float(health.every_s), health.all_reduce)


def most_gpus(settings: Settings) -> int:
    """As many were once seen here by a daemon with this state directory."""
    kept = remembered(settings)
    kept.load(time.monotonic())
    return kept.gpus
