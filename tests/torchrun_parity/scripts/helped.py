"""A module that it imports before torch sets what torch reads at its import; says what came of it."""

import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.environ["HELPER"]))
import helper
import torch

facts = {"threads": torch.get_num_threads(), "omp": os.environ["OMP_NUM_THREADS"], "set": helper.NAME}
with open(os.path.join(os.environ["PROBE_OUT"], f"facts-{os.environ['RANK']}.json"), "w") as file:
    json.dump(facts, file)
