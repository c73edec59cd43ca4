"""The HTML pages, in front of the API's routes (entry point: routes.py), on the connections' threads."""
