"""The command line's side of HTTP: `elasticd submit`, `jobs`, `status`, `logs` and their like."""
