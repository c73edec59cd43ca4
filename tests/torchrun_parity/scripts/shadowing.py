"""Imports numpy, where a file of that name lies beside it."""

import json
import os

import numpy

with open(os.path.join(os.environ["PROBE_OUT"], f"facts-{os.environ['RANK']}.json"), "w") as file:
    json.dump({"numpy": numpy.__file__, "whose": numpy.WHOSE}, file)
