"""What other people's loops look for in a loader, as they do in a ``DataLoader``."""

from types import SimpleNamespace
from typing import NoReturn


class ForPeers:
    """The attributes by which a Trainer tells the epoch, and cuts batches again."""

    @property
    def sampler(self) -> NoReturn:
        """Nothing, for whoever needs one shares out or skips, as the loader itself does."""
        raise AttributeError(
            "a loader must be used as it is, because it shares out and resumes by itself, but was "
            "asked for its `sampler`, as by accelerate's `skip_first_batches` and "
            "`prepare_data_loader`: leave these out, and save and load the loader's state_dict() "
            "(with transformers' Trainer pass ignore_data_skip=True)"
        )

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """What has the loader as its `sampler`: there Lightning finds ``set_epoch``."""
        return SimpleNamespace(sampler=self)
