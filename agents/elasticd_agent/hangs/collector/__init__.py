"""The helper that collects evidence of stuck workers: a process of its own, since what it reads may block it.

Entry: `__main__.py`, run as a file with -I -S; standard library and a few files of elasticd, so it starts in 40 ms.
Its own threads do the work. evidence.py starts it, and kills its session at the deadline.
"""
