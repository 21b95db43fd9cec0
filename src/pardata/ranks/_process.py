"""What `init` found, opened and said: all the state that the library keeps in a process."""

from weakref import WeakSet

from torch.distributed import Store


class Process:
    """One process of a run.

    Attributes:
        joined: the `Joined` that `init` left; `joined` of ``_world`` tells whether it still holds.
        stores: the stores that this process opened, by the run, with whether it serves them. Kept
            to its end: a rank that joins again at once must not meet a store that is just closing.
        said: what a logger has said with ``once=True``: logger, level and line.
        trained_alone: the models that `backward` has found to be in order, in a process that is
            alone: it looks at each once.
        seed: that `seed_everything` was given; None where it was not called.
        calls: how often, since then, `backward` was given a batch of which no loader says more.
        uneven_batch: the batch size of a training loader that gives ranks uneven shares, until a
            training step without `backward` was warned of it; 0 where there is none.
    """

    def __init__(self) -> None:
        self.joined: object = None
        self.stores: dict[str, tuple[Store, bool]] = {}
        self.said: set[tuple[str, int, str]] = set()
        self.trained_alone = WeakSet[object]()
        self.seed: int | None = None
        self.calls = 0
        self.uneven_batch = 0


process = Process()
