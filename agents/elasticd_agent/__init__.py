"""The daemon: agents that keep a training job's worker groups running. Nothing here imports torch."""
