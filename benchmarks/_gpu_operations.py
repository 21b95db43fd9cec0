"""Layers and operations whose results must not differ from run to run: for gpu_first_day.py."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# What is differentiated, and what makes its input. All on the default device.
Case = tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]

IMAGES, ROWS = partial(torch.randn, 8, 64, 33, 33), partial(torch.randn, 50, 64)
ATTENTIONS = "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"
# For these torch 2.11 has no deterministic kernel on CUDA, and says so.
RAISES = {
    *("adaptive_avg_pool2d(7)", "adaptive_max_pool2d(7)", "interpolate bicubic", "grid_sample"),
    *("EmbeddingBag max", "cross_entropy of maps", "ctc_loss", "CUDNN_ATTENTION"),
}


def differentiated(case: Case) -> list[Tensor]:
    """Return a loss, and its gradients: of a layer's parameters, or of an operation's input."""
    forward, inputs = case
    if isinstance(forward, nn.Module):
        leaf, leaves = inputs(), list(forward.parameters())
    else:
        leaf = inputs().requires_grad_()
        leaves = [leaf]
    output = forward(leaf)
    scores = output[0] if isinstance(output, tuple) else output  # an LSTM has a state too
    loss = scores.float().square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def cases(*, is_full: bool) -> dict[str, Case]:
    """Return all of them, by name."""
    images = {name: (operation, IMAGES) for name, operation in of_images().items()}
    words, rows = (512, 4096) if is_full else (16, 16)  # a CPU is slow in bfloat16
    query_key_value = partial(torch.randn, 3, 4, 8, words, 64, dtype=torch.bfloat16)
    feedforward = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).bfloat16()
    in_bf16 = feedforward, partial(torch.randn, rows, 512, dtype=torch.bfloat16)
    attentions = {name: (partial(attention, name), query_key_value) for name in ATTENTIONS}
    return {"feedforward in bfloat16": in_bf16, **layers(), **images, **of_rows(), **attentions}


def layers() -> dict[str, Case]:
    """Return layers that have parameters."""
    conv, in_last, lstm = partial(nn.Conv2d, 64, 64, 3), nn.Conv2d(64, 64, 3), partial(nn.LSTM, 64)
    in_last.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as in gpu.py
    depthwise = conv(groups=64), nn.ConvTranspose2d(64, 32, 3, stride=2)
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    words, sentences = partial(torch.randint, 50, (64, 64)), partial(torch.randn, 32, 16, 64)
    return {
        "Conv2d, BatchNorm2d": (nn.Sequential(conv(), nn.BatchNorm2d(64), nn.ReLU()), IMAGES),
        "Conv2d, channels-last": (in_last, lambda: IMAGES().to(memory_format=torch.channels_last)),
        "depthwise and transposed convolution": (nn.Sequential(*depthwise), IMAGES),
        "GroupNorm, LayerNorm": (nn.Sequential(nn.GroupNorm(8, 64), nn.LayerNorm(33)), IMAGES),
        "Embedding": (nn.Embedding(50, 64), words),
        "EmbeddingBag max": (nn.EmbeddingBag(50, 64, mode="max"), words),
        "LSTM with dropout": (lstm(128, 2, dropout=0.5), sentences),
        "transformer layer with dropout": (encoder, sentences),
    }


def of_images() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return operations on images."""
    modes = "nearest", "bilinear", "bicubic"
    return {
        "max_pool2d": lambda x: F.max_pool2d(x, 3, 2),
        "adaptive_avg_pool2d(1)": lambda x: F.adaptive_avg_pool2d(x, 1),
        "adaptive_avg_pool2d(7)": lambda x: F.adaptive_avg_pool2d(x, 7),
        "adaptive_max_pool2d(7)": lambda x: F.adaptive_max_pool2d(x, 7),
        **{f"interpolate {m}": partial(F.interpolate, scale_factor=2, mode=m) for m in modes},
        "pad, reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        "grid_sample": lambda x: F.grid_sample(x, torch.rand(8, 9, 9, 2), align_corners=False),
        "cross_entropy of maps": lambda x: F.cross_entropy(x, numbers(8, 33, 33)),
    }


def of_rows() -> dict[str, Case]:
    """Return operations on rows, and a loss of sequences."""
    ctc = partial(F.ctc_loss, input_lengths=(30,) * 4, target_lengths=(9,) * 4)
    many, sequences = partial(torch.randn, 4096, 64), partial(torch.randn, 30, 4, 20)
    return {
        "index_add": (lambda x: ROWS().index_add(0, numbers(4096), x), many),
        "x[index]": (lambda x: x[numbers(4096)], ROWS),
        "gather": (lambda x: x.gather(0, numbers(999, 64)), ROWS),
        "cumsum": (lambda x: x.cumsum(0), partial(torch.randn, 9999)),
        "cross_entropy": (lambda x: F.cross_entropy(x, numbers(50)), ROWS),
        "ctc_loss": (lambda x: ctc(x.log_softmax(2), numbers(4, 9) + 1), sequences),
    }


def attention(backend: str, query_key_value: Tensor) -> Tensor:
    """Return causal attention with dropout, by one implementation."""
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(*query_key_value, dropout_p=0.1, is_causal=True)


def numbers(*shape: int) -> Tensor:
    """Return the numbers from 0 to 9, again and again."""
    return (torch.arange(torch.Size(shape).numel()) % 10).view(shape)
