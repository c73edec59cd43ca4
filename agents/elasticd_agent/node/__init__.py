"""`elasticd agent`: one process a node that runs for months, is given jobs, and keeps one runner process for each.

A runner is what `elasticd run` is, for one job; it lives in its own session and outlives the daemon, so that the
daemon's death or upgrade costs no step (docs/adr/0005). `placing` decides who runs what, `reconciling` makes this node
agree with it.
"""
