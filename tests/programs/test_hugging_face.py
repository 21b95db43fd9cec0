"""Models of Hugging Face, sharded by ``blocks="auto"``, train as they do unsharded."""

import pytest
import torch
from on_ranks import run
from sharding import whole

from pardata import backward, make_loader, unwrap, wrap_model
from pardata.model._unwrap import ShardedModule

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, ROWS = 97, 12, 6
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = {**SMALL, "intermediate_size": 64, "vocab_size": WORDS, "tie_word_embeddings": True}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2():
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": WORDS}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, **ENDS))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **ENDS))


def recomputed():
    model = llama()
    model.gradient_checkpointing_enable()
    return model


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, **NO_DROPOUT))


def vit():
    image = {"image_size": 16, "patch_size": 8, "num_labels": 5, "intermediate_size": 64}
    config = transformers.ViTConfig(**SMALL, **image, **NO_DROPOUT)
    return transformers.ViTForImageClassification(config)


# What each is called, what its blocks are, and whether a head has the weights of the embedding.
MODELS = {
    gpt2: ("GPT2Block", True),
    llama: ("LlamaDecoderLayer", True),
    recomputed: ("LlamaDecoderLayer", True),
    bert: ("BertLayer", True),
    vit: ("ViTLayer", False),
}


def data(make):
    numbers = torch.Generator().manual_seed(1)
    if make is vit:
        pixels = torch.randn(ROWS, 3, 16, 16, generator=numbers)
        return [{"pixel_values": x, "labels": n % 5} for n, x in enumerate(pixels.double())]
    tokens = torch.randint(3, WORDS, (ROWS, LENGTH), generator=numbers)
    return [{"input_ids": row, "labels": row} for row in tokens]


def trained(make, strategy, options):
    """Return what is sharded, whether weights are tied, a step's loss and the weights after it."""
    torch.manual_seed(0)
    model = wrap_model(make().double().train(), strategy, **options)
    loader = make_loader(data(make), ROWS, microbatch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        loss = backward(model, lambda net, rows: net(**rows).loss, batch)
        optimizer.step()
    net = unwrap(model)
    kinds = [type(m).__name__ for m in net.modules() if isinstance(m, ShardedModule)]
    weights = {name: whole(value) for name, value in net.state_dict().items()}
    is_tied = len(list(net.parameters())) < len([*net.named_parameters(remove_duplicate=False)])
    return kinds, is_tied, loss, weights


def all_trained(strategy, options):
    return {make: trained(make, strategy, options) for make in MODELS}


def test_models_of_hugging_face_train_in_blocks_as_they_do_unsharded():
    (expected,) = run(all_trained, "none", {}, world_size=1)
    for size in (1, 2):
        for told in run(all_trained, "fsdp", {"blocks": "auto"}, world_size=size):
            for make, (block, is_tied) in MODELS.items():
                kinds, *others, loss, weights = told[make]
                assert (kinds[1:], others) == ([f"FSDP{block}"] * 3, [is_tied])
                torch.testing.assert_close(loss, expected[make][2], rtol=1e-6, atol=0)
                torch.testing.assert_close(weights, expected[make][3], rtol=0, atol=1e-12)
