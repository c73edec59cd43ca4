"""Checkpoints that rank 0 writes: whole or not at all, checksummed, chained to their parents, with a fallback.

Entry points are `api` (save, load, lineage, relink, retain) and, for a session, `saver.Saver` and `restore.restore`.
Everything runs in the training thread. Only saving and loading import torch, so that the agent can read lineages. This
package never overwrites a good checkpoint in place, never deletes the last good one, and never decides when to save
except at the intervals that the script asked for.
"""
