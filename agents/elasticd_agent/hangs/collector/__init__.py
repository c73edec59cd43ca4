"""The helper that takes evidence of stuck workers: a process of its own, since what it looks at may block who looks.

It runs as `python -I -S …/collector/__main__.py PATHS…`, reads one JSON request and prints a JSON line for each thing
as soon as it knows it. Standard library and a few files of ours: it starts in some 40 ms. Nobody waits for it
beyond its deadline; whoever started it then kills its whole session.
"""
