"""Writes a lot, or what is not text: to standard output, as fast as it is taken."""

from __future__ import annotations

import os
import sys

import faults


def main(what: str) -> None:
    faults.at(0)
    if what == "much":
        line = b"%d " % faults.RANK + b"x" * 97 + b"\n"
        for _ in range(100):
            sys.stdout.buffer.write(line * 10_000)  # 100 lines of 1 MB each
    elif what == "bytes":
        os.write(1, b"\xff\xfe not utf-8 \x80\xc3\n\0 nul\x1b[31m\n")
        os.write(2, b"\xe9t\xe9\n")
    elif what == "words":
        print("hello from", " ".join(sys.argv[3:]), flush=True)


if __name__ == "__main__":
    main(sys.argv[2])
