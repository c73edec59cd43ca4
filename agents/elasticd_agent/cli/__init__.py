"""The commands and their output; main.py is the entry point, on the main thread. No logic of jobs or nodes."""
