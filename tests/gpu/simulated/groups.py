"""Collectives of the simulated accelerator: "simccl", as NCCL, and gloo's."""

import functools

import torch
import torch.distributed as dist
from simulated_c import collectives
from torch.distributed import distributed_c10d as c10d


def register():
    dist.Backend.register_backend("simccl", _simccl, devices=["sim"])
    # Gloo takes CUDA's tensors. It has no registry for those of others.
    dist.Backend.backend_capability["gloo"] = ["cpu", "cuda", "sim"]
    c10d._new_process_group_helper = _with_gloo(c10d._new_process_group_helper)


def _simccl(store, rank, size, timeout):
    return collectives(dist.ProcessGroupGloo(store, rank, size, timeout), False)


def _with_gloo(make):
    @functools.wraps(make)
    def made(*args, **options):
        group, store = make(*args, **options)
        sim, cpu = torch.device("sim"), torch.device("cpu")
        if isinstance(group, dist.ProcessGroup):
            kinds = {kind.type for kind in group._device_types}
            gloo = group._get_backend(cpu) if "cpu" in kinds else None
            if gloo is not None and ("sim" not in kinds or group._get_backend(sim) is gloo):
                custom, name = dist.ProcessGroup.BackendType.CUSTOM, group.group_name
                group._register_backend(sim, custom, collectives(gloo, True))
                group._set_group_name(name)  # the group has that of any of its backends
        return group, store

    return made
