"""How worker processes come to be: a warm template that forks them, and an owner that is their parent.

    agent ──socketpair──> owner.py ──fork, exec──> template.py (python -u script.py, paused in a start-up hook)
                             │                         │ fork
                             │                    intermediate (exits at once)
                             │                         │ fork
                             └── adopts, reaps <── workers and the round's store

`owner.py` runs alone with the agent's interpreter and imports only the standard library. `template.py` runs inside the
job's own interpreter, which may be another one; `store.py` is the round's store when it cannot be forked.
"""
