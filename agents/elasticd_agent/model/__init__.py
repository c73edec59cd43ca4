"""Frozen records and messages: job and policy, rounds and node records, events and actions, hang reports, store keys.

Start with `messages` and `records`. No thread of its own and no I/O: no clock, no file, no socket, no torch. Imports
nothing else of elasticd_agent.
"""
