"""A dataset decoded once, read by whole batches."""

from pardata.cache._cache_dataset import CachedDataset, cache_dataset

__all__ = ["CachedDataset", "cache_dataset"]
