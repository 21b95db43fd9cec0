"""Strategy "exact": the wrapper, what it refuses, and what it records."""

import contextlib
import copy
import io
import json
import pickle
import sys
from unittest.mock import patch

import processes
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from on_ranks import Raised, caught, run
from torch import nn
from torch.utils.data import TensorDataset

import pardata
from pardata import backward, fingerprint, load_weights, unwrap, world, wrap_model
from pardata.model._unwrap import Wrapper, wrapper_chain
from pardata.strategies._wrap_model import strategy_of
from pardata.strategies.exact._exact import ExactModel
from pardata.strategies.exact._numerics import numerics_record

ONLY = r"only `pardata.backward` must run a backward, but `\w*\.?{}` got another gradient: "
CPU = torch.device("cpu")
CURE = r"call backward\(model, loss_fn, batch\)"


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.name = "net"

    def forward(self, rows):
        return self.last(F.dropout(torch.relu(self.norm(self.first(rows))), 0.2, self.training))

    def double_of(self, rows):
        return 2 * self(rows)


def seeded(seed=0):
    torch.manual_seed(seed)
    return Net()


def data(count=24):
    numbers = torch.Generator().manual_seed(1)
    rows = torch.randn(count, 4, generator=numbers)
    return TensorDataset(rows, torch.randint(3, (count,), generator=numbers))


def loss_fn(model, batch):
    rows, targets = batch
    return F.cross_entropy(model(rows), targets)


def loader():
    return pardata.make_loader(data(), 12, shuffle=True, microbatch_size=3, seed=5, num_workers=0)


def step(model, **options):
    (batch, *_) = loader()
    return backward(model, loss_fn, batch, **options)


def gradients(model):
    return [parameter.grad for parameter in unwrap(model).parameters()]


def bare(model):
    loss_fn(model, data(6)[:]).backward()


# A wrapper that reads through


def test_it_wraps_at_size_1_too_and_reads_and_writes_through():
    net = seeded()
    model = wrap_model(net, "exact")
    assert isinstance(model, ExactModel)
    assert isinstance(model, Wrapper)
    assert unwrap(model) is net
    assert list(wrapper_chain(model)) == [model, net]
    assert model.name == "net"
    model.name = "other"
    assert net.name == "other"
    model.eval()
    assert not net.training
    assert "double_of" in dir(model)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 4)), net(torch.ones(2, 4)))
        assert torch.equal(model.double_of(torch.ones(2, 4)), net.double_of(torch.ones(2, 4)))
    assert next(name for name, _ in model.named_parameters()) == "module.first.weight"
    assert list(model.state_dict()) == list(net.state_dict())
    with pytest.raises(TypeError, match="must be set before wrap_model, but a Module"):
        model.more = nn.Linear(1, 1)


def test_a_model_whose_batch_norm_is_already_over_all_ranks_is_refused():
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(
        ValueError, match="must be False under strategy 'exact': make the model without"
    ):
        wrap_model(net, "exact")


def test_a_model_can_be_wrapped_again_after_unwrap():
    model = wrap_model(seeded(), "exact")
    again = wrap_model(unwrap(model), "exact")
    for trained in (again, model, again):  # whichever is used: both are there
        model.zero_grad()
        assert step(trained) > 0
        assert all(gradient is not None for gradient in gradients(again))
    for wrapper in (model, again):
        with pytest.raises(RuntimeError, match=ONLY.format("bias") + CURE):
            bare(wrapper)


def test_what_is_not_the_model_trains_as_ever():
    net = seeded()
    model, other = wrap_model(net, "exact"), nn.Linear(3, 1)
    step(model)
    other(torch.ones(1, 3)).sum().backward()
    rows = torch.ones(2, 4, requires_grad=True)
    (of_input,) = torch.autograd.grad(model(rows).sum(), rows)
    assert of_input.shape == (2, 4)
    bare(copy.deepcopy(net))
    alone = seeded()
    wrap_model(alone, "exact")  # and nobody keeps the wrapper
    bare(alone)


# A backward that is not pardata's


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=not isinstance(saved, nn.Module))


COPIES = {
    "itself": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "file": through_a_file,
    "copy of a compiled one": lambda model: copy.deepcopy(compiled_in_place(model)),
}


def compiled_in_place(model):
    model.compile(backend="eager", dynamic=False)
    return model


@pytest.mark.parametrize("how", COPIES)
def test_a_bare_backward_raises_at_once_and_the_step_works(how):
    original = wrap_model(seeded(), "exact")
    expected = step(copy.deepcopy(original))
    assert all(gradient is None for gradient in gradients(original))  # copies are trained apart
    model = COPIES[how](original)
    with pytest.raises(RuntimeError, match=ONLY.format("bias") + CURE):
        bare(model)
    assert all(gradient is None for gradient in gradients(model))
    model.norm.reset_running_stats()
    assert step(model) == expected
    assert all(gradient is not None for gradient in gradients(model))


def test_one_that_was_frozen_when_it_was_wrapped_is_refused_too():
    net = seeded()
    net.first.requires_grad_(False)
    model = wrap_model(net, "exact")
    assert not net.first.weight.requires_grad
    net.requires_grad_(False)
    net.first.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"`first\.bias` got another gradient"):
        bare(model)


def test_a_later_step_does_not_train_another_exact_model():
    model, other = (wrap_model(seeded(), "exact") for _ in range(2))
    other.eval()  # in training mode its buffers would be an error
    for _ in range(2):
        step(model)  # what the loss trains is looked at in steps 1, 2, 4 and so on

    def loss_of_both(model, batch):
        return loss_fn(model, batch) + loss_fn(other, batch)

    (batch, *_) = loader()
    with pytest.raises(RuntimeError, match=ONLY.format("bias") + CURE):
        backward(model, loss_of_both, batch)
    assert all(gradient is None for gradient in gradients(other))


def test_parameters_are_frozen_unfrozen_and_replaced_between_steps():
    model = wrap_model(seeded(), "exact")
    step(model)
    model.zero_grad()
    model.first.requires_grad_(False)
    step(model)
    assert model.first.weight.grad is None
    assert model.last.weight.grad is not None
    model.first.requires_grad_(True)
    unwrap(model).last = nn.Linear(8, 5)
    step(model)
    assert model.first.weight.grad is not None
    assert model.last.weight.grad.shape == (5, 8)
    with pytest.raises(RuntimeError, match=ONLY.format("bias")):
        bare(model)


def test_what_is_unfrozen_within_a_step_is_refused():
    model = wrap_model(seeded(), "exact")
    model.first.requires_grad_(False)

    def unfreezing(model, batch):
        model.first.requires_grad_(True)
        return loss_fn(model, batch)

    (batch, *_) = loader()
    with pytest.raises(RuntimeError, match="what is trained must not change in a step"):
        backward(model, unfreezing, batch)


# Kernels


COMPILED = {
    "inside": lambda net, **how: wrap_model(torch.compile(net, backend="eager", **how), "exact"),
    "outside": lambda net, **how: torch.compile(wrap_model(net, "exact"), backend="eager", **how),
    "a part": lambda net, **how: wrap_model(
        nn.Sequential(torch.compile(net.first, backend="eager", **how), net.last), "exact"
    ),
}


@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_model_needs_dynamic_false_in_every_nesting(how):
    text = r"must be compiled by torch.compile\(model, dynamic=False\), .* compiled without it, so"
    for dynamic in ({}, {"dynamic": None}, {"dynamic": True}):
        with pytest.raises(RuntimeError, match=text):
            step(COMPILED[how](seeded(), **dynamic))
    expected = COMPILED[how](seeded(), dynamic=False)
    net = seeded()
    plain = wrap_model(nn.Sequential(net.first, net.last) if how == "a part" else net, "exact")
    assert step(expected) == step(plain)
    assert all(map(torch.equal, gradients(expected), gradients(plain)))
    with pytest.raises(RuntimeError, match=ONLY.format("bias")):
        bare(expected)


@pytest.mark.parametrize("part", ["Net", "Linear"])
def test_what_is_compiled_in_place_does_not_say_how_and_is_refused(part):
    model = wrap_model(seeded(), "exact")
    compiled_in_place(model if part == "Net" else model.last)
    text = f"but a {part} was compiled in place, where that cannot be seen"
    with pytest.raises(RuntimeError, match=text):
        step(model)


@contextlib.contextmanager
def threads(count):
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(1)


class OnGpu(nn.Parameter):
    """Says that it is on a GPU, of which there need be none."""

    is_cpu = property(lambda _: False)


@pytest.mark.parametrize("on", [True, False])
def test_on_a_gpu_algorithms_must_be_deterministic_and_not_only_warn(on):
    net = nn.Linear(2, 2)
    net.bias = OnGpu(net.bias.detach())
    torch.use_deterministic_algorithms(on, warn_only=on)
    try:
        with pytest.raises(RuntimeError) as raised:
            wrap_model(net, "exact")
        torch.use_deterministic_algorithms(True)
        wrap_model(net, "exact")
    finally:
        torch.use_deterministic_algorithms(False)
    assert str(raised.value) == (
        "under strategy 'exact' GPUs need deterministic algorithms: call "
        "seed_everything(seed, deterministic=True)"
    )


TIMED = [{"max_autotune": True}, {"max_autotune_gemm": True}, {"coordinate_descent_tuning": True}]


@pytest.mark.parametrize("how", [{"mode": "max-autotune"}, *({"options": o} for o in TIMED)])
def test_a_model_whose_kernels_are_chosen_by_their_speed_is_refused(how):
    option = next(iter(how.get("options", TIMED[0])))
    text = f"but a Net was compiled with {option}, so that kernels are chosen by their speed"
    with pytest.raises(RuntimeError, match=f"without mode='max-autotune', {text}"):
        wrap_model(torch.compile(seeded(), dynamic=False, **how), "exact")
    wrap_model(torch.compile(seeded(), dynamic=False, mode="reduce-overhead"), "exact")


@pytest.mark.parametrize("name", [next(iter(one)) for one in TIMED])
def test_a_setting_of_inductor_for_all_models_is_refused_too(name):
    from torch._inductor import config  # a second to import

    text = f"but a Net was compiled with {name}, so that kernels are chosen by their speed"
    with config.patch({name: True}), pytest.raises(RuntimeError, match=text):
        wrap_model(torch.compile(seeded(), dynamic=False), "exact")


# What may differ between ranks.
DIFFERING = {
    "threads": lambda: threads(2),
    "benchmark": lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True),
    "processor": lambda: patch.object(torch.backends.cpu, "get_cpu_capability", lambda: "Z80"),
    "arithmetic": lambda: patch.object(F, "layer_norm", lambda rows, shape: rows.sigmoid()),
}
BENCHMARK = "under strategy 'exact' torch.backends.cudnn.benchmark must be False, but is True: set"


def with_differing(fn, *args):
    """Call `fn` under each setting on the last rank; return the texts of what is raised."""
    is_last = world().rank == world().size - 1
    told = {}
    for name, differing in DIFFERING.items():
        with differing() if is_last else contextlib.nullcontext():
            found = caught(fn, *args)
        told[name] = found.text if isinstance(found, Raised) else None
    return told


def kernels_that_changed():
    model = wrap_model(seeded(), "exact")
    told = with_differing(step, model)
    return told, step(model).item(), all(g is not None for g in gradients(model))


@pytest.mark.parametrize("size", [1, 3])
def test_kernels_that_changed_on_one_rank_are_an_error_on_all(size):
    *others, last = run(kernels_that_changed, world_size=size)
    text = "must keep 1 thread(s), not 2: call wrap_model(threads=2)"
    assert text in last[0]["threads"]
    assert BENCHMARK in last[0]["benchmark"]
    for told in others:
        for name in ("threads", "benchmark"):
            assert "rank 2 failed in `backward`: RuntimeError" in told[0][name]
    assert {told[1:] for told in (*others, last)} == {(last[1], True)}


def wrapped_differently():
    return with_differing(lambda: wrap_model(seeded(), "exact"))


def test_ranks_with_other_kernels_are_refused_when_they_wrap():
    for told in run(wrapped_differently, world_size=2):
        assert told["threads"] is None  # they are set
        assert BENCHMARK in told["benchmark"]
        assert "\n  rank 1: the processor='Z80'\nBuild the same model, in" in told["processor"]
        assert "\n  rank 1: a probe of its arithmetic='" in told["arithmetic"]


def probed(**env):
    code = (
        "import json, torch; from pardata.strategies.exact._numerics import numerics_record; "
        "torch.set_num_threads(1); "
        "print(json.dumps(numerics_record(torch.device('cpu'))))"
    )
    return json.loads(processes.run(sys.executable, "-c", code, **env))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="no MKL, which can be told to")
def test_the_probe_detects_kernels_of_other_processors():
    others = probed(MKL_CBWR="COMPATIBLE")
    torch.set_num_threads(1)
    ours = numerics_record(CPU)
    differing = [name for name in ours if ours[name] != others[name]]
    assert differing == ["a probe of its arithmetic"]


PROBED = "conv2d", "batch_norm", "scaled_dot_product_attention", "layer_norm"


@pytest.mark.parametrize("name", PROBED)
def test_the_probe_detects_a_kernel_that_rounds_differently(name):
    before, kernel = numerics_record(CPU), getattr(F, name)
    with patch.object(F, name, lambda *args, **options: kernel(*args, **options) * (1 + 2**-9)):
        now = numerics_record(CPU)
    assert [key for key in now if before[key] != now[key]] == ["a probe of its arithmetic"]


def resumed_with_other_settings():
    name = "torch.backends.cuda.matmul.fp32_precision"
    kept = "pardata.strategies.exact._numerics.kernel_settings"
    model = wrap_model(seeded(), "exact")
    with patch(kept, lambda _: {name: "ieee"}):
        state = through_a_file(strategy_of(model).state_dict(model))
        model.load_state_dict(state)
    changed = patch(kept, lambda _: {name: "tf32"})
    with changed, pytest.raises(ValueError, match=f"{name} was 'ieee' and is 'tf32': resume"):
        model.load_state_dict(state)


@pytest.mark.parametrize("size", [1, 2])
def test_a_resume_with_other_settings_of_kernels_is_an_error(size):
    run(resumed_with_other_settings, world_size=size)


# What a state dict records


def test_a_state_dict_records_the_kernels_in_its_metadata_alone():
    model = wrap_model(seeded(), "exact")
    state = through_a_file(model.state_dict())
    facts = state._metadata[""]["exact"]
    assert facts == numerics_record(CPU)
    assert facts["the processor"] == torch.backends.cpu.get_cpu_capability()
    assert facts["torch"] == torch.__version__
    assert type(numerics_record(CPU)["torch"]) is str
    other = wrap_model(seeded(1), "exact")
    assert other.load_state_dict(state) == ([], [])
    assert fingerprint(other) == fingerprint(model) == fingerprint(unwrap(model))
    plain = Net()
    plain.load_state_dict(state)
    assert fingerprint(plain) == fingerprint(model)


def in_a_parent(model):
    return nn.ModuleDict({"net": model})


def with_threads(threads, wrapping=lambda model: model):
    return wrapping(wrap_model(seeded(), "exact", threads=threads))


CHANGED = "but the number of threads was 1 and is 2: resume where it began, .*, or load into unwrap"


def test_a_resume_with_other_threads_is_an_error_with_the_cure(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(with_threads(1).state_dict(), path)
    state = torch.load(path, weights_only=True)
    model = with_threads(2)
    before = fingerprint(model)
    for resume in (model.load_state_dict, lambda s: load_weights(model, s)):
        for source in (state, path) if resume != model.load_state_dict else (state,):
            with pytest.raises(ValueError, match=CHANGED):
                resume(source)
    assert fingerprint(model) == before
    load_weights(unwrap(model), state)  # the cure that gives up the last bit
    load_weights(with_threads(1), path)  # and the one that does not
    load_weights(with_threads(2), seeded().state_dict())  # weights of no exact run


def test_the_record_is_kept_where_the_model_is_a_child_or_compiled():
    for wrapping in (in_a_parent, lambda model: torch.compile(model, backend="eager")):
        state = through_a_file(with_threads(1, wrapping).state_dict())
        with_threads(1, wrapping).load_state_dict(state)
        model = with_threads(2, wrapping)
        with pytest.raises(ValueError, match=CHANGED):
            model.load_state_dict(state)
        with pytest.raises(ValueError, match=CHANGED):
            load_weights(model, state)


def test_records_of_other_processors_and_of_another_arithmetic_are_told_apart():
    model = wrap_model(seeded(), "exact")
    state = model.state_dict()
    probe = r"but a probe of its arithmetic was '\w+' and is '\w+': resume where it began"
    with DIFFERING["arithmetic"](), pytest.raises(ValueError, match=probe):
        model.load_state_dict(state)
    state._metadata[""]["exact"]["the processor"] = "NVIDIA H200"
    processor = r"but the processor was 'NVIDIA H200' and is '\w+': resume"
    with pytest.raises(ValueError, match=processor):
        model.load_state_dict(state)


# On several ranks


def other_layouts():
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    net.register_buffer("turns", torch.ones(2, dtype=torch.complex64) * (world().rank + 1j))
    net.register_buffer("flags", torch.tensor([world().rank == 0, True]))
    net.register_buffer("wide", torch.arange(6.0).view(2, 3).t() + world().rank)
    pardata.check_in_sync(wrap_model(net, "exact"))
    return fingerprint(net)


def test_weights_in_other_layouts_and_buffers_of_every_kind_start_equal():
    first, second = run(other_layouts, world_size=2)
    assert first == second
