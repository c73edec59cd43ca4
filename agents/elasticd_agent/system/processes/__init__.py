"""Processes of this machine: started, read from /proc, limited by control groups, ended; helpers that may hang.

Every wait is bounded, and only children of the caller are signalled.
"""
