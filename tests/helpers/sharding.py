"""A tensor of a model that may be sharded."""


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
