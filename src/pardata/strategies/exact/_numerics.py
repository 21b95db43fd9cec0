"""The numerics of an exact run: a record, a probe of kernels, and settings that are errors.

Does not prove that kernels are equal: the probe runs a few of them.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812  # the usual alias
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

from pardata._pytree import sha256_of
from pardata.environment._device import kernel_settings, properties_of, widest_float_dtype
from pardata.model import _torch_internals as internals
from pardata.model._unwrap import unwrap

# Options of torch.compile that choose kernels by measured speed.
_TIMED = "max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning"


def numerics_record(device: torch.device) -> dict[str, object]:
    """Return the facts, except the input, that decide the bits of a kernel's result."""
    cpu = torch.backends.cpu.get_cpu_capability()
    return {
        "the number of threads": torch.get_num_threads() if device.type == "cpu" else None,
        "torch": str(torch.__version__),  # TorchVersion compares differently
        "the processor": cpu if device.type == "cpu" else properties_of(device).name,
        "a probe of its arithmetic": kernel_probe(device)[:16],
        **kernel_settings(device),
    }


def numerics_error(model: nn.Module, threads: int) -> RuntimeError | None:
    """Return the error if this process cannot compute exactly with `model`, else None.

    For a compiled model it also lets dynamo raise at its limit of recompilations, in the whole
    process. Past the limit, ranks would run different sizes uncompiled. Evaluations count as well.
    """
    parts, parameters = internals.modules_and_parameters(model)
    if any("dynamo_ctx" in part.__dict__ for part in parts):
        internals.fail_past_recompile_limit()
    texts = (*_wrong_settings(parameters, threads), *_wrong_compilations(parts))
    return RuntimeError(f"under strategy 'exact' {texts[0]}") if texts else None


def _wrong_settings(parameters: Iterable[nn.Parameter], threads: int) -> Iterator[str]:
    """Yield errors for settings under which kernels vary in ways that the probe does not see."""
    if torch.backends.cudnn.benchmark:
        yield "torch.backends.cudnn.benchmark must be False, but is True: set it to False"
    on_cpu = all(one.is_cpu or one.is_meta for one in parameters)
    if not on_cpu and torch.get_deterministic_debug_mode() < 2:  # only level 2 raises
        yield ("GPUs need deterministic algorithms: call seed_everything(seed, deterministic=True)")
    if on_cpu and (now := torch.get_num_threads()) != threads:
        yield (f"PyTorch must keep {threads} thread(s), not {now}: call wrap_model(threads={now})")


def _wrong_compilations(parts: Iterable[nn.Module]) -> Iterator[str]:
    """Yield errors for modules whose compilation may give ranks different kernels."""
    for part in parts:
        context = part.__dict__.get("dynamo_ctx")
        options = getattr(context, "compiler_config", None) or {}
        timed = [name for name in _TIMED if options.get(name) and not options.get("deterministic")]
        if internals.is_compiled_in_place(part):
            how = "in place, where that cannot be seen"
        elif context is not None and internals.has_dynamic_sizes(context):
            how = "without it, so that kernels may depend on the sizes that came before"
        elif timed:
            how = f"with {timed[0]}, so that kernels are chosen by their speed"
        else:
            continue
        yield (
            f"a model must be compiled by torch.compile(model, dynamic=False), without "
            f"mode='max-autotune', but a {type(unwrap(part)).__name__} was compiled {how}"
        )


def kernel_probe(device: torch.device) -> str:
    """Return a hash of the results of some kernels on a device, in each precision."""
    dtypes = list(dict.fromkeys([torch.float32, widest_float_dtype(device), torch.float16]))
    asked = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if asked is None or asked(including_emulation=False):
        dtypes.append(torch.bfloat16)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return sha256_of(("", result) for dtype in dtypes for result in _results(dtype, device))


def _results(dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """Yield results of several kernels, for sizes that are multiples of vector widths or not."""

    def numbers(*shape: int) -> Tensor:
        integers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device="cpu")
        return (integers * 7919 % 1009 / 1009 - 0.5).to(dtype).view(shape).to(device)

    rows = numbers(33, 259)
    yield from (numbers(64, 256) @ numbers(256, 64), product := rows @ numbers(259, 67))
    for inner, outer in ((5, 9), (8, 16)):  # tensor cores take channels in eights
        images, filters = numbers(2, inner, 17, 19), numbers(outer, inner, 3, 3)
        yield (output := F.conv2d(images, filters, padding=1))
        yield conv2d_input(images.shape, filters, output, padding=1)
        yield conv2d_weight(images, filters.shape, output, padding=1)
        yield F.batch_norm(images, None, None, training=True)
    heads = numbers(2, 4, 33, 64)
    yield F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    yield from (product.softmax(1), F.layer_norm(rows, rows.shape[1:]))
    yield from (rows.exp(), rows.sin(), rows.tanh(), numbers(10007).sum())
