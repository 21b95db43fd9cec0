"""The loader in other people's loops: each script as its library teaches it, and with pardata.

What is changed is in a `.diff` of the same name, which `docs/howto-other-loops.md` shows.
"""

import importlib.util
import json
import re
import shutil
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from forked import forking
from launched import agent, torchrun_variables
from places import DOCS
from test_clients import patched

HERE = Path(__file__).parent
# The module that has been imported when a script starts, and the fewest ranks without a launcher.
PEERS = {
    "transformers": "transformers.trainer",
    "lightning": "lightning.pytorch",
    "accelerate": "accelerate",
    "fabric": "lightning.pytorch",
    "ignite": "ignite",
    "torchtitan": "torch.distributed",  # itself it needs a GPU: see titan.py
}
# What they import as they begin: it takes seconds, and is imported once, too.
LATER = "torch._dynamo", "torch.distributed.checkpoint"
MOST_LINES = 10
STEPS, EPOCH, EVERY = 10, 5, 2  # of a run, of an epoch, from one checkpoint to the next
LOST = 8  # the step in which a run is killed: it was saved before step 7


@dataclass
class Run:
    """A script that runs on some ranks, in a folder of its own."""

    folder: Path
    ranks: list

    def statuses(self):
        return [rank.wait() for rank in self.ranks]

    def said(self, rank=0):
        return (self.folder / f"said-{rank}.txt").read_text()

    @cached_property
    def seen(self):
        """What each rank has seen, once all have come to a good end."""
        statuses = self.statuses()
        assert set(statuses) == {0}, [self.said(rank) for rank in range(len(statuses))]
        files = [self.folder / f"seen-{rank}.json" for rank in range(len(statuses))]
        return [json.loads(file.read_text()) for file in files]

    @property
    def batches(self):
        """The global batches that the model was trained on."""
        steps = zip(*(rank["training"] for rank in self.seen), strict=True)
        return [[sample for part in step for sample in part] for step in steps]

    @property
    def evaluated(self):
        return sorted(x for rank in self.seen for part in rank["evaluation"] for x in part)

    @property
    def fingerprints(self):
        return {text for rank in self.seen for text in rank["fingerprints"]}

    @property
    def counted(self):
        """Over how many samples each epoch's evaluation says that it is."""
        self.seen  # noqa: B018  # it has ended
        return re.findall(r"^epoch \d: \d+ of (\d+) right$", self.said(), re.MULTILINE)


class Peer:
    """Starts runs of a peer's script, several at a time."""

    def __init__(self, name, programs, folder, stores):
        self.name, self.programs, self.folder, self._stores = name, programs, folder, stores
        plain = (HERE / f"in_{name}.py").read_text().splitlines()
        changes = (HERE / f"in_{name}.diff").read_text().splitlines()
        self._texts = {"plain": plain, "ported": patched(plain, changes)}

    def run(self, name, size, signals=None, *, of=None, text="ported", change=("", "")):
        """Start a run, anew or with the checkpoints of another.

        A rank gets the signal that stands for it in `signals`, in that step of training.
        """
        folder = self.folder / name
        if of is None:
            folder.mkdir()
        else:
            left = shutil.ignore_patterns("said-*", "seen-*")
            shutil.copytree(of.folder, folder, ignore=left)
        script = "\n".join(self._texts[text])
        assert change[0] in script
        (folder / f"in_{self.name}.py").write_text(script.replace(*change))
        port = self._stores.enter_context(agent())
        ranks = []
        for rank in range(size):
            alone = size == 1 and self.name not in ("torchtitan", "ddp")
            env = {} if alone else torchrun_variables(rank, size, port)
            told = {"output": folder / f"said-{rank}.txt", "folder": folder}
            step, number = (signals or {}).get(rank, (0, 0))
            args = f"in_{self.name}.py", rank, step, int(number)
            ranks.append(self.programs.start(HERE / "watched.py", *args, **told, **env))
        return Run(folder, ranks)

    def killed(self, name, step, **options):
        """Start a run on two ranks that are killed in that step."""
        return self.run(name, 2, dict.fromkeys(range(2), (step, signal.SIGKILL)), **options)


def is_installed(module):
    return importlib.util.find_spec(module.split(".")[0]) is not None


@pytest.fixture(scope="module")
def programs():
    """What starts the scripts, with all libraries that are there."""
    with forking(*dict.fromkeys(filter(is_installed, PEERS.values())), *LATER) as started:
        yield started


@pytest.fixture(scope="module", params=PEERS)
def peer(request, programs, tmp_path_factory):
    if not is_installed(PEERS[request.param]):
        pytest.skip(f"{PEERS[request.param]} is not installed")
    with ExitStack() as stores:
        yield Peer(request.param, programs, tmp_path_factory.mktemp(request.param), stores)


@pytest.fixture(scope="module")
def runs(peer):
    """Whole runs on 1, 2 and 3 ranks, and some that were killed and resumed."""
    killed = peer.killed("killed", LOST)
    each_epoch = "EVERY = 2", f"EVERY = {EPOCH}"
    early = peer.killed("early", EPOCH + 1, change=each_epoch)
    runs = {size: peer.run(f"whole-{size}", size) for size in (1, 2, 3)}
    for one in (killed, early):
        assert one.statuses() == [-signal.SIGKILL] * 2, one.said()
    runs |= {f"then {size}": peer.run(f"then-{size}", size, of=killed) for size in (1, 3)}
    runs["next epoch"] = peer.run("next", 1, of=early, change=each_epoch)
    return {**runs, "killed": killed}


def test_the_change_is_at_most_ten_lines_and_on_the_page(peer):
    changes = (HERE / f"in_{peer.name}.diff").read_text().splitlines()
    for sign in "+-":
        assert len([line for line in changes if line[:1] == sign and line[1:]]) <= MOST_LINES
    assert is_on_the_page(peer.name)


def is_on_the_page(name):
    page = (DOCS / "howto-other-loops.md").read_text(encoding="utf-8")
    return f"```{{literalinclude}} ../tests/programs/clients/in_{name}.diff\n" in page


@pytest.mark.parametrize("size", [2, 3])
def test_every_number_of_processes_gets_the_same_global_batches(runs, size):
    assert len(runs[1].batches) == STEPS
    for epoch in (runs[1].batches[:EPOCH], runs[1].batches[EPOCH:]):
        assert sorted(sample for batch in epoch for sample in batch) == list(range(40))
    assert runs[size].batches == runs[1].batches
    assert len(runs[1].fingerprints) == 1
    assert runs[size].fingerprints == runs[1].fingerprints


@pytest.mark.parametrize("size", [1, 3])
def test_a_killed_run_resumes_at_the_next_sample_at_any_size(runs, size):
    saved = (LOST - 1) // EVERY * EVERY
    assert EPOCH < saved < LOST - 1, "in the middle of an epoch, and something is lost"
    resumed = runs[f"then {size}"]
    assert resumed.batches == runs[1].batches[saved:]
    assert resumed.fingerprints == runs[1].fingerprints


def test_a_run_saved_at_an_epochs_end_begins_the_next(runs):
    assert runs["next epoch"].batches == runs[1].batches[EPOCH:]
    assert runs["next epoch"].fingerprints == runs[1].fingerprints


def test_an_evaluation_counts_each_sample_once(runs, peer):
    for size in (1, 2, 3):
        assert runs[size].counted == ["15", "15"]
        if peer.name != "transformers":  # evaluates by itself: it repeats some, and drops those
            assert runs[size].evaluated == sorted([*range(15)] * 2)


def only(*names):
    return pytest.mark.parametrize("peer", names, indirect=True, scope="module")


@only(*(name for name in PEERS if name != "torchtitan"))  # whose plain one is of its own parts
def test_the_plain_script_runs_too(peer):
    assert peer.run("plain", 2, text="plain").counted == ["15", "15"]


# ------------------------------------------------------------ what would change it once more

AS_IT_IS = """
from {module} import {name}
from pardata import make_loader
loader = make_loader(range(8), 4)
peer = {name}({options})
{leaves}
for cut in {cuts}:
    try:
        cut(loader)
    except {error} as error:
        assert "{text}" in str(error), error
    else:
        raise AssertionError("it was cut again, and nobody was told")
"""
MISUSES = {
    "accelerate": {
        "module": "accelerate",
        "name": "Accelerator",
        "options": "cpu=True",
        "leaves": "assert peer.prepare(loader) is loader",
        "cuts": "(lambda it: peer.skip_first_batches(it, 1), peer.prepare_data_loader)",
        "error": "AttributeError",
        "text": "a loader has no `sampler`, because it resumes by itself: leave out",
    },
    "fabric": {
        "module": "lightning.fabric",
        "name": "Fabric",
        "options": "devices=1, accelerator='cpu'",
        "leaves": "",
        "cuts": "(peer.setup_dataloaders,)",
        "error": "TypeError",
        "text": "Only PyTorch DataLoader are currently supported",
    },
}


@only(*MISUSES)
def test_a_peer_leaves_the_loader_as_it_is_or_raises_an_error(peer):
    said = peer.folder / "misuse.txt"
    code = "import warnings\nwarnings.simplefilter('ignore')\n" + AS_IT_IS
    job = peer.programs.start(code.format(**MISUSES[peer.name]), output=said)
    assert job.wait() == 0, said.read_text()


@only("transformers")
def test_transformers_says_what_to_do_where_it_would_skip_batches(peer, runs):
    change = "ignore_data_skip=True", "ignore_data_skip=False"
    run = peer.run("skips", 1, of=runs["killed"], change=change)
    assert run.statuses() == [1]
    assert "pass ignore_data_skip=True to transformers' Trainer" in run.said()


@only("lightning")
def test_lightning_without_the_loaders_state_begins_the_next_epoch(peer, runs):
    change = "every_n_train_steps=EVERY", "every_n_epochs=1"
    whole_epochs = peer.killed("epochs", EPOCH + 2, change=change)
    assert whole_epochs.statuses() == [-signal.SIGKILL] * 2, whole_epochs.said()
    resumed = peer.run("after-epochs", 1, of=whole_epochs, change=change)
    assert resumed.batches == runs[1].batches[EPOCH:]


# Lightning reads one batch ahead of a stream, unless it knows how many there are.
OF_A_STREAM = """
import lightning, torch, warnings
from lightning.pytorch.callbacks import ModelCheckpoint
from pardata import make_loader

warnings.simplefilter("ignore")

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(40.0)[:, None])

class First(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def train_dataloader(self):
        return make_loader(Stream(), 8, num_workers=0)

    def training_step(self, x):
        self.seen.append(int(x[0]))
        return self.layer(x).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

options = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "max_epochs": 1}
for steps, seen in ((2, [0, 8]), (-1, [16, 24, 32])):
    model, saver = First(), ModelCheckpoint("stream", every_n_train_steps=2, save_last=True)
    lightning.Trainer(
        **options, max_steps=steps, limit_train_batches=5, callbacks=[saver]
    ).fit(model, ckpt_path="last")
    assert model.seen == seen, model.seen
"""


@only("lightning")
def test_lightning_resumes_a_stream_of_which_it_is_told_the_length(peer):
    said = peer.folder / "stream.txt"
    job = peer.programs.start(OF_A_STREAM, output=said, folder=peer.folder)
    assert job.wait() == 0, said.read_text()


# ------------------------------------------------- a script that takes other parts of pardata


def test_parts_of_pardata_serve_a_script_that_wraps_and_loads_by_itself(programs, tmp_path):
    assert is_on_the_page("ddp")
    with ExitStack() as stores:
        peer = Peer("ddp", programs, tmp_path, stores)
        whole = {size: peer.run(f"whole-{size}", size) for size in (1, 2)}
        asked = peer.run("asked", 2, {1: (EPOCH + 2, signal.SIGTERM)})
        said = {name: epochs_of(run) for name, run in {**whole, "asked": asked}.items()}
        resumed = epochs_of(peer.run("resumed", 1, of=asked))
    assert [epoch for epoch, _ in said[1]] == ["0", "1", "2", "3"]
    assert said[2] == said[1], "the mean over all ranks, logged by one of them"
    assert len(asked.batches) == EPOCH + 3, "both stop in the step after that of the signal"
    assert said["asked"] + resumed == said[1]


def epochs_of(run):
    """Return the epochs and losses that rank 0 says, and make sure that no other says any."""
    found = [re.findall(r"epoch (\d): loss (\d\.\d{4})$", run.said(rank), re.MULTILINE)
             for rank in range(len(run.seen))]  # fmt: skip
    assert found[1:] == [[]] * (len(found) - 1)
    return found[0]
