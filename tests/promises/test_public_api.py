"""What is public, and what importing it does: nothing."""

import sys
import textwrap
from pathlib import Path

from launched import agent, torchrun_variables
from processes import run

import pardata
import pardata.testing

SOURCE = Path(pardata.__file__).parent


def python(code):
    """Run code in a fresh interpreter, with warnings as errors; return what it printed."""
    return run(sys.executable, "-W", "error", "-c", textwrap.dedent(code))


def test_nothing_else_is_public():
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    public = {name for name in vars(pardata) if not name.startswith("_")} - packages
    assert public == set(pardata.__all__)


def test_importing_pardata_changes_nothing_and_imports_only_what_torch_needs():
    code = """
        import logging, os, random, signal, socket, sys, threading, warnings
        import torch, torch.distributed as dist, torch.utils.data
        numpy = sys.modules["numpy"]  # which torch imports

        def state():
            manager = logging.root.manager
            signals = [signal.getsignal(number) for number in signal.valid_signals()]
            return {
                "environment": dict(os.environ),
                "root logger": (logging.root.level, list(logging.root.handlers)),
                "logging": (manager.disable, logging.raiseExceptions, logging.lastResort),
                "other loggers": {
                    name: (logger.level, list(logger.handlers), logger.propagate)
                    for name, logger in manager.loggerDict.items()
                    if isinstance(logger, logging.Logger) and not name.startswith("pardata")
                },
                "python": random.getstate(),
                "torch": torch.get_rng_state().tolist(),
                "numpy": repr(numpy.random.get_state()),
                "threads": threading.enumerate(),
                "torch threads": torch.get_num_threads(),
                "operating system's threads": len(os.listdir("/proc/self/task"))
                    if os.path.isdir("/proc/self/task") else None,
                "group": dist.is_initialized(),
                "warnings": list(warnings.filters),
                "signals": signals,
                "hooks": (sys.excepthook, sys.displayhook, threading.excepthook),
                "path": list(sys.path),
                "directory": os.getcwd(),
                "default dtype": torch.get_default_dtype(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "grad": torch.is_grad_enabled(),
                "cuda": torch.cuda.is_initialized(),
            }

        before, modules = state(), set(sys.modules)
        import pardata
        after, new = state(), set(sys.modules) - modules
        for name in before:
            assert before[name] == after[name], (name, before[name], after[name])
        for name, logger in logging.root.manager.loggerDict.items():
            if name.startswith("pardata") and isinstance(logger, logging.Logger):
                assert (logger.level, logger.handlers, logger.propagate) == (0, [], True), name

        heavy = {"torch.distributed.fsdp", "torch._dynamo", "tqdm", "tensorboard", "torchvision",
                 "matplotlib", "sklearn", "torch.utils.tensorboard", "multiprocessing.forkserver"}
        # Torch itself imports tqdm where that is installed.
        assert not heavy & new, heavy & new
        new = {name.split(".")[0] for name in new} - set(sys.stdlib_module_names)
        assert new <= {"pardata", "torch"}, new
        assert "pardata.model" in sys.modules and "pardata.doctor" not in sys.modules
    """
    assert python(code) == ""


# --- without NumPy

WITHOUT_NUMPY = """
import os, sys, warnings
from pathlib import Path
sys.modules["numpy"] = None  # makes `import numpy` fail, as where it is not installed
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch
from torch import nn
from torch.utils.data import TensorDataset
from pardata import (
    Checkpointer, all_gather, all_reduce_mean, check_in_sync, init, make_loader, rank_zero_call,
    seed_everything, wrap_model,
)

rank = "1" if os.fork() else "0"  # both need the imports
os.environ.update(RANK=rank, LOCAL_RANK=rank)

class Squares(TensorDataset):
    def __getitems__(self, indices):
        return [self[index] for index in indices]

with init() as here:
    seed_everything(0)
    assert all_reduce_mean({"rank": here.rank, "one": 1.0}) == {"rank": 0.5, "one": 1.0}
    model = wrap_model(nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), "ddp")
    x = torch.arange(12.0)[:, None]
    seen = []
    for fast in (True, False):
        data = TensorDataset(x, x * x) if fast else Squares(x, x * x)
        for inputs, targets in make_loader(data, 4, shuffle=True, num_workers=0 if fast else 1):
            model.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            with torch.no_grad():  # an optimizer imports half of torch first
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=1e-4)
            seen.append(inputs)
    check_in_sync(model)
    assert torch.cat(all_gather(torch.cat(seen))).sum() == 2 * 66
    assert rank_zero_call(max, 1, 2) == 2
    checkpointer = Checkpointer(sys.argv[1] + "/checkpoints")
    checkpointer.save(1, model=model)
    assert checkpointer.restore(model=model).step == 1
    assert sys.modules["numpy"] is None
    Path(sys.argv[1], f"needs-none-{here.rank}").touch()
if here.rank == 1:
    assert os.wait()[1] == 0
"""


def test_two_ranks_train_where_numpy_is_not_installed(tmp_path, short_tmp):
    with agent() as port:
        env = torchrun_variables(0, 2, port, TMPDIR=short_tmp, OMP_NUM_THREADS="1")
        run(sys.executable, "-c", WITHOUT_NUMPY, tmp_path, **env)
    names = sorted(path.name for path in tmp_path.glob("needs-none-*"))
    assert names == ["needs-none-0", "needs-none-1"]
