"""Addresses, TCP counters of the kernel, the HTTP server with its access rules, control sockets, a round's store."""
