"""The launcher: a warm template forks worker processes, and an owner is their parent.

    agent ──socketpair──> owner.py ──fork, exec──> template.py (python -u script.py, paused in a start-up hook)
                             │                         │ fork
                             │                    intermediate (exits at once)
                             │                         │ fork
                             └── adopts, reaps <── workers and the round's store

**Invariant.** The death of any one process here costs its own work, never that of the others: a job whose template,
owner or agent dies restarts its workers, or does not even notice, and nothing is left running.

Three duties are in three processes, because one process cannot have two of them:

    agent       decides, and has threads, locks and connections: it must never fork a worker
    template    has torch in memory, in the job's own interpreter: imports may crash it, and take it minutes
    owner       is the parent of everything, runs no code of others, imports nothing that is large, and never waits

A warm start is a fork of pages that are in memory already: 0.1 s instead of the 3 to 10 s of an import of torch. The
order of its steps:

1. The template imports what the script will import, and the owner learns that it can fork. Until then a round waits
   for it, from its start at most TEMPLATE_WAIT_S, and starts cold after that: a slow import must not stop a job.
2. `Park` forks a group ahead of its round, while another one trains. Its processes are adopted by the owner, and each
   waits for its release on a channel of its own. A restart thereby costs no fork, and a group that does not fit costs
   one kill: surplus processes end at the release, missing ones would need a new group.
3. The round's store gets its listening socket from the owner, and listens before any worker runs. So clients of other
   nodes never meet a refused connection, and the port is known before the round's ranks are.
4. `Release` gives each worker its environment and its output files. A worker whose GPU still has memory of a dead
   process is held until that is free. Then the script begins: what runs is `python -u script.py`, and it cannot tell.
5. At a fault a worker may stay: `session.run` leaves the round, and waits for another release on the same channel. The
   next release names it in place of a forked process. Nothing depends on that: one that does not come back in time, or
   has died meanwhile, is replaced by the forked one.
6. A start that goes wrong at any of these steps ends in the same place: the round starts cold (`Execute`), in the
   interpreter of the job, without a template; and the log says why.

What the order prevents: a release before the adoption would let a worker die with the intermediate process; a store
after the workers would cost each of them a second of refused connections; a fork at the time of the fault would put the
template's health, which nobody has checked for hours, on the path of the recovery.

`owner.py` runs with the agent's interpreter, without site-packages; `template.py` in the job's interpreter, maybe
another one. When the store cannot be forked, `system/network/tcp_store.py` serves it. Only the group on rank 0's node
has a store. On the agent's side `owner_client.py` talks to the owner in the words of `messages.py`, and `requests.py`
composes the requests and chooses the template's imports.
"""
