"""How worker processes start: a warm template forks them, and an owner is their parent.

    agent ──socketpair──> owner.py ──fork, exec──> template.py (python -u script.py, paused in a start-up hook)
                             │                         │ fork
                             │                    intermediate (exits at once)
                             │                         │ fork
                             └── adopts, reaps <── workers and the round's store

`owner.py` runs with the agent's interpreter, without site-packages. `template.py` runs inside the job's own
interpreter, maybe another one. When the round's store cannot be forked, `system/network/tcp_store.py` serves it. Only
the group on rank 0's node has a store. On the agent's side `owner_client.py` talks to the owner in the words of
`messages.py`, and `requests.py` composes the requests and chooses the template's imports.
"""
