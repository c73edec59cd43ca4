"""Whether `elasticd explain` and `elasticd dump` are about a daemon's job, or in the meaning they have without one.

It exists apart from the verbs so that the command line can tell without importing what asks. It only looks at names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

DEFAULT_SOCKET = "/run/elasticd/agent.sock"
AGENT_VARIABLE = "ELASTICD_AGENT"
_AGENT_FLAGS = ("--agent", "--token-file", "--ca", "--node")
_LOCAL_FLAGS = ("--list", "--event-log", "--pid", "--job", "--out", "-h", "--help")


def refers_to_job(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """`dump JOB` is a daemon's. `explain WORD` is, unless the word has a slash or exists here, if there is a daemon."""
    flags = {word.partition("=")[0] for word in argv if word.startswith("-")}
    if flags & set(_AGENT_FLAGS):
        return True
    if flags & set(_LOCAL_FLAGS):
        return False
    words = [word for before, word in zip(["", *argv], argv, strict=False) if before != "--round" and word[:1] != "-"]
    if len(words) != 1:
        return False
    if name == "dump":
        return True
    if "/" in words[0] or os.path.lexists(words[0]):
        return False
    return bool(environ.get(AGENT_VARIABLE)) or os.path.exists(DEFAULT_SOCKET)
