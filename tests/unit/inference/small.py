"""A small model with grouped heads and random weights, a checkpoint of one, and generation in its simplest forms."""

import torch

from megatron.config.model import ModelConfig
from megatron.core.datasets.tokenizer import NullTokenizer
from megatron.core.inference.engine.sampling import Draws, Sampling, choose
from megatron.core.inference.generate import generate
from megatron.core.models.gpt import GPTModel
from megatron.core.parameter import initialize, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.training.checkpoint import save_checkpoint
from megatron.training.setup import build as build_trainer
from tests.unit.config.runs import make_run

GREEDY = Sampling(temperature=0.0)
LLAMA = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "init_method_std": 0.15,  # large enough that the likeliest token changes from step to step
    "max_position_embeddings": 64,
    "vocab_size": 99,
    "make_vocab_size_divisible_by": 16,
}
# Heads of 8 channels, and frequencies so different that a sequence which outgrows the first six tokens shows it.
LONGROPE = {
    **LLAMA,
    "position_embedding_type": "longrope",
    "rope_scaling_original_max_position_embeddings": 6,
    "short_factor": "1.0,1.5,2.0,2.5",
    "long_factor": "0.3,4.0,5.0,9.0",
}
# Latents of 12 channels, from which keys and values of 4 heads are projected up.
LATENT = {
    **{name: value for name, value in LLAMA.items() if "group" not in name},
    "multi_latent_attention": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
    "qk_layernorm": True,
}
# A gated delta net in every layer but the second, with two value heads for each key head.
DELTA = {
    **LLAMA,
    "experimental_attention_variant": "gdn",
    "linear_attention_freq": "2",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "attention_output_gate": True,
    "qk_layernorm": True,
}
# Learned positions, tied embeddings, biases, no grouping.
GPT2 = {
    name: value
    for name, value in LLAMA.items()
    if name in ("num_layers", "hidden_size", "num_attention_heads", "init_method_std", "max_position_embeddings",
                "vocab_size", "make_vocab_size_divisible_by")
}  # fmt: skip
PROMPTS = [[5, 17, 3], [60], [1, 2, 3, 4, 5, 6, 7, 8, 9], [98, 0, 44, 44, 21]]


def small_model(groups, device=None, seed=3, **fields):
    """(model in evaluation mode, how it was built)."""
    device = device or torch.device("cpu")
    config = ModelConfig(**fields)
    build = Build(
        config,
        groups,
        False,
        choose_kernels(config, device, etp=groups.etp.size),
        RngTracker(0, groups, device),
        device,
    )
    model = GPTModel(build).eval()
    initialize(local_parameters(model), seed)
    return model, build


def endless_tokenizer(vocab_size):
    """Its ids are numbers, and none of them ends a sequence."""
    tokenizer = NullTokenizer(vocab_size)
    tokenizer.eod = -1
    return tokenizer


def run(model, build, prompts, new=12, sampling=GREEDY, seeds=None, **options):
    """Every new id of each prompt."""
    seeds, tokenizer = seeds or list(range(len(prompts))), endless_tokenizer(build.config.vocab_size)
    options = {"max_new_tokens": new, "sampling": sampling, "seeds": seeds, **options}
    return [completion.ids for completion in generate(model, build, tokenizer, prompts, **options)]


def one_by_one(model, build, prompts, new=12, sampling=GREEDY, seeds=None):
    """As `run`, each prompt alone."""
    seeds = seeds or list(range(len(prompts)))
    return [run(model, build, [p], new, sampling, [seed])[0] for p, seed in zip(prompts, seeds, strict=True)]


@torch.no_grad()
def without_cache(model, build, prompt, new=12, sampling=GREEDY, seed=0):
    """Continuation by reading the whole sequence again for every token."""
    ids, draws = list(prompt), None if sampling.greedy else Draws([seed])
    for _ in range(new):
        logits = model(torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0))[-1:, 0]
        ids.append(int(choose(logits[:, : build.config.vocab_size], sampling, None if draws is None else draws.next())))
    return ids[len(prompt) :]


def save_small(groups, folder, **fields):
    """A checkpoint of iteration 0, as a training run saves it, of LLAMA with `fields` changed; its folder."""
    fields = {**LLAMA, "attention_dropout": 0.0, "hidden_dropout": 0.0, "device": "cpu", "num_workers": 0, **fields}
    layout = {"tensor_model_parallel_size": groups.tp.size, "pipeline_model_parallel_size": groups.pp.size}
    run = make_run(save=str(folder), save_interval=1, **layout, **fields)
    save_checkpoint(build_trainer(run, groups, torch.device("cpu")))
    return str(folder)
