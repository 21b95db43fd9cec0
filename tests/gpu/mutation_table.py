"""The table of mutations: what `mutations.py` takes out of the source, and who must see it."""

from typing import NamedTuple

COPIES = "tests/gpu/test_snapshot_gpu.py"
CHECKPOINTS = "tests/gpu/test_checkpoints_gpu.py"
MODEL = "tests/gpu/test_model_gpu.py"
PREFETCHING = "tests/gpu/test_prefetching.py"
RANKS = "tests/gpu/test_ranks_gpu.py"
TRAINING = "tests/gpu/test_training_gpu.py"
TWO = "tests/gpu/test_two_gpus.py"


class Mutation(NamedTuple):
    """One text of a file of the source, what takes its place, and the tests that must see it.

    Attributes:
        file: below src/pardata.
        old: a text that is there exactly once.
        new: what takes its place.
        tests: arguments of pytest.
        is_quick: whether CI tries it.
    """

    file: str
    old: str
    new: str
    tests: str
    is_quick: bool = False


MUTATIONS = {
    # --- data: batches that are placed ahead of the loop
    "the loop does not wait for a batch": Mutation(
        "data/_device_prefetch.py",
        "current.wait_event(placed)",
        "pass",
        f"{PREFETCHING} -k once_it_is_there",
        is_quick=True,
    ),
    "the event of a batch comes before the batch": Mutation(
        "data/_device_prefetch.py",
        "(shaped(each), stream.record_event(), each)",
        "(*reversed((stream.record_event(), shaped(each))), each)",
        f"{PREFETCHING} -k once_it_is_there",
    ),
    "a transform does not wait for the loop": Mutation(
        "data/_device_prefetch.py",
        "                stream.wait_stream(of_kind.current_stream(device))",
        "                pass",
        f"{PREFETCHING} -k 'not_reuse_memory or in_the_making or has_just_written'",
        is_quick=True,
    ),
    "the memory that a transform reads is let go": Mutation(
        "data/_device_prefetch.py",
        "stream.record_event(), each)",
        "stream.record_event(), None)",
        f"{PREFETCHING} -k not_overwrite",
    ),
    "what runs ahead has no stream of its own": Mutation(
        "data/_device_prefetch.py",
        "with of_kind.stream(stream):",
        "with of_kind.stream(None):",
        f"{PREFETCHING} -k uses_one_stream",
    ),
    "each epoch has another stream": Mutation(
        "data/_device_prefetch.py",
        "@cache\ndef _side_stream",
        "def _side_stream",
        f"{PREFETCHING} -k uses_one_stream",
    ),
    "a loop that has no workers pins nothing": Mutation(
        "data/_step_source.py",
        "pin_memory and not ours}, ours",
        "pin_memory and not ours}, False",
        f"{PREFETCHING} -k are_pinned",
    ),
    "batches of workers are not pinned": Mutation(
        "data/_step_source.py",
        '"pin_memory": pin_memory and not ours',
        '"pin_memory": False',
        f"{PREFETCHING} -k are_pinned",
    ),
    "nobody pins what nobody is told to": Mutation(
        "data/_step_source.py",
        '"pin_memory", has_streams(device)',
        '"pin_memory", False',
        f"{TRAINING} -k 'readmes_loop and bare'",
    ),
    "the tensors of a batch are not pinned": Mutation(
        "data/_device_prefetch.py",
        "else leaf.pin_memory()",
        "else leaf",
        f"{TRAINING} -k 'readmes_loop and bare'",
    ),
    "the host waits for the copy of a batch": Mutation(
        "data/_device_prefetch.py",
        "leaf.to(device, non_blocking=has_streams(device))",
        "leaf.to(device)",
        f"{TRAINING} -k 'readmes_loop and bare'",
    ),
    "the host waits for the copy of indices": Mutation(
        "data/_batched_read.py",
        "without_wait(_from_the_front(indices, len(tensor)), tensor.device)",
        "_from_the_front(indices, len(tensor)).to(tensor.device)",
        f"{PREFETCHING} -k nothing_waits_for_them",
    ),
    # --- checkpoint: what is taken of a run while it goes on
    "a snapshot does not wait for its copies": Mutation(
        "checkpoint/_snapshot.py",
        "        copies.wait()\n",
        "",
        f"{CHECKPOINTS} {TWO} -k checkpoint",
    ),
    "copies are waited for on no device": Mutation(
        "checkpoint/_snapshot.py",
        "torch.get_device_module(gpu).current_stream(gpu).synchronize()",
        "pass",
        COPIES,
        is_quick=True,
    ),
    "copies are waited for on one device": Mutation(
        "checkpoint/_snapshot.py",
        "self._gpus.add(tensor.device)",
        "self._gpus = {tensor.device}",
        f"{TWO} -k checkpoint",
    ),
    "copies are waited for on the current device alone": Mutation(
        "checkpoint/_snapshot.py",
        "current_stream(gpu).synchronize()",
        "current_stream().synchronize()",
        COPIES,
    ),
    "copies are not pinned": Mutation(
        "checkpoint/_snapshot.py", 'device="cpu", pin_memory=True)', 'device="cpu")', COPIES
    ),
    "the host waits for each copy": Mutation(
        "checkpoint/_snapshot.py",
        "copy.copy_(tensor, non_blocking=True)",
        "copy.copy_(tensor)",
        COPIES,
    ),
    "what is copied is let go": Mutation(
        "checkpoint/_snapshot.py",
        "self._copies[key] = tensor, copy",
        "self._copies[key] = copy, copy",
        COPIES,
    ),
    "nothing is copied": Mutation(
        "checkpoint/_snapshot.py",
        "make = copies.of if copy and (world.is_main or name in per_rank) else _plain_tensor",
        "make = _plain_tensor",
        f"{CHECKPOINTS} {TWO} -k checkpoint",
    ),
    "tensors on the CPU are not copied": Mutation(
        "checkpoint/_snapshot.py",
        "tensor.clone() if tensor.is_cpu else tensor.cpu()",
        "tensor.cpu()",
        "tests/checkpoint/test_checkpoint_disk.py -k before_it_is_written",
    ),
    "tensors that are not strided are not copied": Mutation(
        "checkpoint/_snapshot.py",
        'tensor.to("cpu", copy=True)',
        'tensor.to("cpu")',
        "tests/checkpoint/test_checkpoint_disk.py -k before_it_is_written",
    ),
    "values are not copied": Mutation(
        "checkpoint/_snapshot.py",
        "self.trees = map_with_path(self.trees, _copied, is_leaf=is_custom_container)",
        "pass",
        "tests/checkpoint/test_checkpoint_disk.py -k before_it_is_written",
    ),
    "shards are not copied": Mutation(
        "checkpoint/_snapshot.py",
        'p.detach().to("cpu", copy=True)',
        "p.detach()",
        f"{CHECKPOINTS} -k 'fsdp and True'",
    ),
    # --- gradient and collective: what ranks tell each other in a step
    "numbers that go to a GPU are not pinned": Mutation(
        "environment/_device.py",
        "tensor.pin_memory().to(",
        "tensor.to(",
        f"{TRAINING} -k 'readmes_loop and plain'",
    ),
    "the host waits for numbers that go to a GPU": Mutation(
        "environment/_device.py",
        "tensor.pin_memory().to(device, non_blocking=True)",
        "tensor.pin_memory().to(device)",
        f"{TRAINING} -k 'readmes_loop and plain'",
    ),
    "a metric on the CPU goes to the GPU in another way": Mutation(
        "strategies/_step_metrics.py",
        "without_wait(leaf.to(sums.dtype), sums.device)",
        "leaf.to(sums.device)",
        f"{TRAINING} -k metric_on_the_cpu",
    ),
    "what all ranks count is read before it is there": Mutation(
        "strategies/_loss_weights.py",
        "        work.wait()\n",
        "",
        f"{TRAINING} -k some_of_the_ranks",
    ),
    "what a rank adds under exact is read before it is there": Mutation(
        "strategies/exact/_tree_all_reduce.py",
        "        self._work.wait()\n        owned",
        "        owned",
        f"{TRAINING} -k one_two_and_three",
    ),
    "sums of exact are read before they are there": Mutation(
        "strategies/exact/_tree_all_reduce.py",
        "            self._work.wait()\n        assert",
        "            pass\n        assert",
        f"{TRAINING} -k over_every_backend",
    ),
    "the comparison of exact is read before it is there": Mutation(
        "strategies/exact/_exact_step.py",
        "        self._comparison.wait()\n",
        "",
        "tests/strategies/test_exact_step.py",
    ),
    "sums of small numbers are read before they are there": Mutation(
        "collectives/_fingerprint.py",
        "                work.wait()\n",
        "                pass\n",
        "tests/strategies/test_step_metrics.py tests/collectives "
        "tests/data/test_iterable_fetcher.py",
    ),
    "small numbers travel with gradients, on the GPU": Mutation(
        "environment/_world.py",
        'return None, _CPU if _device.supports_device(world.backend, "cpu") else world.device',
        "return None, world.device",
        f"{RANKS} -k beside_gradients",
    ),
    "small numbers travel with gradients, over gloo": Mutation(
        "environment/_world.py",
        "if found is not None and found.cpu_group is not None:",
        "if False:",
        f"{RANKS} -k beside_gradients",
    ),
    # --- launch: whose device it is
    "the group is made before the device is chosen": Mutation(
        "process_group/_rendezvous.py",
        "torch.accelerator.set_device_index(device)",
        "pass",
        f"{RANKS} -k 'before_the_group or adopted'",
    ),
}
