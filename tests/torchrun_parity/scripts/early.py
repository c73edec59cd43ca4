"""Sets what torch and its libraries read while they are imported, and says what came of it."""

import json
import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

with open(os.path.join(os.environ["PROBE_OUT"], f"facts-{os.environ['RANK']}.json"), "w") as file:
    json.dump({"threads": torch.get_num_threads()}, file)
