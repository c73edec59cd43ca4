"""Runners: `main` is the process that runs one job on one node; the other modules are the agent's side of it.

The agent finds its runners again after a restart by their locks; it must never signal any other process.
"""
