"""Builds the health monitor from the agent's settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from elasticd_agent.config.agent_settings import NodeSettings
from elasticd_agent.node.health.checks import CheckTargets, NodeChecks
from elasticd_agent.node.health.monitor import HealthMonitor, MonitorSettings
from elasticd_agent.node.health.persistence import HealthFile, boot_id
from elasticd_agent.node.health.policy import HealthRules

FILE = "health.json"


def check_targets(settings: NodeSettings, environ: Mapping[str, str]) -> CheckTargets:
    health, devices = settings.health, settings.devices(environ)
    own = (settings.state_dir, *([settings.log_dir] if settings.log_dir is not None else []))
    return CheckTargets(
        node=settings.node,
        slots=settings.slot_count(environ),
        devices=devices,
        own_directories=own,
        directories=health.directories,
        disk_free_min_bytes=health.disk_free_min_bytes,
        plugins_dir=health.plugins_dir,
        plugin_timeout_s=health.plugin_timeout_s,
        visible_gpus=devices if "CUDA_VISIBLE_DEVICES" in environ else None,
        expected_gpus=health.gpus,
    )


def health_file(settings: NodeSettings) -> HealthFile:
    return HealthFile(settings.state_dir / FILE, boot_id())


def open_health(settings: NodeSettings, environ: Mapping[str, str], idle: Callable[[], bool]) -> HealthMonitor:
    """`idle`: no runner lives on this node; called from another thread, so it must be cheap."""
    chosen = monitor_settings(settings, environ)
    return HealthMonitor(
        lambda on_event: NodeChecks(chosen.targets, environ, on_event), chosen, health_file(settings), idle=idle
    )


def monitor_settings(settings: NodeSettings, environ: Mapping[str, str]) -> MonitorSettings:
    health = settings.health
    rules = HealthRules(health.strikes, float(health.cooloff_s), float(health.cooloff_max_s))
    return MonitorSettings(check_targets(settings, environ), rules, float(health.every_s), health.all_reduce)


def max_gpus_seen(settings: NodeSettings) -> int:
    """The most GPUs that an agent with this state directory has ever seen."""
    file = health_file(settings)
    file.load(time.monotonic())
    return file.max_gpus
