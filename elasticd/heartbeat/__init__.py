"""Reports of a worker to its agent: heartbeat (shared memory), worker events (a file), the exit report.

Entry points are `record.HeartbeatWriter` in the worker and `record.HeartbeatReader` in the agent. The training thread
writes steps and phases; `thread.HeartbeatThread` adds what a hung training thread cannot write. Nothing in this package
imports torch, waits for another process or raises into the script. The launcher loads these files by path into workers
whose environment has no elasticd, so they import the standard library, `elasticd.errors` and each other.
"""
