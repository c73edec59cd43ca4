"""The agent's HTTP API: server.py listens on a unix socket and a TCP port, service.py has the operations.

It runs on the connections' threads, never waits for the node loop, and changes jobs and nodes only through the store.
"""
