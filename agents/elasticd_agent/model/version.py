"""The version of elasticd. The lookup costs 20 ms, so it is done on demand."""

from __future__ import annotations


def version() -> str:
    """The installed distribution's version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("elasticd")
    except PackageNotFoundError:
        return "(run from its source, not installed)"
