"""Rules about gated delta nets, and about attention with an output gate."""

from __future__ import annotations

from functools import partial

from megatron.base.errors import ConfigError
from megatron.config.delta_net import KDA
from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.rules.rule import ConfigRule
from megatron.config.rules.sources import shape_is_pending
from megatron.config.run import RunConfig


def delta_layers_are_chosen(model: ModelConfig) -> str | None:
    """A pattern names the layers with a delta net, and leaves some with attention; Megatron-LM has no default
    either."""
    if not model.has_delta_net:
        return None
    variant = f"--experimental-attention-variant {model.experimental_attention_variant}"
    if model.linear_attention_freq is None:
        return f"{variant} needs the layers that have a delta net; give --linear-attention-freq, such as 4"
    try:
        chosen = model.delta_layers
    except ConfigError as error:
        return str(error)
    if any(chosen) and not all(chosen):
        return None
    lacking = "no layer attention" if all(chosen) else "no layer a delta net"
    return f"{variant} with --linear-attention-freq {model.linear_attention_freq} gives {lacking}; give both kinds"


def key_heads_serve_value_heads(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Each key head serves as many value heads as the others, and each rank has whole key heads."""
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    tp = parallel.tensor_model_parallel_size
    if not model.has_delta_net:
        return None
    if values % keys:
        return (
            f"--linear-num-value-heads {values} is not a multiple of --linear-num-key-heads {keys}; change one of them"
        )
    if keys % tp:
        return (
            f"--linear-num-key-heads {keys} is not a multiple of --tensor-model-parallel-size {tp}; change one of them"
        )
    kinds = set() if parallel.context_parallel_size == 1 else set(parallel.cp_comm_type)
    if "a2a" in kinds and keys // tp % parallel.context_parallel_size:
        return (
            f"--cp-comm-type a2a shares the {keys // tp} key heads of a delta net on a tensor-parallel rank between the "
            f"{parallel.context_parallel_size} of --context-parallel-size, which do not divide them; give p2p"
        )
    return None


def gates_go_with_grouped_heads(model: ModelConfig) -> str | None:
    """No model has latent attention with an output gate."""
    if model.multi_latent_attention and model.attention_output_gate:
        return "--attention-output-gate is not available with --multi-latent-attention; remove one of them"
    return None


def decays_of_channels_go_with(model: ModelConfig, fp8: Fp8Config) -> str | None:
    """The further projections of Kimi delta attention have neither adapters nor FP8 products yet."""
    flags = {"--lora-rank": model.lora_rank is not None, "--fp8-format": fp8.fp8_format is not None}
    for flag, on in flags.items():
        if model.decays_by_channel and on:
            return (
                f"--experimental-attention-variant {KDA} is not available with {flag} yet; give "
                "--experimental-attention-variant gdn"
            )
    return None


def states_are_passed_in_one_group(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Groups of other sizes have not been tried with the states of delta nets."""
    if model.has_delta_net and parallel.dynamic_context_parallel:
        return (
            f"--experimental-attention-variant {model.experimental_attention_variant} is not available with "
            "--dynamic-context-parallel yet; give --context-parallel-size instead"
        )
    return None


def rules(run: RunConfig) -> list[ConfigRule]:
    """Returns the rules about delta nets, once the model's shape is known."""
    model = run.model
    if shape_is_pending(model, run.checkpoint):
        return []
    return [
        partial(gates_go_with_grouped_heads, model),
        partial(decays_of_channels_go_with, model, run.fp8),
        partial(delta_layers_are_chosen, model),
        partial(key_heads_serve_value_heads, model, run.parallel),
        partial(states_are_passed_in_one_group, model, run.parallel),
    ]
