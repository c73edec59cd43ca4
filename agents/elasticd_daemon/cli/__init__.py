"""The verbs of the daemon: commands that use an agent's HTTP API, and those about its settings and its node."""
