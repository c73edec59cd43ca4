"""Runners: the process that runs one job on one node, and the daemon's hold on it across its own death."""
