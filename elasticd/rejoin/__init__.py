"""The way of a process from one round to the next, which leaves the script's objects where they are.

`launch_channel` is the launcher's word, `transport` how a backend's process groups are interrupted and left,
`data_parallel` builds the script's modules anew for the next group, and `newcomer` is a process that comes to its entry
ahead of its round. The session takes these steps in order (`Session.run`); which scripts allow it, `in_place` decides.
"""
