"""The start-up hook: what `import sitecustomize` finds first in the job's interpreter, because PYTHONPATH says so.

It undoes its own traces, lets the template do its work (a cold worker returns from it at once, a warm one after the
fork), and then gives way to the user's own sitecustomize. It contains nothing else: every line of it runs in every
worker before the script does.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys


def _run() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    sys.path_importer_cache.pop(here, None)
    launch = os.environ.pop("ELASTICD_LAUNCH", None)
    if launch is None:
        return
    config = json.loads(launch)
    if config["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = config["pythonpath"]
    spec = importlib.util.spec_from_file_location("_elasticd_template", config["template"])
    assert spec is not None and spec.loader is not None
    template = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(template)
    template.main(config)


_run()
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
if _spec is None or _spec.loader is None:
    # what site.py sees where there is none; our own module leaves sys.modules with it
    raise ImportError("No module named 'sitecustomize'", name="sitecustomize")
sys.modules["sitecustomize"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["sitecustomize"])
