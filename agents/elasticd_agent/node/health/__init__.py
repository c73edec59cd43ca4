"""Is this node fit to train? Checks, a verdict on them, and what is remembered of earlier ones.

    watching.py   the thread that looks every minute and posts what changed; what the daemon asks
    policy.py   pure: readings and history -> Healthy | Unhealthy(why) | Quarantined(why, seconds)
    check_process.py   a process for each look: directories and plugins, each in a process of its own with a deadline
    nvml.py       a process that talks to NVML; gpus.py: the same as readings
    all_reduce_process.py runs with a python that has torch: the slots add up numbers before the node joins

Whatever may hang runs in a process that can be given up: a dead mount, a driver, somebody's plugin. docs/health.md
"""
