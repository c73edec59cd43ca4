"""Everything a person can set: options of `elasticd run`, agent.toml, job files, ELASTICD_ variables.

Entry points: run_options.parse_run, load.load, job_file.read_job. All of them end in the frozen values of model/job.py
or in NodeSettings, or raise UsageError in one line. It reads files and environments, and opens no socket.
"""
