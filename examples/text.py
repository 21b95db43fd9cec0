"""Train a small GPT on a text: FSDP or DDP, a loss weighted by tokens, bfloat16 on a GPU.

    python examples/text.py
    torchrun --standalone --nproc-per-node=2 examples/text.py                    # DDP
    torchrun --standalone --nproc-per-node=2 examples/text.py --strategy fsdp    # sharded weights
    python examples/text.py --text shakespeare.txt --steps 500

It learns to continue the paragraphs of a file, byte by byte: without --text, of a module of Python.
Its 100 steps take about a minute on two CPU cores. Microbatches differ in tokens: `count` weighs
them, so the loss is the mean over the tokens of all processes. Started again with the same
--run-dir, it resumes in the middle of the epoch.
"""

import logging
import math
import textwrap
from argparse import ArgumentParser, RawTextHelpFormatter
from operator import itemgetter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import pardata

log = pardata.get_logger("text")  # INFO lines come from rank 0 alone
PAD, LONGEST, WIDTH = 0, 128, 128  # no text has byte 0


class GPT(nn.Module):
    """Predicts each next byte from those before it."""

    def __init__(self, layers=2):
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH, padding_idx=PAD)
        self.places = nn.Embedding(LONGEST, WIDTH)
        options = {"dropout": 0.1, "activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **options) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        """Return a score for each possible next byte: samples x length x 256."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        states = self.bytes(tokens) + self.places.weight[:length]
        for block in self.blocks:
            states = block(states, src_mask=mask, is_causal=True)
        return self.head(states)


def paragraphs(path):
    """Return the paragraphs of a file as tensors of bytes."""
    parts = Path(path).read_bytes().split(b"\n\n")
    return [torch.tensor(list(part[:LONGEST])) for part in parts if len(part) > 1]


def collate(samples):
    """Return padded bytes, and how many are predicted: counted on a GPU, each step would wait."""
    tokens = pad_sequence(samples, batch_first=True, padding_value=PAD)
    return tokens, int((tokens[:, 1:] != PAD).sum())


def mean_loss(model, batch):
    tokens = batch[0]
    kind = tokens.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=kind != "cpu"):  # slow on most CPUs
        scores = model(tokens[:, :-1]).float().flatten(0, 1)
    return F.cross_entropy(scores, tokens[:, 1:].flatten(), ignore_index=PAD)


def build(strategy):
    """Return the model, wrapped; under FSDP each block is sharded by itself."""
    net = GPT()
    if strategy == "fsdp":
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # takes half a second

        for block in net.blocks:
            fully_shard(block)
    return pardata.wrap_model(net, strategy)


def train(args):
    pardata.seed_everything(0)
    texts = paragraphs(args.text)
    loader = pardata.make_loader(texts, 32, microbatch_size=4, shuffle=True, collate_fn=collate)
    model = build(args.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpointer = pardata.Checkpointer(f"{args.run_dir}/checkpoints", keep=2)
    step = checkpointer.restore(**run).step
    with pardata.StopSignal() as stop:
        while step < args.steps:
            for batch in loader:
                optimizer.zero_grad()
                loss = pardata.backward(model, mean_loss, batch, count=itemgetter(1))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                step += 1
                if step % 10 == 0:
                    log.info("step %d: %.4f bits a byte", step, loss / math.log(2))
                done = step == args.steps or stop.agreed()
                if done or step % 50 == 0:
                    checkpointer.save(step, **run)
                if done:
                    return


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--text", default=textwrap.__file__, help="the file to learn from")
    parser.add_argument("--strategy", default="auto", help="as of wrap_model: ddp, fsdp, exact, …")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps in all")
    parser.add_argument("--run-dir", default="runs/text", help="for checkpoints")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with pardata.init():  # joins torchrun, srun or mpirun; one process has nothing to join
        train(args)
