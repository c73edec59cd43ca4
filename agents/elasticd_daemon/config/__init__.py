"""Settings of an agent and of a job: agent.toml, job files, ELASTICD_ variables.

Entry points: load.load, job_file.read_job. Both end in frozen values, NodeSettings and JobFile, or raise UsageError in
one line. They read files and environments, and open no socket.
"""
