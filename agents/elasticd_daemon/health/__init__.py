"""Is this node fit to train? docs/health.md

    monitor.py          the thread that checks the node every minute and posts changes; the agent's entry point
    policy.py           pure: check results and history -> healthy, unhealthy or quarantined, with the reason
    checks.py           one run of all checks; `elasticd doctor` uses it, too
    check_process.py    a process for each run: directories and plugins, each in a child with a deadline
    all_reduce_process.py    runs in a Python with torch: the slots add up numbers before the node registers

Whatever may hang (a dead mount, a driver, a plugin) runs in a process that can be killed or left behind.
"""
