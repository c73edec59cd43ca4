"""Which job runs where. Entry points: job_queue.py for requests, Scheduler.turn on the node loop's thread.

policy.py decides (pure), scheduler.py publishes under the scheduler key, retention.py removes ended jobs. Nothing here
starts or stops a process.
"""
