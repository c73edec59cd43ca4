"""What a person writes for the daemon: agent.toml, job files, variables; read, checked, and explained."""
