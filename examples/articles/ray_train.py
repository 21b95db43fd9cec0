"""Train mnist.py's net under Ray Train: its own `main`, in workers that Ray starts.

    pip install "ray[train]"
    python examples/articles/ray_train.py --workers 2 --data digits
    python examples/articles/ray_train.py --workers 8 --gpus --data mnist --run-dir /shared/mnist

Ray has made the process group before the function begins, and `pardata.init` finds it. All other
options are those of mnist.py. Workers start in folders of their own, so the run directory is made
absolute; on several machines it must be on a disk that all of them see.
"""

import argparse
import sys
import time
from pathlib import Path

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict[str, list[str]]) -> None:
    """Run on each worker, in the process group that Ray made."""
    import mnist  # there, and not where the workers are only asked for

    sys.argv = ["mnist.py", *config["arguments"]]
    if problem := mnist.main():
        raise RuntimeError(problem)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2, help="processes, each a rank")
    parser.add_argument("--gpus", action="store_true", help="give each of them a GPU")
    parser.add_argument("--run-dir", help="as of mnist.py (default: runs/ray-<time>)")
    args, others = parser.parse_known_args()
    run_dir = Path(args.run_dir or time.strftime("runs/ray-%Y%m%d-%H%M%S")).resolve()
    TorchTrainer(
        train,
        train_loop_config={"arguments": [*others, "--run-dir", str(run_dir)]},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(name=run_dir.name, storage_path=str(run_dir / "ray")),
    ).fit()


if __name__ == "__main__":
    main()
