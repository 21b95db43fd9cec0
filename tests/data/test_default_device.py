"""torch.set_default_device, to which loading and caching pay no attention."""

import pytest
import torch
from common_data import Count, Numbers, steps
from on_ranks import run
from torch.utils.data import ConcatDataset, Subset, TensorDataset, WeightedRandomSampler

from pardata import cache_dataset, make_loader


class Noisy(Numbers):
    """Draws a tensor, on the CPU as it says."""

    def __getitem__(self, index):
        return index + torch.rand((), device="cpu").item()


TENSORS = TensorDataset(torch.arange(23, device="cpu"))
CASES = {
    "samples": (Numbers(23), {"shuffle": True}),
    "random samples": (Noisy(23), {}),
    "many": (TensorDataset(torch.arange(10**5)), {"shuffle": True, "batch_size": 40_000}),
    "tensors": (TENSORS, {"shuffle": True}),
    "several": (ConcatDataset([TENSORS, Subset(TENSORS, [3, 1])]), {"shuffle": True}),
    "weights": (Numbers(23), {"sampler": WeightedRandomSampler([1.0] * 23, 23)}),
    "a stream": (Count(23), {}),
}


def _found(device, workers):
    torch.set_default_device(device)
    try:
        found = {}
        for name, (data, options) in CASES.items():
            loader = make_loader(
                data, **{"batch_size": 4, "seed": 1, "num_workers": workers, **options}
            )
            found[name] = [steps(loader) for _ in range(2)]
            if name != "a stream":
                found[f"fingerprint of {name}"] = loader.fingerprint()
        return found
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(("size", "workers"), [(1, 2), (2, 0)])
def test_loaders_yield_the_same_under_any_default_device(size, workers):
    if size == 1:
        assert _found("meta", workers) == _found("cpu", workers)
        return
    assert run(_found, "meta", workers, world_size=2) == run(_found, "cpu", workers, world_size=2)


def _cached(folder, device):
    source = [(torch.full((2,), float(i), device="cpu"), i, i / 2) for i in range(5)]
    torch.set_default_device(device)
    try:
        cached = cache_dataset(source, folder / device, num_workers=0)
        loader = make_loader(cached, 2, shuffle=True, seed=1, drop_last=False)
        values = [[column.tolist() for column in batch] for batch in loader]
        return values, str(cached[3])
    finally:
        torch.set_default_device(None)


def test_so_does_a_cache(tmp_path):
    assert _cached(tmp_path, "meta") == _cached(tmp_path, "cpu")
