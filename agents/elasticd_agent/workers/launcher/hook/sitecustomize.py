"""The start-up hook, which `import sitecustomize` finds first in the job's interpreter, through PYTHONPATH.

It removes its own traces, runs the template (returns at once in a cold worker, after the fork in a warm one), and then
loads the user's own sitecustomize. It is minimal: every line runs in every worker before the script.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys


def _run_template() -> None:
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


_run_template()
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
if _spec is None or _spec.loader is None:
    # as site.py expects where there is none; it also removes our module from sys.modules
    raise ImportError("No module named 'sitecustomize'", name="sitecustomize")
sys.modules["sitecustomize"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["sitecustomize"])
