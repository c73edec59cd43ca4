"""The agent that commands use if they are given none. It imports nothing: every command reads it first."""

DEFAULT_SOCKET = "/run/elasticd/agent.sock"
AGENT_VARIABLE = "ELASTICD_AGENT"
