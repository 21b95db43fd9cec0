"""Run a script, and write down which samples its model gets, and of which epoch its loader tells.

``watched.py SCRIPT RANK STEP SIGNAL``: in that step of training a signal comes to this rank.
"""

import json
import os
import runpy
import sys
import warnings
from pathlib import Path

from torch import nn

import pardata

POINTS = {True: 40, False: 15}  # of training and of evaluation, on a line from -1 to 1


def main():
    script, (rank, step, number) = sys.argv[1], map(int, sys.argv[2:])
    warnings.simplefilter("ignore")  # the script's, and its library's
    seen, loaders, make_loader = {"training": [], "evaluation": []}, [], pardata.make_loader

    def look(module, inputs):
        if isinstance(module, nn.Linear):
            kind = "training" if module.training else "evaluation"
            last = POINTS[module.training] - 1
            seen[kind].append([round(last * (x + 1) / 2) for x in inputs[0].flatten().tolist()])
            if module.training and len(seen[kind]) == step:
                os.kill(os.getpid(), number)

    def noted(*args, **options):
        loaders.append(make_loader(*args, **options))
        return loaders[-1]

    pardata.make_loader = noted
    nn.modules.module.register_module_forward_pre_hook(look)
    if "torchtitan" in script:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        import titan

        titan.pretend()
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    training = [loader for loader in loaders if len(loader.dataset) == POINTS[True]]
    seen["fingerprints"] = [loader.fingerprint() for loader in training]
    Path(f"seen-{rank}.json").write_text(json.dumps(seen))


main()
