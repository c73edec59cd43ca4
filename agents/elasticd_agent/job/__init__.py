"""The supervisor of one job on one node: inbox, state machine, monitor, reports, and the composition root.

Entry point: run.run_job, for `elasticd run` and for the daemon's runners. One thread, JobLoop, takes messages from the
inbox, calls the pure state machine and carries out its actions; all other threads only put messages into the inbox.
Membership is decided in `rendezvous`, hangs in `hangs`. Never imports `elasticd_daemon` or `cli`.
"""
