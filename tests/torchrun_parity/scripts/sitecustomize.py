"""A user's own start-up module, under both names site.py knows: says in which process it ran, and what it saw."""

import builtins
import os
import sys

builtins.customized_by = [*getattr(builtins, "customized_by", []), __name__]
with open(os.path.join(os.environ["PROBE_OUT"], f"customized-{os.environ.get('RANK', 'launcher')}"), "a") as _file:
    _file.write(f"{__name__} {os.getpid()} {sorted(sys.modules.keys() & {'torch', 'numpy'})} {len(sys.argv)}\n")
