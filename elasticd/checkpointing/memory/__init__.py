"""States in the memory of nodes: the writer process, its buffers and clients, and transfers between nodes and ranks."""
