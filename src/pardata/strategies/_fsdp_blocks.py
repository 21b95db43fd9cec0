"""Finds the blocks of a model to shard: repeated modules, as the layers of a transformer."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from pardata._validation import type_with_article
from pardata.model._unwrap import wrapper_chain

Blocks: TypeAlias = type[nn.Module] | Sequence[type[nn.Module]] | Literal["auto"]

_PART = 0.1  # the fraction of the parameters above which the modules of a ModuleList are blocks


def blocks_of(module: nn.Module, blocks: Blocks) -> list[nn.Module]:
    """Return the blocks of a module, inner blocks before outer ones.

    Args:
        module: a module that is not wrapped.
        blocks: classes of modules; or ``"auto"``: the modules of each outermost
            ``nn.ModuleList`` that holds more than a tenth of the parameters.

    Raises:
        TypeError: `blocks` is neither.
        ValueError: no block is found, or a parameter is in a block and outside of it.
    """
    found = list(_listed(module) if blocks == "auto" else _named(module, blocks))
    _check_shared(module, found)
    depths = {one: name.count(".") for name, one in module.named_modules()}
    return sorted(dict.fromkeys(found), key=lambda one: -depths[one])


def size_of(module: nn.Module) -> int:
    """Return the number of elements of the parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def _listed(module: nn.Module) -> list[nn.Module]:
    """Return the modules of the outermost ModuleLists that hold many parameters."""
    lists = [one for one in _outermost(module) if size_of(one) > _PART * size_of(module)]
    if found := [part for one in lists for part in _parts(one)]:
        return found
    raise ValueError(
        f"blocks='auto' finds no big nn.ModuleList in {type(module).__name__}: pass blocks=[Layer]"
    )


def _outermost(module: nn.Module) -> Iterator[nn.ModuleList]:
    if isinstance(module, nn.ModuleList):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _parts(one: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a list that have a forward and parameters."""
    for part in one.children():
        if not _has_forward(part):  # a list of lists
            yield from _parts(part)
        elif size_of(part):
            yield wrapper_chain(part)[-1]  # inside torch.compile


def _named(module: nn.Module, blocks: Any) -> Iterator[nn.Module]:
    """Yield the modules of the given classes."""
    kinds: Sequence[type[nn.Module]] = [blocks] if isinstance(blocks, type) else blocks
    if not (isinstance(kinds, Sequence) and kinds and all(isinstance(k, type) for k in kinds)):
        given = type_with_article(blocks) if isinstance(blocks, nn.Module) else repr(blocks)
        msg = f"`blocks` must be 'auto' or classes of modules, but is {given}: pass blocks=[Layer]"
        raise TypeError(msg)
    inner = [one for one in module.modules() if one is not module and size_of(one)]
    for kind in kinds:
        found = [one for one in inner if isinstance(one, kind) and _has_forward(one)]
        if not found:
            msg = f"`blocks` must be classes of modules in {type(module).__name__} that have a "
            msg += f"forward and parameters, but it has no {kind.__name__}: see print(model)"
            raise ValueError(msg)
        yield from found


def _has_forward(one: nn.Module) -> bool:
    return type(one).forward is not nn.Module.forward


def _check_shared(module: nn.Module, found: list[nn.Module]) -> None:
    """Raise for a parameter that is in a block and outside, which would be sharded twice."""
    holders: dict[Tensor, dict[str, nn.Module]] = {}
    for name, one in module.named_modules():
        for key, parameter in one.named_parameters(recurse=False):
            holders.setdefault(parameter, {})[f"{name}.{key}".lstrip(".")] = one
    for block in found:
        inside = set(block.modules())
        for names in holders.values():
            if 0 < sum(one in inside for one in names.values()) < len(names):
                raise ValueError(
                    f"`blocks` must not share parameters, but {' and '.join(map(repr, names))} are "
                    f"one, and a {type(block).__name__} holds only some: pass classes that hold all"
                )
