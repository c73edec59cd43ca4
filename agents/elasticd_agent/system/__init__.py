"""Linux and sockets, without any knowledge of jobs; never imports another package of elasticd_agent.

`processes` starts, reads and ends them, and runs programs that may hang; `network` has addresses, the HTTP server and
control sockets; `gpus` asks NVML. Beside them: files (`files`, `bounded_io`), and the paths of our own programs
(`installation`). Every wait here has a deadline.
"""
