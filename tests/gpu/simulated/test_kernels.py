"""Operators: the CPU's results, errors at the call, and an error for what is missing."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import nn


class Convolutional(nn.Sequential):
    def __init__(self):
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
        super().__init__(*layers, nn.Linear(144, 3))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = nn.LSTM(8, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, images):
        return self.last(self.body(images[:, 0])[0][:, -1])


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, images):
        return self.last(self.body(images[:, 0]).mean(1))


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    # With an `eps` below the noise of the gradients, noise would become whole steps.
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", [Convolutional, Recurrent, Attentive])
def test_training_gives_what_it_gives_on_the_cpu(net, optimizer):
    torch.manual_seed(0)
    images, targets = torch.randn(6, 1, 8, 8), torch.arange(6) % 3
    found = []
    here = net()
    for place in ("cpu", "sim"):
        model = copy.deepcopy(here).to(place)
        steps = OPTIMIZERS[optimizer](model.parameters())
        for _ in range(5):
            steps.zero_grad()
            F.cross_entropy(model(images.to(place)), targets.to(place)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
        found.append([value.cpu() for value in model.state_dict().values()])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


VIEWS = {
    "slice": lambda x: x[1:],
    "transposed": lambda x: x.t(),
    "unfolded": lambda x: x.unfold(0, 2, 1),
    "viewed": lambda x: x.view(-1)[2:].view(2, 2),
    "diagonal": lambda x: x.diagonal(),
    "expanded": lambda x: x[None].expand(2, 3, 2),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_one(view):
    values = torch.zeros(3, 2, device="sim")
    seen = VIEWS[view](values)
    values.copy_(torch.arange(6.0).view(3, 2))
    assert torch.equal(seen.cpu(), VIEWS[view](torch.arange(6.0).view(3, 2)))


def test_sparse_and_jagged_tensors_hold_theirs():
    places, values = torch.arange(4, device="sim")[None], torch.arange(4.0, device="sim")
    sparse = torch.sparse_coo_tensor(places, values, (4,), is_coalesced=True)
    assert (sparse.is_coalesced(), sparse.values().tolist()) == (True, [0, 1, 2, 3])
    jagged = torch.nested.nested_tensor_from_jagged(values[:, None], places[0][::3])
    assert jagged.values().tolist() == [[0], [1], [2], [3]]


def test_a_result_takes_the_size_that_it_needs():
    result = torch.empty(0, device="sim")
    torch.add(torch.ones(4, device="sim"), 1, out=result)
    assert result.tolist() == [2] * 4
    values = torch.arange(6, device="sim")
    assert values[values > 3].tolist() == [4, 5]
    values[values > 3] = 0
    assert values.nonzero().flatten().tolist() == [1, 2, 3]


def test_what_is_wrong_is_an_error_at_the_call():
    ones = torch.ones(3, device="sim")
    other = torch.ones(2, device="sim")
    for call in (lambda: ones + other, lambda: ones.add_(other)):
        with pytest.raises(RuntimeError, match="must match the size"):
            call()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        ones + torch.ones(3)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        ones + torch.ones(3, device="sim:1")


def test_what_is_wrong_with_values_is_an_error_at_the_next_wait():
    wrong = torch.arange(4, device="sim")[torch.full((1,), 9, device="sim")]
    with pytest.raises((RuntimeError, IndexError), match="out of"):
        torch.sim.synchronize()
    del wrong
    assert torch.ones(1, device="sim").item() == 1


def test_what_it_has_not_is_an_error():
    with pytest.raises(NotImplementedError, match="has no kernel of aten::_thnn_fused_gru_cell"):
        nn.GRU(2, 3).to("sim")(torch.ones(1, 1, 2, device="sim"))


def test_each_device_has_random_numbers_of_its_own():
    def drawn(device, *, seed):
        if seed:
            torch.manual_seed(3)
        values = torch.rand(5, device=device), torch.randperm(5, device=device)
        return [*values, F.dropout(torch.ones(9, device=device), 0.5)]

    def as_lists(values):
        return [value.tolist() for value in values]

    first = as_lists(drawn("sim:0", seed=True))
    assert as_lists(drawn("sim:0", seed=False)) != first
    assert as_lists(drawn("sim:0", seed=True)) == first
    assert as_lists(drawn("sim:1", seed=False)) == first
    state = torch.sim.get_rng_state(0)
    alone = as_lists(drawn("sim:0", seed=False))
    torch.rand(3)
    torch.sim.set_rng_state(state, 0)
    assert as_lists(drawn("sim:0", seed=False)) == alone
    assert torch.sim.get_rng_state(1).equal(state)


def test_autocast_takes_the_types_of_cuda():
    rows = torch.ones(2, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        product = rows @ rows.t()
        assert product.dtype == torch.bfloat16
        assert F.linear(rows, rows).dtype == torch.bfloat16
        assert product.softmax(1).dtype == product.sum().dtype == torch.float32


def test_a_model_on_two_devices_and_its_copies():
    torch.manual_seed(0)
    net, rows = nn.Linear(4, 3), torch.randn(6, 4)
    net(rows).square().sum().backward()
    expected = net.weight.grad.clone()
    net.zero_grad()
    parallel = nn.DataParallel(net.to("sim"), [0, 1])
    output = parallel(rows.to("sim"))
    assert (output.device, len(output)) == (torch.device("sim:0"), 6)
    output.square().sum().backward()
    torch.testing.assert_close(net.weight.grad.cpu(), expected)
