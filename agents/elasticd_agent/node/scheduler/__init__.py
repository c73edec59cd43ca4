"""Which job runs where: handed in, placed by one daemon at a time, and forgotten a while after it has ended."""
