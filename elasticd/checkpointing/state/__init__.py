"""A training state: gathered from objects, laid out as the bytes of files, compared between ranks, and loaded again."""
