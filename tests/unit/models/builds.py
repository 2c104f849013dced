"""Small decoders built directly from fields, their buffers and optimizers, and made-up batches."""

import dataclasses

import torch

from megatron.config.data_parallel import DataParallelSettings
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import ON_DEVICE, Optimizer
from megatron.core.parameter import GradSlot, initialize, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels

CPU = torch.device("cpu")
VOCAB = 99
SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 16,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.1,
}
# Grouped heads, rotary positions, gated MLP, no biases, untied.
LLAMA = {
    **SHAPE,
    "group_query_attention": True,
    "num_query_groups": 4,
    "ffn_hidden_size": 48,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
# Heads of 4 channels, in samples that are longer than the original length.
LONGROPE = {
    "position_embedding_type": "longrope",
    "rope_scaling_original_max_position_embeddings": 6,
    "short_factor": "1.0,1.5",
    "long_factor": "2.0,9.0",
}
# LayerNorm, learned positions, biases everywhere, normalised queries and keys, tied.
GPT = {**SHAPE, "ffn_hidden_size": 64, "qk_layernorm": True}
# Powers of two: with them rounding is the same.
GEMMA2 = {
    **LLAMA,
    "swiglu": False,
    "geglu": True,
    "openai_gelu": True,
    "apply_layernorm_1p": True,
    "post_norm": True,
    "window_size": "3,0",
    "window_attn_skip_freq": "2",
    "embedding_multiplier_scale": 32**0.5,
    "softmax_scale": 0.3,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 0.5,
    "untie_embeddings_and_output_weights": False,
}
# Latent attention: heads of 6 channels of queries and keys, of which 2 are rotated, and of 5 of values.
_LATENT = {
    **{name: value for name, value in LLAMA.items() if "group" not in name},
    "multi_latent_attention": True,
    "kv_lora_rank": 12,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 5,
}
LATENT = {**_LATENT, "q_lora_rank": 20, "qk_layernorm": True, "latent_norm_epsilon": 1e-6}
LATENT_LITE = {**_LATENT, "qk_layernorm": True}
LATENT_PLAIN = {**_LATENT, "q_lora_rank": 20}
# A gated delta net in every layer but the second, with two value heads for each key head, as in Qwen3.5.
DELTA = {
    **LLAMA,
    "experimental_attention_variant": "gdn",
    "linear_attention_freq": "2",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "attention_output_gate": True,
    "qk_layernorm": True,
    "apply_layernorm_1p": True,
}
FACTORS = {"embedding_multiplier_scale": 4.0, "residual_multiplier": 0.5, "logits_scaling": 8.0}


def make_build(fields, groups, *, sequence_parallel=False, device=CPU, seed=11, block_attention=None, **options):
    """Constructor arguments of the decoder and its layers; `sequence_parallel` counts only with tp > 1."""
    config = ModelConfig(**fields)
    kernels = choose_kernels(config, device, etp=groups.etp.size)
    if block_attention is not None:
        kernels = dataclasses.replace(kernels, block_attention=block_attention)
    sequence_parallel = sequence_parallel and groups.tp.size > 1
    return Build(config, groups, sequence_parallel, kernels, RngTracker(seed, groups, device), device, **options)


def make_model(fields, groups, *, spread=0.0, **options):
    """A decoder whose weights depend on `fields` alone. `spread` moves constant ones (norms, biases), each on its
    own."""
    model = GPTModel(make_build(fields, groups, **options))
    initialize(local_parameters(model), seed=3)
    if spread:
        spread_constants(local_parameters(model), spread)
    return model


@torch.no_grad()
def spread_constants(parameters, scale):
    """Add to each constant parameter its own piece of normal numbers drawn for the global tensor."""
    for number, parameter in enumerate(parameters.values()):
        info = parameter.info
        if info.spec.init.kind == "constant":
            noise = torch.randn(info.spec.shape, generator=torch.Generator().manual_seed(number)) * scale
            for section in info.sections:
                section.of(parameter.detach()).add_(noise[place(section.offset, section.shape)].to(parameter.device))


def place(offset, shape):
    """Index of a local piece in its global tensor."""
    return tuple(slice(start, start + n) for start, n in zip(offset, shape))


def sections(parameters):
    """[(name, offset in the global tensor, elements)] of this rank, in plain arrays."""
    return [
        (name, section.offset, section.of(parameter.detach()).numpy())
        for name, parameter in parameters.items()
        for section in parameter.info.sections
    ]


def make_data_parallel(model, groups, bucket_size=3000, late_updates=False, **settings):
    """Several buckets; whole gradients, summed after backward, unless `settings` say otherwise."""
    device = next(model.parameters()).device
    settings = DataParallelSettings(bucket_size=bucket_size, **settings)
    return DataParallel(model, groups, settings, device, late_updates=late_updates)


def make_optimizer(data_parallel, groups, *, fp16=False, offload=ON_DEVICE, make_adamw=None, **fields):
    config = OptimizerConfig(**fields)
    return Optimizer(config, data_parallel, groups, fp16=fp16, offload=offload, make_adamw=make_adamw)


def accumulate(model, data_parallel, batches):
    """A step's gradient, reduced: of the sum of all losses of each batch of ids."""
    data_parallel.begin_step(len(batches))
    for number, ids in enumerate(batches, start=1):
        differentiate(data_parallel, losses(model, ids).sum(), last=number == len(batches))
    data_parallel.finish_reduction()


def backward(data_parallel, loss):
    """The gradient of a step of one microbatch, reduced."""
    data_parallel.begin_step(1)
    differentiate(data_parallel, loss, last=True)
    data_parallel.finish_reduction()


def differentiate(data_parallel, loss, *, last):
    """Backward of one microbatch."""
    data_parallel.begin_backward(last=last)
    loss.backward()
    data_parallel.end_backward(last=last)


def slot_of(memory):
    """A slot that has its memory from the start."""

    def ask():
        raise AssertionError("a slot that has memory asks for some")

    slot = GradSlot(ask)
    slot.main_grad = memory
    return slot


def make_ids(b, s, seed=0, vocab=VOCAB):
    """Token ids [b, s + 1]."""
    return torch.randint(0, vocab, (b, s + 1), generator=torch.Generator().manual_seed(seed))


def losses(model, ids):
    """Loss per token [b, s] of ids [b, s + 1]."""
    positions = torch.arange(ids.shape[1] - 1, device=ids.device).unsqueeze(0)
    return model(ids[:, :-1], positions, labels=ids[:, 1:])


def gradients(data_parallel):
    """Name -> a copy of the gradient, where gradients are kept and nothing is sharded."""
    return {n: p.slot.main_grad.clone() for bucket in data_parallel.buckets for n, p in bucket.parameters.items()}


def pieces(data_parallel):
    """[(name, offset, global shape, gradient)] of this rank, to be assembled elsewhere; plain arrays travel well."""
    shape = {n: p.info.spec.shape for bucket in data_parallel.buckets for n, p in bucket.parameters.items()}
    return [(n, offset, shape[n], piece.cpu().numpy().copy()) for n, offset, piece in data_parallel.gradients()]


def assemble(ranks, rtol=1e-5, atol=1e-7):
    """Name -> global tensor from the pieces of every rank; where ranks hold the same elements they must agree."""
    whole = {}
    for rank in ranks:
        for name, offset, shape, piece in rank:
            piece, here = torch.from_numpy(piece), place(offset, piece.shape)
            tensor = whole.setdefault(name, torch.full(shape, float("nan")))
            if not tensor[here].isnan().all():
                torch.testing.assert_close(tensor[here], piece, rtol=rtol, atol=atol, msg=f"ranks disagree on {name}")
            tensor[here] = piece
    return whole


def assert_gradients(found, expected, limit=1e-5):
    """Every element within `limit` of the largest of its tensor, or of a hundredth of the largest of all: some true
    gradients are zero (a bias of all keys, without rotary positions: softmax does not see it) and hold only
    rounding."""
    assert found.keys() == expected.keys()
    floor = 1e-2 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        difference = (found[name] - gradient).abs().max() / gradient.abs().max().clamp(min=floor)
        assert difference <= limit, f"{name}: {difference:.2e}"


def take_step(step, batches, lr, weight_decay, decoupled_lr=None):
    """(objective of the batches, the update)."""
    return step.forward_backward(batches).read(), step.update(lr, weight_decay, decoupled_lr)
