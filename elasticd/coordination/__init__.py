"""Agreements of the ranks of one round without a collective: decisions, barriers, pauses, status.

Entry points are `DecisionPoints` and `Barriers`, used by `elasticd.session`. They run in the training thread of a
worker; `StatusPublisher` adds one thread, and a barrier one more while it lasts. All of it goes through the round's
store, every wait has a deadline, no rank ever decides alone, and no pickle is read.
"""
