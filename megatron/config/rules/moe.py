"""Rules about mixture of experts: the router's choice, the shards of the experts, and the balance between them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron.config.mesh import mesh_of
from megatron.config.model import ModelConfig
from megatron.config.moe import SIGMOID
from megatron.config.moe_training import ALL_GATHER, ALL_TO_ALL, NONE, SINKHORN, MoEConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import hides_exchanges
from megatron.config.rules.rule import ConfigRule
from megatron.config.rules.sources import shape_is_pending
from megatron.config.run import RunConfig
from megatron.config.train import TrainConfig

_MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def experts_exist_to_be_shared(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Only experts are sharded over ep and etp."""
    sizes = {
        "--expert-model-parallel-size": parallel.expert_model_parallel_size,
        "--expert-tensor-parallel-size": parallel.expert_tensor_parallel_size or 1,
    }
    flags = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if flags and model.num_experts is None:
        return f"{' and '.join(flags)} shares experts between ranks, and the model has none; give --num-experts, or 1"
    return None


def ep_divides_experts(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Each expert-parallel rank holds equally many experts."""
    assert model.num_experts
    ep = parallel.expert_model_parallel_size
    if model.num_experts % ep:
        return f"--num-experts {model.num_experts} is not a multiple of --expert-model-parallel-size {ep}; change one"
    return None


def etp_divides_expert_width(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """The ranks that share an expert hold equal parts of its MLP."""
    flag_etp, width = parallel.expert_tensor_parallel_size, model.moe_ffn_dim
    etp = flag_etp or parallel.tensor_model_parallel_size
    if width % etp == 0:
        return None
    name = "--moe-ffn-hidden-size" if model.moe_ffn_hidden_size else "--ffn-hidden-size"
    if flag_etp:
        return f"{name} {width} is not a multiple of --expert-tensor-parallel-size {etp}; change one of them"
    return (
        f"{name} {width} is not a multiple of --tensor-model-parallel-size {etp}, over which each expert is sharded, "
        "too; give --expert-tensor-parallel-size 1, or change one of them"
    )


def tp_divides_shared_expert(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """The shared experts are one MLP, sharded over tp like a dense one."""
    width, tp = model.moe_shared_expert_intermediate_size, parallel.tensor_model_parallel_size
    if width is not None and width % tp:
        return (
            f"--moe-shared-expert-intermediate-size {width} is not a multiple of --tensor-model-parallel-size {tp}; "
            "change one of them"
        )
    return None


def experts_are_enough(model: ModelConfig) -> str | None:
    """The experts of a token are different ones."""
    assert model.num_experts
    if model.moe_router_topk > model.num_experts:
        return f"--moe-router-topk {model.moe_router_topk} is above --num-experts {model.num_experts}; lower it"
    return None


def groups_are_chosen_from(model: ModelConfig) -> str | None:
    """Groups of experts matter only if a token's experts come from some of them; a single group needs no number."""
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is not None and groups > 1 and chosen is None:
        return (
            f"--moe-router-num-groups {groups} needs the number of groups that a token's experts come from; give "
            "--moe-router-group-topk"
        )
    if chosen is not None and groups is None:
        return f"--moe-router-group-topk {chosen} needs the number of groups; give --moe-router-num-groups"
    return None


def groups_divide_experts(model: ModelConfig) -> str | None:
    """All groups have equally many experts."""
    assert model.num_experts
    groups = model.moe_router_num_groups or 1
    if model.num_experts % groups:
        return f"--num-experts {model.num_experts} is not a multiple of --moe-router-num-groups {groups}; change one"
    return None


def groups_are_enough(model: ModelConfig) -> str | None:
    """The groups of a token are different ones."""
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is not None and chosen is not None and chosen > groups:
        return f"--moe-router-group-topk {chosen} is above --moe-router-num-groups {groups}; lower it"
    return None


def groups_hold_the_chosen(model: ModelConfig) -> str | None:
    """The groups of a token have as many experts together as the token needs."""
    assert model.num_experts
    topk, groups, chosen = model.moe_router_topk, model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None or chosen is None:
        return None
    size = model.num_experts // groups
    if topk > chosen * size:
        return (
            f"--moe-router-topk {topk} is above the {chosen * size} experts in --moe-router-group-topk {chosen} groups "
            f"of {size}; lower it, or raise --moe-router-group-topk"
        )
    return None


def group_score_has_terms(model: ModelConfig) -> str | None:
    """The sum that scores a group has at least one term: topk / group_topk, rounded down."""
    topk, chosen = model.moe_router_topk, model.moe_router_group_topk
    if chosen is not None and model.moe_router_group_score == "sum" and topk < chosen:
        return (
            f"--moe-router-group-score sum adds the best {topk} / {chosen} experts of a group, which is less than one; "
            f"give --moe-router-group-score max, or lower --moe-router-group-topk {chosen} to {topk}"
        )
    return None


def logits_have_no_bias(model: ModelConfig) -> str | None:
    """A bias is added to scores between 0 and 1; the logits of a softmax have another scale in each model."""
    if model.moe_router_enable_expert_bias and model.groups_by_logits:
        return (
            "--moe-router-enable-expert-bias is added to scores, and the groups of a softmax over the chosen experts "
            "are chosen by sums of logits; give --moe-router-group-score max, --moe-router-pre-softmax or "
            f"--moe-router-score-function {SIGMOID}"
        )
    return None


def weights_depend_on_scores(model: ModelConfig) -> str | None:
    """The weight of a token's only expert, divided by itself, is 1 whatever the router says, which then never
    learns."""
    if model.moe_router_topk > 1 or not model.normalizes_topk:
        return None
    is_forced = model.moe_router_topk_normalization == "on"
    fix = "remove --moe-router-topk-normalization on" if is_forced else "give --moe-router-pre-softmax"
    if is_forced and model.moe_router_score_function != SIGMOID and not model.moe_router_pre_softmax:
        fix += " and give --moe-router-pre-softmax"
    return (
        "with --moe-router-topk 1 and normalized weights the weight of the chosen expert is always 1, so that the "
        f"router gets no gradient; {fix}"
    )


def softmax_has_one_form(model: ModelConfig) -> str | None:
    """A softmax over the chosen experts sums to 1; one that is not normalized is the softmax over all of them."""
    off = model.moe_router_topk_normalization == "off"
    if off and model.moe_router_score_function != SIGMOID and not model.moe_router_pre_softmax:
        return (
            "--moe-router-topk-normalization off contradicts the softmax over the chosen experts, which sums to 1; add "
            "--moe-router-pre-softmax for the softmax over all experts"
        )
    return None


def biases_of_experts_are_sharded(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """The ranks of etp share the channels of the bias of an expert's output."""
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    hidden = model.hidden_size
    if model.mlp_bias and hidden is not None and hidden % etp:
        return (
            f"--hidden-size {hidden} is not divisible by --expert-tensor-parallel-size {etp}, whose ranks share the "
            "biases of experts; give --expert-tensor-parallel-size 1"
        )
    return None


def ranks_hold_different_tokens(parallel: ParallelConfig, train: TrainConfig) -> str | None:
    """Without sequence parallelism all ranks of tp hold the same tokens, and would send each of them to its experts."""
    tp = parallel.tensor_model_parallel_size
    if tp > 1 and not parallel.sequence_parallel and not train.skip_train:
        return (
            f"--num-experts with --tensor-model-parallel-size {tp} needs different tokens on each rank; add "
            "--sequence-parallel"
        )
    return None


def balancing_types_are_apart(moe: MoEConfig) -> str | None:
    """Each loss that balances the experts is named once, and `none` stands alone."""
    types = moe.moe_router_load_balancing_type
    if NONE in types and len(types) > 1:
        return f"--moe-router-load-balancing-type {' '.join(types)}: {NONE} excludes the others; remove it or them"
    twice = [kind for kind in dict.fromkeys(types) if types.count(kind) > 1]
    if twice:
        return f"--moe-router-load-balancing-type {' '.join(types)} has {', '.join(twice)} twice; give each type once"
    return None


def sinkhorn_chooses_alone(model: ModelConfig, moe: MoEConfig) -> str | None:
    """Sinkhorn's choice balances all experts by itself, and weighs them by scores that are not divided by their sum."""
    types = moe.moe_router_load_balancing_type
    if SINKHORN not in types:
        return None
    flag = f"--moe-router-load-balancing-type {SINKHORN}"
    if len(types) > 1:
        return f"--moe-router-load-balancing-type {' '.join(types)}: {SINKHORN} excludes the others; remove it or them"
    if any(moe.moe_aux_loss_coeff):
        return f"{flag} has no loss; remove --moe-aux-loss-coeff"
    if model.normalizes_topk:
        score = f"--moe-router-score-function {SIGMOID}" if model.moe_router_topk == 1 else "--moe-router-pre-softmax"
        return f"{flag} weighs experts by scores that are not divided by their sum; give {score}"
    flags = {
        "--moe-router-num-groups": (model.moe_router_num_groups or 1) > 1,
        "--moe-router-enable-expert-bias": model.moe_router_enable_expert_bias,
        "--moe-expert-capacity-factor": moe.moe_expert_capacity_factor is not None,
    }
    if named := [name for name, is_on in flags.items() if is_on]:
        return f"{flag} balances all experts by itself; remove {' and '.join(named)}"
    return None


def coefficients_fit_types(moe: MoEConfig) -> str | None:
    """Each loss that balances the experts has its coefficient."""
    types, coefficients = moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff
    if len(types) != len(coefficients):
        return (
            f"--moe-aux-loss-coeff has {len(coefficients)} value{'s' * (len(coefficients) != 1)} for {len(types)} "
            f"--moe-router-load-balancing-type ({' '.join(types)}); give one per type"
        )
    return None


def instances_divide_expert_copies(parallel: ParallelConfig, world_size: int) -> str | None:
    """Every instance of the sharded optimizer has equally many ranks with a copy of each expert."""
    mesh, instances = mesh_of(parallel, world_size), parallel.num_distributed_optimizer_instances
    if mesh.edp % instances:
        return (
            f"--num-distributed-optimizer-instances {instances} does not divide the {mesh.edp} copies of each expert: "
            f"world size {world_size} / (etp {mesh.etp} x ep {mesh.ep} x pp {mesh.pp}); give a divisor of {mesh.edp}"
        )
    return None


def adapters_leave_experts(model: ModelConfig) -> str | None:
    """LoRA adapts the MLPs that a token always passes, of shared experts and of layers without experts."""
    targets, has_mlps = (
        model.lora_target_modules,
        model.moe_shared_expert_intermediate_size or not all(model.moe_layers),
    )
    if not has_mlps and any(projection in model.lora_projections for projection in _MLP_PROJECTIONS):
        return (
            f"--lora-target-modules {' '.join(targets)} includes projections of the MLP, and all MLPs are routed "
            "experts, whose grouped products take no adapters; give --lora-target-modules linear_qkv linear_proj"
        )
    return None


def exchanges_can_be_hidden(run: RunConfig) -> str | None:
    """Computations of two microbatches can take turns only if nothing else depends on which of them runs."""
    reason = next(_hindrances(run), None) if hides_exchanges(run.parallel) else None
    return None if reason is None else f"--overlap-moe-expert-parallel-comm cannot be combined with {reason}"


def _hindrances(run: RunConfig) -> Iterator[str]:
    parallel, offload = run.parallel, run.activation_offload
    if run.moe.moe_token_dispatcher_type == ALL_GATHER:
        yield f"--moe-token-dispatcher-type {ALL_GATHER}, which waits for its gathers; give {ALL_TO_ALL}"
    if parallel.pipeline_schedule == "gpipe":
        yield "--pipeline-schedule gpipe, in which no backward is next to a forward; give 1f1b"
    if parallel.pipeline_model_parallel_size > 1 and not parallel.overlap_p2p_communication:
        yield "--no-overlap-p2p-communication, with which neighbouring stages wait for each other's messages; remove it"
    if run.data_parallel_settings().shards == "optim_grads_params":
        yield (
            "--data-parallel-sharding-strategy optim_grads_params, which frees the parameters that one of two "
            "microbatches still reads; give optim_grads"
        )
    if offload.cpu_offloading_weights:
        yield "--cpu-offloading-weights, which frees the weights that one of two microbatches still reads; remove it"
    if offload.kind is not None:
        yield (
            f"copies of activations to host memory ({offload.kind}), which are placed by the computation that runs; "
            "remove the flags of activation offload"
        )


def rules(run: RunConfig, world_size: int) -> list[ConfigRule]:
    """Returns the rules about experts, if the model's shape is known and has any."""
    if shape_is_pending(run.model, run.checkpoint):
        return []
    model, parallel = run.model, run.parallel
    alone = partial(experts_exist_to_be_shared, model, parallel)
    if model.num_experts is None:
        return [alone]
    return [
        alone,
        partial(ep_divides_experts, model, parallel),
        partial(etp_divides_expert_width, model, parallel),
        partial(tp_divides_shared_expert, model, parallel),
        partial(experts_are_enough, model),
        partial(groups_are_chosen_from, model),
        partial(groups_divide_experts, model),
        partial(groups_are_enough, model),
        partial(groups_hold_the_chosen, model),
        partial(group_score_has_terms, model),
        partial(logits_have_no_bias, model),
        partial(sinkhorn_chooses_alone, model, run.moe),
        partial(weights_depend_on_scores, model),
        partial(softmax_has_one_form, model),
        partial(biases_of_experts_are_sharded, model, parallel),
        partial(ranks_hold_different_tokens, parallel, run.train),
        partial(balancing_types_are_apart, run.moe),
        partial(coefficients_fit_types, run.moe),
        partial(instances_divide_expert_copies, parallel, world_size),
        partial(adapters_leave_experts, model),
        partial(exchanges_can_be_hidden, run),
    ]
