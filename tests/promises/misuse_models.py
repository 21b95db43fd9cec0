"""Bad inputs to what concerns the model: each an error on every rank, with cause and cure."""

import tempfile
from pathlib import Path

import torch
from misuse import MANY, case
from torch import nn

from pardata import Microbatches, all_reduce_sum, backward, load_weights, world, wrap_model

SHARDS = hasattr(torch.cpu.Stream, "record_event")  # torch 2.6 cannot on a CPU


def net(width=2):
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))


def wrapped(strategy="ddp", **options):
    return wrap_model(net(), strategy, **options)


def frozen():
    return net().requires_grad_(False)


def renamed(is_other):
    first, last = net()
    return nn.ModuleDict({"first": first, "other" if is_other else "last": last})


def in_part(is_frozen):
    model = net()
    model[1].bias.requires_grad_(not is_frozen)
    return model


def buffered(has_more):
    model = net()
    if has_more:
        model.register_buffer("scale", torch.ones(2))
    return model


def loss(model, batch):
    return model(batch).square().mean()


def backward_by_hand(model):
    loss(model, X).backward()


def backward_or_reduce(is_backward):
    model = wrapped()
    if is_backward:
        backward(model, loss, X)
    else:
        all_reduce_sum(1)


def backward_under_no_sync():
    model = wrapped()
    with model.no_sync():
        backward(model, loss, X)


def filled(value):
    model = net().requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(value)
    return model


def saved(content):
    """Run `load_weights` on a file of these bytes, or of what `torch.save` makes of an object."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "weights.pt"
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save(content, file)
        load_weights(net(), file)


class Code:
    """Pickled, it is a call."""

    def __reduce__(self):
        return print, ("this must never be printed",)


def pieces(**changes):
    """A rank's two microbatches of a step."""
    here = world()
    facts = {"epoch": 0, "step": 0, "first": 2 * here.rank, "counts": [1] * 2 * here.size}
    return Microbatches([torch.ones(1, 2)] * 2, **{**facts, "size": here.size, **changes})


class Generates(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 1)

    def forward(self, x):
        return self.body(x)

    def generate(self, x):
        return self.body(x)


X = torch.ones(1, 2)

CASES = {
    "wrap_model": [
        case("wrap_model(net(), 'dpp')", "ValueError", "`strategy` must be one of 'auto', 'none', "
             "'dp', 'ddp', 'fsdp', 'exact', but is 'dpp'"),
        case("wrap_model(net(), 'DDP')", "ValueError", "`strategy` must be one of", "is 'DDP'"),
        case("wrap_model(net(), None)", "ValueError", "`strategy` must be one of", "is None"),
        case("wrap_model(net(), ['ddp'])", "ValueError", "`strategy` must be one", "is ['ddp']"),
        case("wrap_model(net(), 'ddp' if rank == 0 else 'fdsp')", "ValueError",
             "`strategy` must be one of", "is 'fdsp'", sizes=MANY),
        case("wrap_model(net(), 'ddp' if rank == 0 else 'exact')", "RuntimeError",
             "the same model", "`the strategy` ddp", "`the strategy` exact", sizes=MANY),
        case("wrap_model(net(), torch.optim.SGD(net().parameters()))", "ValueError",
             "`strategy` must be one of", "but is an optimizer: make that after wrapping",
             label="`wrap_model(model, optimizer)`"),
        case("wrap_model(None, 'ddp')", "TypeError", "`model` must be a torch.nn.Module, but is "
             "a NoneType"),
        case("wrap_model([net()], 'ddp')", "TypeError", "must be a torch.nn.Module", "a list"),
        case("wrap_model([net()])", "TypeError", "must be a torch.nn.Module", "a list"),
        case("wrap_model(nn.ReLU, 'ddp')", "TypeError", "a torch.nn.Module", "the class ReLU"),
        case("wrap_model(net().forward, 'none')", "TypeError", "a torch.nn.Module", "a method"),
        case("wrap_model(net() if rank == 0 else None, 'ddp')", "TypeError",
             "must be a torch.nn.Module", "a NoneType", sizes=MANY),
        case("wrap_model(wrapped(), 'ddp')", "ValueError", "`model` must not be wrapped yet",
             "unwrap(model)"),
        case("wrap_model(nn.Sequential(wrapped()), 'exact')", "ValueError",
             "`model` must not be wrapped yet", "at the outside"),
        case("wrap_model(nn.ReLU(), 'ddp')", "ValueError", "must have a parameter to train",
             "ReLU has none", "strategy='none'"),
        case("wrap_model(frozen(), 'exact')", "ValueError", "must have a parameter to train",
             "'exact'", "strategy='none'"),
        case("wrap_model(nn.LazyLinear(2), 'ddp')", "RuntimeError", "Call `forward` to initialize "
             "the parameters before accessing", ours=False),
        case("wrap_model(net(), 'ddp', find_unused=True)", "TypeError", "'find_unused' is not",
             "find_unused_parameters"),
        case("wrap_model(net(), 'none', find_unused=True)", "TypeError", "'find_unused' is not"),
        case("wrap_model(net(), 'dp', bucket_cap_mb=1)", "TypeError", "'bucket_cap_mb' is not",
             "device_ids"),
        case("wrap_model(net(), 'exact', deterministic=True)", "TypeError",
             "'deterministic' is not; there are on_overflow, threads"),
        case("wrap_model(net(), 'exact', threads=0)", "ValueError", "`threads` must be an integer",
             "is 0"),
        case("wrap_model(net(), 'exact', threads=1 + rank)", "RuntimeError", "the same model",
             "`the options`", "'threads': 1", "'threads': 2", sizes=MANY),
        case("wrap_model(net(), 'exact', on_overflow='ignore')", "ValueError",
             "`on_overflow` must be 'raise' or 'skip', but is 'ignore'"),
        case("wrap_model(net(), 'exact', sync_batchnorm=True)", "ValueError",
             "`sync_batchnorm` must be False under strategy 'exact'"),
        case("wrap_model(net(), 'ddp', sync_batchnorm='no')", "TypeError",
             "`sync_batchnorm` must be True or False, but is 'no'"),
        case("wrap_model(net(), 'dp')", "ValueError", "strategy 'dp' must run in one process",
             "use 'ddp'", sizes=MANY),
        case("wrap_model(net(), 'dp', sync_batchnorm=True)", "ValueError",
             "strategy 'dp' must run in one process, without SyncBatchNorm"),
        case("wrap_model(net(), 'ddp', device='gpu')", "RuntimeError", "`device` must be",
             "is 'gpu'", ours=False),
        case("wrap_model(net(), 'ddp', device='cuda:99')", "RuntimeError", "`device` must be",
             "is 'cuda:99'", ours=False),
        case("wrap_model(net(), device='cuda:99')", "RuntimeError", "`device` must be",
             "is 'cuda:99'", ours=False),
        case("wrap_model(net(), 'ddp', device='cpu' if rank == 0 else 'gpu')", "RuntimeError",
             "`device` must be", "is 'gpu'", sizes=MANY, ours=False),
        case("wrap_model(net(2 + rank), 'ddp')", "RuntimeError", "the same model", "they differ, "
             "first here", "`0.weight` (2, 2) float32", "`0.weight` (3, 2) float32",
             "in the same order", sizes=MANY),
        case("wrap_model(net().to([torch.float32, torch.float64][rank > 0]), 'ddp')",
             "RuntimeError", "the same model", "float32", "float64", sizes=MANY,
             label="one rank's model in float64"),
        case("wrap_model(net().requires_grad_(rank == 0), 'ddp')", "ValueError",
             "must have a parameter to train", sizes=MANY, label="a model frozen on one rank"),
        case("wrap_model(nn.Sequential(*net(), *[nn.ReLU(), nn.Linear(1, 1)][: 2 * rank]), 'ddp')",
             "RuntimeError", "the same model", "no further parameter", "`3.weight`", sizes=MANY,
             label="a layer more on one rank"),
        case("wrap_model(renamed(rank == 1), 'ddp')", "RuntimeError", "the same model",
             "  ranks 0, 2: `last.weight` (1, 2) float32, trained\n",
             "  rank 1: `other.weight` (1, 2) float32, trained\nBuild the same model, in the same "
             "order, on every rank.", sizes=MANY, label="a module of another name on one rank"),
        case("wrap_model(in_part(rank == 1), 'ddp')", "RuntimeError", "the same model",
             "ranks 0, 2: `1.bias` (1,) float32, trained\n", "rank 1: `1.bias` (1,) float32\n",
             sizes=MANY, label="a parameter frozen on one rank"),
        case("wrap_model(buffered(rank == 1), 'ddp')", "RuntimeError", "the same model",
             "ranks 0, 2: no further parameter or buffer\n", "rank 1: `scale` (2,) float32\n",
             sizes=MANY, label="a buffer more on one rank"),
        case("wrap_model(net(), 'ddp', find_unused_parameters=rank > 0)", "RuntimeError",
             "the same model", "`the options`", sizes=MANY),
        case("wrap_model(net().to('meta'), 'ddp')", "NotImplementedError",
             "Cannot copy out of meta tensor", "to_empty()", ours=False),
        case("wrap_model(net().to('meta' if rank == 1 else 'cpu'), 'ddp')", "NotImplementedError",
             "Cannot copy out of meta tensor", sizes=MANY, ranks=(1,), others="rank 1",
             ours=False),
        case("setattr(wrapped(), 'head', nn.Linear(1, 1))", "TypeError",
             "`head` must be set before the model is wrapped", "then call wrap_model",
             label="`wrapped.head = nn.Linear(1, 1)`"),
        case("wrap_model(Generates(), 'ddp').generate(X)", "RuntimeError", "generate",
             "no_grad", label="a method that trains past the wrapper: `wrapped.generate(x)`"),
    ],
    "backward": [
        case("backward(5, loss, X)", "TypeError",
             "`model` must be a torch.nn.Module, but is an int"),
        case("backward(loss(wrapped(), X))", "TypeError",
             "`model` must be a module, but is a Tensor: in place of loss.backward(), call "
             "backward(model, loss_fn, batch) with a function that returns the loss"),
        case("backward(wrapped(), X, loss)", "TypeError", "`loss_fn` must be a function of the "
             "model and a microbatch, but is a Tensor: call backward(model, loss_fn, batch)"),
        case("backward(wrapped(), nn.CrossEntropyLoss(), (X, X))", "TypeError",
             "`loss_fn` must run the model, but is a CrossEntropyLoss, which takes outputs and "
             "targets: write def loss_fn(model, batch): return criterion("),
        case("backward(wrapped(), nn.functional.mse_loss, (X, X))", "TypeError",
             "`loss_fn` must run the model, but is mse_loss, which takes"),
        case("backward(wrapped(), lambda model, x: {'loss': loss(model, x), 'logits': x}, X)",
             "TypeError", "but returned a dict: return its `.loss`, or it and metrics"),
        case("backward(wrapped(), lambda model, x: (loss(model, x), 'b' * 10**6), X)", "TypeError",
             "`metrics` must be a number or a tensor, but is 'bbbbbbbbbbbb...bbbbbbbbbbbbb' (str)"),
        case("backward(wrapped(), lambda model, x: len(model(x)), X)", "TypeError",
             "`loss_fn` must return a tensor of one element, but returned", "take the mean"),
        case("backward(wrapped(), lambda model, x: model(x), X.expand(3, 2))", "ValueError",
             "`loss_fn` must return a tensor of one element, but returned one of shape (3, 1)"),
        case("backward(wrapped(), lambda model, x: unwrap(model)(x).mean(), X)", "RuntimeError",
             "`loss_fn` must run the model that it is given, with gradients", "call model(…)"),
        case("backward(wrapped(), lambda model, x: (loss(model, x), {'text': 'b'}), X)",
             "TypeError", "`metrics['text']` must be a number or a tensor, but is 'b'"),
        case("backward(wrapped(), lambda model, x: (loss(model, x), [0] * rank), X)",
             "RuntimeError", "every rank must pass the same to `backward`, but `metrics` differs",
             "Let `loss_fn` return the same structure", sizes=MANY),
        case("backward(wrapped(), lambda model, _: loss(model, X), 'a batch')", "TypeError",
             "`batch` must hold a tensor whose rows are its samples, but a str has none",
             "pass `count`"),
        case("backward(wrapped(), loss, X, count=lambda x: 0.5)", "TypeError",
             "`count(microbatch)` must be an integer of at least 0, but is 0.5"),
        case("backward(wrapped(), loss, X, count=lambda x: -1)", "ValueError",
             "`count(microbatch)` must be an integer of at least 0, but is -1"),
        case("backward(wrapped(), loss, X, count=lambda x: 0)", "ValueError",
             "a step must count something", "skip it"),
        case("backward(wrapped(), loss, X, count=lambda x: 1 - 2 * (rank == 1))", "ValueError",
             "`count(microbatch)` must be an integer of at least 0", sizes=MANY, ranks=(1,),
             others="that failed on 1 other rank(s): see the error there"),
        case("backward(wrapped('exact'), loss, X)", "TypeError",
             "`batch` must be Microbatches under strategy 'exact'", "pass microbatch_size"),
        case("backward(wrapped('exact'), loss, pieces(step=rank))", "RuntimeError",
             "every rank must be at the same step of the same loader", sizes=MANY),
        case("backward(wrapped('exact'), lambda model, x: model(x).mean() / 0, pieces())",
             "OverflowError", "numbers must be finite and at most 2**46 under strategy 'exact'",
             "on_overflow='skip'"),
        case("backward_by_hand(wrapped('exact'))", "RuntimeError",
             "under strategy 'exact' only `pardata.backward` must run a backward",
             "in place of loss.backward()", label='`loss.backward()` under `"exact"`'),
        case("backward_under_no_sync()", "ValueError", "must synchronise, but is called under "
             "no_sync()", "leave out no_sync()", "pass microbatch_size to make_loader",
             label="`with model.no_sync(): backward(…)`"),
        case("backward_or_reduce(rank == 0)", "RuntimeError", "every rank must pass the same",
             "`call`", "rank 0: call='backward'", "call='all_reduce_sum'", sizes=MANY,
             label="`backward` on one rank, `all_reduce_sum` on the others"),
        case("backward(nn.Sequential(wrapped()), loss, X)", "ValueError",
             "`model` must be what wrap_model returned", "at the outside", sizes=MANY),
        case("backward(wrapped(), loss, pieces(size=7))", "ValueError",
             "must be those that share `batch`, but it is shared by 7", sizes=MANY),
    ],
    "unwrap": [
        case("unwrap(5)", "TypeError", "`model` must be a torch.nn.Module, but is an int"),
        case("unwrap(nn.Linear)", "TypeError", "a torch.nn.Module, but is the class Linear"),
    ],
    "fingerprint": [
        case("fingerprint(net().state_dict())", "TypeError",
             "`model` must be a torch.nn.Module, but is an OrderedDict"),
    ],
    "Microbatches": [
        case("Microbatches.of([], step=0)", "ValueError", "`batches` must be equally many on every "
             "rank, at least one, but are [0"),
        case("Microbatches.of([X] * (1 + rank), step=0)", "ValueError", "but are [1, 2", "in rank "
             "order: divide them otherwise", sizes=MANY),
        case("Microbatches.of(['text'], step=0)", "TypeError", "`batch` must hold a tensor whose "
             "rows are its samples"),
    ],
    "check_in_sync": [
        case("check_in_sync(5)", "TypeError", "`model` must be a torch.nn.Module, but is an int"),
        case("check_in_sync(net() if rank else None)", "TypeError",
             "`model` must be a torch.nn.Module, but is a NoneType", sizes=MANY),
        case("check_in_sync(filled(rank))", "RuntimeError",
             "every rank must hold the same weights, but `", "differs between ranks",
             "rank 0: SHA-256", sizes=MANY, label="weights changed on one rank"),
    ],
}  # fmt: skip
CASES["load_weights"] = [
    case("load_weights(5, {})", "TypeError", "`model` must be a torch.nn.Module, but is an int"),
    case("load_weights(net(), {**net().state_dict(), 3: X})", "TypeError",
         "`state_or_path` must map names to tensors, but has the key 3 (int)"),
    case("load_weights(net(), 5)", "TypeError",
         "`state_or_path` must be a state dict or a path, but is an int"),
    case("load_weights(net(), {'model': net().state_dict()})", "TypeError",
         "`state_or_path` must map names to tensors, but 'model' holds a dict",
         "checkpoint['model']"),
    case("load_weights(net(), {})", "RuntimeError", "Missing key(s) in state_dict", ours=False),
    case("load_weights(net(), {**net().state_dict(), 'head.weight': X})", "RuntimeError",
         "Unexpected key(s) in state_dict", "head.weight", ours=False),
    case("load_weights(net(), net(3).state_dict())", "RuntimeError", "size mismatch for 0.weight",
         ours=False),
    case("load_weights(net(), {'0.weight': X, 'module.0.weight': X})", "ValueError",
         "`state_or_path` must name each parameter once, but '0.weight' comes twice"),
    case("load_weights(wrapped(), net().state_dict(), assign=True)", "ValueError",
         "`assign` must be False for a wrapped model"),
    case("load_weights(net(), 'none.pt')", "FileNotFoundError", "none.pt", ours=False),
    case("saved(Code())", "RuntimeError", "weights.pt must be a file of weights",
         "cannot be read as one (UnpicklingError: Weights only load failed)",
         label="a file that runs code when it is unpickled"),
    case("saved(b'PK' + bytes(100))", "RuntimeError", "weights.pt must be a file of weights",
         "is it complete", label="a damaged file"),
    case("saved([1, 2])", "TypeError", "`state_or_path` must be a state dict or a path",
         label="a file that holds something else"),
]  # fmt: skip
