"""Agreement of one job's nodes on rounds: who takes part, which restart it is, when the job ends.

Entry points: `driver` for the deciding loop, `member.RendezvousMember` for what a driver runs, `plan.plan` for the
decisions. The thread elasticd-store takes the turns, or the deciding thread where the store is this process's memory.
`plan`, `membership`, `restart_budget`, `faults` and `view` are pure. docs/protocol.md has the keys and the invariants.
No module here may know a worker process: the job's supervisor reports what it must know.
"""
