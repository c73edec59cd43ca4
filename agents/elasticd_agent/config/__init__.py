"""Options of `elasticd run`: torchrun's and its own.

Entry point: run_options.parse_run. It ends in the frozen values of model/job.py, or raises UsageError in one line. It
reads files and environments, and opens no socket.
"""
