"""A simulated asynchronous accelerator, the device "sim", on which the tests of GPUs run anywhere.

It behaves as CUDA does where a program can be wrong about it: work is queued on streams, and is
late; freed memory is used again; the CPU cannot read the device's memory; a host wait can be seen.
Time is simulated: what is read too early is wrong every time, and nothing takes longer for it.

- `sources/` is the device, in C++, one file for each part: `engine.h` (time, streams, events),
  `memory.h`, `device.h` (what torch asks), `kernels.h` (operators, copies, and the list of what is
  done in another way), `collectives.h`, `module.cpp` (what Python sees).
- `building.py` compiles it, once for each version of torch and of the sources.
- `device.py` is ``torch.sim``, as ``torch.cuda`` is for CUDA.
- `operators.py` are operators that the CPU has no kernel for.
- `groups.py` gives the device its collectives, and gloo the device.

It is a model of CUDA: what it gets wrong, the tests do too. It says nothing about cuBLAS, cuDNN,
TF32, speed, or NCCL's errors and timeouts.
"""

import os
import sys
from pathlib import Path


def load():
    """Register the device in this process, and in all that it starts; build it first if need be."""
    from simulated.building import built  # not in the processes that find it

    folders = [str(Path(__file__).parent.parent), str(built())]
    sys.path[:] = [*sys.path, *(folder for folder in folders if folder not in sys.path)]
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    more = [folder for folder in folders if folder not in known]
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, known), *more])
    register()


def register():
    """Register the device in this process: torch calls this when it is imported, and finds it."""
    import torch  # this may be a part of torch's own import

    if hasattr(torch, "sim"):
        return
    torch.utils.rename_privateuse1_backend("sim")
    from simulated import device

    torch._register_device_module("sim", device)
    torch.utils.generate_methods_for_privateuse1_backend()
    from simulated import groups, operators

    operators.register()
    groups.register()
