"""Services that are asked for preemption notices, and where: `aws`, or `aws=URL`."""

from __future__ import annotations

import os

from elasticd.errors import UsageError

NOTICE_SERVICES = ("aws", "gcp", "azure", "kubernetes")
"""Those of system/network/preemption.py, which only a job that asks them imports."""
METADATA_URL = "http://169.254.169.254"
"""The metadata service of each cloud."""


def parse_notice_service(text: str) -> tuple[str, str]:
    """The service's name and base URL. Raises UsageError."""
    name, _, base = text.partition("=")
    if name not in NOTICE_SERVICES:
        raise UsageError(f"preemption notices: {name!r} is none of {', '.join(NOTICE_SERVICES)}")
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not base and name == "kubernetes":
        if not host:
            raise UsageError("preemption notices: outside of a pod, kubernetes needs its address: kubernetes=URL")
        base = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    base = base or METADATA_URL
    if not base.startswith(("http://", "https://")):
        raise UsageError(f"preemption notices: {text!r} is not SERVICE=http://…")
    return name, base.rstrip("/")
