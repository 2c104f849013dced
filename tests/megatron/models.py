"""Models of Megatron-LM and ours with the same weights: the same losses, of further predictions too, and gradients.

By hand, with an interpreter that has what Megatron-LM imports (see on_cpu.py): `python tests/megatron/models.py
MEGATRON`. Models with latent attention and experts like DeepSeek-V3's and V2-Lite's, and a dense one, each with
multi-token prediction, one with gated delta nets like Qwen3-Next's, and one like gpt-oss, in fp32 on one process. Exit
code 1 if a figure differs. It is a script and no module: our package of the same name is read by a process of its own.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
BATCH, LENGTH, VOCAB, FACTOR, LIMIT = 2, 24, 96, 0.3, 1e-5
# By the names of Megatron-LM's settings, which are ours but for EXPERTS and THEIR_NAMES.
DENSE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "mtp_num_layers": 1,
}
LATENT = {
    **DENSE,
    "num_layers": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 20,
    "moe_shared_expert_intermediate_size": 24,
}
# Its norms of latents need Transformer Engine where queries are not projected from one.
MODELS = {
    "dense": DENSE,
    "like V3": {
        **LATENT,
        "q_lora_rank": 24,
        "qk_layernorm": True,
        "mtp_num_layers": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "like V2-Lite": {**LATENT, "moe_router_pre_softmax": True},
    "like Qwen3-Next": {
        **DENSE,
        "num_layers": 4,
        "mtp_num_layers": 0,
        "kv_channels": 12,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gdn",
        "linear_attention_freq": 3,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
    },
    "like gpt-oss": {
        **DENSE,
        "num_layers": 3,
        "mtp_num_layers": 0,
        "num_query_groups": 2,
        "softmax_type": "learnable",
        "window_size": (4, 0),
        "window_attn_skip_freq": 2,
        "add_bias_linear": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 0.05,
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": 20,
    },
}
EXPERTS = 8
ROTARY_PERCENT = 0.5  # of the model with delta nets
NORM_OF_DELTA_NET = "self_attention.in_proj.layer_norm_"
STRETCH, CONTEXT = 4.0, 16  # of YaRN


def drawn():
    """Token ids [b, s + 1]."""
    return torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def ours(name, path):
    """Writes (weights and biases, losses of every depth, gradients) of our model."""
    from megatron.core.parameter import local_parameters  # noqa: PLC0415
    from megatron.spec.moe import EXPERT_BIAS  # noqa: PLC0415
    from tests import pool  # noqa: PLC0415
    from tests.unit.models.builds import make_model  # noqa: PLC0415

    fields = our_fields(name)
    model = make_model(fields, pool.groups(), spread=0.1)
    generator = torch.Generator().manual_seed(2)
    biases = {key: buffer for key, buffer in model.named_buffers() if key.endswith(EXPERT_BIAS)}
    for buffer in biases.values():
        buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    ids, depths = drawn(), fields["mtp_num_layers"]
    labels = [torch.nn.functional.pad(ids[:, 1 + depth :], (0, depth)) for depth in range(1 + depths)]
    losses = model(ids[:, :-1], torch.arange(LENGTH).unsqueeze(0), labels=labels[0], further_labels=labels[1:])
    means = [loss[:, : LENGTH - depth].mean() for depth, loss in enumerate(losses if depths else [losses])]
    (means[0] + FACTOR * sum(mean / depths for mean in means[1:])).backward()
    parameters = local_parameters(model)
    values = {key: parameter.detach() for key, parameter in parameters.items()} | biases
    torch.save((values, torch.stack(means).detach(), {key: p.grad for key, p in parameters.items()}), path)


def our_fields(name):
    """The fields of our model."""
    from tests.unit.models.builds import LLAMA  # noqa: PLC0415

    fields = {**LLAMA, "group_query_attention": False, "num_query_groups": None, **MODELS[name]}
    fields |= {"vocab_size": VOCAB, "make_vocab_size_divisible_by": 8, "max_position_embeddings": LENGTH}
    fields["group_query_attention"] = fields["num_query_groups"] is not None
    if "linear_attention_freq" in fields:
        fields |= {"linear_attention_freq": str(fields["linear_attention_freq"]), "rotary_percent": ROTARY_PERCENT}
    if "softmax_type" in fields:
        fields |= {"window_size": "4,0", "window_attn_skip_freq": "2", "swiglu": False, "quick_geglu": True}
    if "kv_lora_rank" in fields:
        fields["multi_latent_attention"] = True
    if "moe_router_topk" in fields:
        fields |= {"num_experts": EXPERTS, "moe_layer_freq": "[0,1,1]"}
    if "mscale" in fields:
        fields |= {"position_embedding_type": "yarn", "rope_scaling_factor": STRETCH}
        fields |= {"rope_scaling_original_max_position_embeddings": CONTEXT}
    return fields


def their_model(name, rank=0, ranks=1, store=None):
    """Megatron-LM's model in fp32, of one process or of ranks of tp, which meet at a store."""
    from on_cpu import (  # noqa: PLC0415
        mend_attention,
        mend_delta_rule,
        mend_predictions,
        mend_reduction,
        replace_cuda,
        replace_delta_kernels,
        replace_generators,
    )

    replace_cuda()
    replace_delta_kernels()
    from megatron.core.fusions.fused_bias_geglu import quick_gelu  # noqa: PLC0415
    from megatron.core.transformer.transformer_config import (  # noqa: PLC0415
        MLATransformerConfig,
        TransformerConfig,
    )

    from megatron.core import parallel_state  # noqa: PLC0415
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: PLC0415

    store = store or torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    replace_generators()
    mend_attention()
    mend_predictions()
    mend_reduction()
    settings = {
        "add_bias_linear": False,
        "activation_func": torch.nn.functional.silu,
        **MODELS[name],
        "mtp_loss_scaling_factor": FACTOR,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "tensor_model_parallel_size": ranks,
    }
    is_latent = "kv_lora_rank" in settings
    if "softmax_type" in settings:
        settings["activation_func"] = quick_gelu
    if "moe_router_topk" in settings:
        settings |= {"num_moe_experts": EXPERTS, "moe_layer_freq": [0, 1, 1]}
        settings |= {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather"}
    if is_latent:
        settings |= {"rope_type": "yarn" if "mscale" in settings else "rope", "rotary_scaling_factor": STRETCH}
        settings |= {"original_max_position_embeddings": CONTEXT, "apply_rope_fusion": False}
    has_delta_nets = "linear_attention_freq" in settings
    if has_delta_nets:
        settings["deterministic_mode"] = True  # plain torch before and behind the delta rule
        del settings["experimental_attention_variant"]  # `give_delta_nets` does what it asks for
    settings["mtp_num_layers"] = settings["mtp_num_layers"] or None
    config = (MLATransformerConfig if is_latent else TransformerConfig)(**settings)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if has_delta_nets:
        give_delta_nets(block.layer_specs, settings["linear_attention_freq"])
    further = None
    if config.mtp_num_layers:
        further = gpt_layer_specs.get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    model = GPTModel(
        config,
        block,
        VOCAB,
        LENGTH,
        position_embedding_type="rope",
        rotary_percent=ROTARY_PERCENT if has_delta_nets else 1.0,
        mtp_block_spec=further,
        parallel_output=True,
    )
    for layer in model.decoder.layers if has_delta_nets else ():
        mend_delta_rule(layer.self_attention)
    return model


def theirs(name, path):
    """Prints the largest relative difference of losses and of gradients of Megatron-LM's model with these weights."""
    model = their_model(name)
    values, losses, gradients = torch.load(path)
    weights = renamed(values, MODELS[name])
    stored = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n.endswith("expert_bias")}
    assert weights.keys() == stored.keys(), sorted(weights.keys() ^ stored.keys())
    with torch.no_grad():
        for key, tensor in stored.items():
            tensor.copy_(weights[key].view(tensor.shape))
    loss = their_loss(model)
    loss.backward()
    further_losses = loss.new_empty(0)
    if model.config.mtp_num_layers:
        from megatron.core.transformer import multi_token_prediction as mtp  # noqa: PLC0415

        further_losses = mtp.MTPLossLoggingHelper.tracker["loss_values"].view(-1)
    found = torch.cat([loss.detach().view(1), further_losses])
    wanted = renamed(gradients, MODELS[name])
    worst, where = max(
        (difference / (scale or 1.0), key)  # an expert without tokens has no gradient
        for key, p in model.named_parameters()
        for scale in [wanted[key].abs().max().item()]
        for difference in [(p.grad - wanted[key].view(p.shape)).abs().max().item()]
    )
    print(f"{(found - losses).abs().max().item() / losses.min().item():.1e} {worst:.1e} {where}")


def their_loss(model):
    """The mean loss of the drawn tokens."""
    ids, positions = drawn(), torch.arange(LENGTH).unsqueeze(0)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    return model(ids[:, :-1], positions, mask, labels=ids[:, 1:], loss_mask=torch.ones(BATCH, LENGTH)).mean()


def give_delta_nets(layers, frequency):
    """Puts gated delta nets in the place of attention, as Megatron-LM's own specification does with Transformer
    Engine's layers."""
    from megatron.core.models.backends import LocalSpecProvider  # noqa: PLC0415
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules  # noqa: PLC0415
    from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: PLC0415

    backend = LocalSpecProvider()
    parts = GatedDeltaNetSubmodules(
        in_proj=backend.column_parallel_linear(),
        out_norm=backend.layer_norm(rms_norm=True, for_qk=False),
        out_proj=backend.row_parallel_linear(),
    )
    for number, layer in enumerate(layers):
        if (number + 1) % frequency:
            delta_net = ModuleSpec(module=GatedDeltaNet, submodules=parts)
            # All layers share one description. Its names of norms in torch_dist are those of Transformer Engine's layers.
            names = {**layer.submodules.sharded_state_dict_keys_map, "input_layernorm.": NORM_OF_DELTA_NET}
            changed = dataclasses.replace(layer.submodules, self_attention=delta_net, sharded_state_dict_keys_map=names)
            layers[number] = dataclasses.replace(layer, submodules=changed)


def renamed(tensors, settings):
    """Ours -> theirs: the experts one by one, the layer of a prediction under another name, and the rows of a delta net
    and of queries with gates, which we have head by head, in their order."""
    found = {}
    for key, tensor in tensors.items():
        name = key.replace(".transformer_layer.", ".mtp_model_layer.").replace(".decay.", ".")
        if ".mlp.experts." in name:
            before, matrix = name.rsplit(".experts.", 1)
            found |= {f"{before}.experts.local_experts.{n}.{matrix}": part for n, part in enumerate(tensor)}
        elif ".in_proj." in name or ".conv1d." in name:
            values = settings["linear_num_value_heads"] // settings["linear_num_key_heads"]
            keys, written = settings["linear_key_head_dim"], values * settings["linear_value_head_dim"]
            widths = [keys, keys, written, written, values, values] if ".in_proj." in name else [keys, keys, written]
            found[name] = torch.cat([part.flatten(0, 1) for part in tensor.split(widths, dim=1)])
        elif ".linear_qkv." in name and settings.get("attention_output_gate"):
            channels, queries = settings["kv_channels"], settings["num_attention_heads"] // settings["num_query_groups"]
            heads = tensor.unflatten(1, (-1, channels))
            pairs = heads[:, : 2 * queries]
            found[name] = torch.cat((pairs[:, ::2], pairs[:, 1::2], heads[:, 2 * queries :]), dim=1)
        else:
            found[name] = tensor
    return found


def main():
    """Compares the two, each in a process of its own."""
    megatron, wrong = sys.argv[1], 0
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            for side, path in (("ours", ROOT), ("theirs", f"{megatron}{os.pathsep}{ROOT}/tests/megatron")):
                words = [sys.executable, __file__, side, name, f"{folder}/ours.pt"]
                environment = {"PYTHONPATH": str(path), "PATH": "/usr/bin:/bin", "TORCHDYNAMO_DISABLE": "1"}
                done = subprocess.run(words, capture_output=True, text=True, env=environment)
                assert done.returncode == 0, done.stderr
        losses, gradients, where = done.stdout.split()[-3:]
        print(f"{name}: losses differ by {losses}, gradients by {gradients} ({where})")
        wrong += max(float(losses), float(gradients)) > LIMIT
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1] in ("ours", "theirs"):
        {"ours": ours, "theirs": theirs}[sys.argv[1]](*sys.argv[2:])
    else:
        sys.exit(main())
