"""Linux and sockets, without any knowledge of jobs; never imports another package of elasticd_agent.

Entry points: helper_process (programs that may hang), nvml, control_socket, http_server, addresses,
procfs, process, files, installation (the paths of our own programs). Every wait here has a deadline.
"""
