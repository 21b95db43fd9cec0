"""A program that ends in the middle of epochs: HOW WORKERS STARTS.

HOW is "end" if it comes to its end, "exit" if it calls sys.exit, and "error" if it raises. It
leaves iterators of loaders in all places that a program has for them.
"""

import sys

from torch.utils.data import IterableDataset

from pardata import make_loader


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(40))


class Kept:
    """Holds what it is given, in an attribute of the class or of an object."""

    batches = None

    def __init__(self, batches):
        self.held, self.me = batches, self  # a reference cycle


def begun(data, **options):
    """Return an iterator in the middle of its epoch, and an open one of the loader's epochs."""
    loader = make_loader(data, 4, device=None, **OPTIONS, **options)
    epochs = loader.epochs(3)
    next(epochs)
    batches = iter(loader)
    next(batches)
    return batches, epochs


if __name__ == "__main__":
    how, workers, starts = sys.argv[1:]
    OPTIONS = {"num_workers": int(workers)}
    if int(workers):
        OPTIONS["multiprocessing_context"] = starts
    left, in_a_list = begun(range(40)), [begun(Stream())]
    Kept.batches = begun(range(40), shuffle=True, microbatch_size=2)
    cycle = Kept(begun(range(40), batch_transform=lambda batch: batch))
    # Modules that something holds are emptied, the last one first, before what is in this one goes.
    sys.held_to_the_end = [*sys.modules.values()], begun(Stream())
    if how == "exit":
        sys.exit(0)
    if how == "error":
        raise RuntimeError("the end")
