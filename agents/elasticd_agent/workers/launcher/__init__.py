"""How worker processes come to be: a warm template that forks them, and an owner that is their parent.

    agent ──socketpair──> owner.py ──fork, exec──> template.py (python -u script.py, paused in a start-up hook)
                             │                         │ fork
                             │                    intermediate (exits at once)
                             │                         │ fork
                             └── adopts, reaps <── workers and the round's store

`owner.py` runs with the agent's interpreter and imports, of all that is installed, only `reaping.py`, `owned_group.py`,
`sockets.py` and `process.py`. `template.py` runs inside the job's own interpreter, which may be another one; `store.py`
is the round's store when it cannot be forked. Only the group on rank 0's node has a store. The agent's side:
`client.py` speaks with the owner, `requests.py` composes what it is asked to start, `preload.py` what the template
imports.
"""
