"""``torch.sim``: what ``torch.cuda`` is for CUDA, as far as the tests and torch itself use it."""

import contextlib
from types import SimpleNamespace

import simulated_c as _C  # noqa: N812  # as torch's own
import torch
from simulated_c import current_device, device_count, launches, waits  # noqa: F401

_MODES = {"default": 0, "warn": 1, "error": 2}


def _index(device=None):
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


# --- devices


def is_available():
    return device_count() > 0


def is_initialized():
    return _C.is_initialized()


def _is_in_bad_fork():
    return _C.is_in_bad_fork()


def init():
    pass


_lazy_init = init


def set_device(device):
    _C.set_device(_index(device))


@contextlib.contextmanager
def device(device):
    """Make `device` the current one meanwhile."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device=None):
    torch.accelerator.synchronize(_index(device))


def get_device_name(device=None):
    return "simulated accelerator"


def get_device_properties(device=None):
    name, index = get_device_name(), _index(device)
    return SimpleNamespace(name=name, uuid=f"sim-{index}", total_memory=2**35)


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(**_):
    return True


def is_current_stream_capturing():
    return False


# --- streams and events


class Stream(torch.Stream):
    """A stream whose methods a test can take out."""

    def __new__(cls, device=None, priority=0, **known):
        if not known:
            known = {"device": torch.device("sim", _index(device)), "priority": priority}
        return super().__new__(cls, **known)

    def __init__(self, *args, **known):
        pass

    def wait_event(self, event):
        super().wait_event(event)

    def wait_stream(self, stream):
        super().wait_stream(stream)

    def record_event(self, event=None):
        return super().record_event(event or Event())

    def synchronize(self):
        super().synchronize()


def Event(**options):  # noqa: N802  # as torch's
    return torch.Event("sim", **options)


def _own(stream):
    known = {"stream_id": stream.stream_id, "device_index": stream.device_index}
    return Stream(**known, device_type=stream.device_type)


def current_stream(device=None):
    return _own(torch.accelerator.current_stream(_index(device)))


def default_stream(device=None):
    kind = current_stream(device).device_type
    return Stream(stream_id=0, device_index=_index(device), device_type=kind)


def set_stream(stream):
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream):
    """Make `stream`, and its device, the current ones meanwhile."""
    if stream is None:
        yield
        return
    with device(stream.device):
        before = current_stream()
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)


# --- random numbers

default_generators = tuple(_C.default_generator(index) for index in range(device_count()))


def get_rng_state(device="sim"):
    return default_generators[_index(device)].get_state()


def set_rng_state(state, device="sim"):
    default_generators[_index(device)].set_state(state)


def manual_seed(seed):
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed):
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed():
    return default_generators[current_device()].initial_seed()


# --- memory


def memory_allocated(device=None):
    return torch.accelerator.memory_allocated(_index(device))


def memory_reserved(device=None):
    return torch.accelerator.memory_reserved(_index(device))


def empty_cache():
    pass


# --- what only a simulation has, and what `torch.cuda` has for tests


def set_sync_debug_mode(mode):
    """Let host waits pass ("default"), warn or raise ("error"): all of them, also for events."""
    _C.refuse_waits(_MODES.get(mode, mode))


def _sleep(cycles):
    """Keep the current stream busy, so many cycles of 2 GHz."""
    _C.sleep(cycles / 2000)
