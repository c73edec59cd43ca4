"""The agent of one node, `elasticd agent`: runs for months, accepts jobs, and keeps one runner process for each.

Entry point: `agent.agent`; `loop.NodeLoop` decides in the main thread. `scheduler` decides which nodes run a job,
`reconcile` derives from that the runners of this node, `runners` starts and monitors them. A runner does what
`elasticd run` does, in its own session, and outlives the agent (docs/adr/0005): no training step may need the agent.
"""
