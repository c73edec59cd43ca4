"""Checkpoints in a directory or an object store: manifests, lineages, atomic writes, retention, locks. No torch."""
