"""The page that an agent serves to people: its node's jobs, the nodes, and any job whole. It only reads."""
