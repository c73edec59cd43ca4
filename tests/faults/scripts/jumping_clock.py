"""Imported as sitecustomize: the wall clock jumps back and forth by up to a day whenever Python looks at it."""

import itertools
import time

_real, _jumps = time.time, itertools.cycle((0.0, 86_400.0, -3_600.0, 7.0, -86_400.0))
time.time = lambda: _real() + next(_jumps)
time.time_ns = lambda: int(time.time() * 1e9)
