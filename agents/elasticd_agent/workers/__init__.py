"""Worker processes: their environment, logs, GPU memory, and how they are started and ended.

Entry point: manager.WorkerManager, which belongs to the job's deciding thread and never waits; `launcher/` has the
owner and template processes behind it. Never imports `rendezvous` or `telemetry`.
"""
