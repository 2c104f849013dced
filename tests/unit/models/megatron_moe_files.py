"""Folders of models with experts as Megatron-LM writes them: every rank of a world cuts its own shards by plain
slicing.

Rank r of a stage has the ranks r % tp, r % etp and r // etp % ep, and the first that has a name writes the file.
"""

import argparse
import math
from dataclasses import dataclass

import torch

from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.core.models.mcore.classic import FILE
from tests.unit.models import megatron_files as files
from tests.unit.models.builds import LLAMA
from tests.unit.models.megatron_arguments import megatron_arguments
from tests.unit.models.test_mcore import FromModel, as_megatron_cuts_it

EXPERTS = {**LLAMA, "num_layers": 4, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
MODELS = {
    "mixtral": EXPERTS,
    "qwen2 moe": {
        **EXPERTS,
        "moe_layer_freq": "[0, 1, 0, 1]",
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 16,
        "moe_shared_expert_gate": True,
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": False,
    },
    "sigmoid": {
        **EXPERTS,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 16,
    },
    "squared relu": {**EXPERTS, "swiglu": False, "squared_relu": True},
    "biases": {
        **EXPERTS,
        "add_bias_linear": True,
        "moe_shared_expert_intermediate_size": 16,
        "softmax_type": "learnable",
    },
}
GROUPED, SEQUENTIAL = "{module}.weight{number}", "local_experts.{number}.{module}.weight"


class WithExperts(FromModel):
    """A model in memory, with biases on the choice of its experts if it has any."""

    def __init__(self, fields):
        super().__init__(fields)
        draw = torch.Generator().manual_seed(9)
        for name in [name for name in self.tensors if name.endswith(".mlp.router.weight")]:
            if self.model.moe_router_enable_expert_bias:
                bias = torch.randn(self.model.num_experts, generator=draw)
                self.tensors[name.removesuffix("weight") + "expert_bias"] = bias
        self.shapes = {name: tuple(t.shape) for name, t in self.tensors.items()}


@dataclass(frozen=True)
class World:
    """A run of Megatron-LM. stages: layers of each chunk of each stage. size: processes, as few as possible by
    default."""

    tp: int
    stages: list
    ep: int
    etp: int
    names: str = GROUPED

    def writers(self):
        """Folder -> (tp rank, stage, etp rank, ep rank) of the process that writes it."""
        pp, found = len(self.stages), {}
        for stage in range(pp):
            for rank in range(math.lcm(self.tp, self.ep * self.etp)):
                t, x, e = rank % self.tp, rank % self.etp, rank // self.etp % self.ep
                name = f"mp_rank_{t:02d}" + (f"_{stage:03d}" if pp > 1 else "") + (f"_{e:03d}" if self.ep > 1 else "")
                assert found.setdefault(name, (t, stage, x, e)) == (t, stage, x, e)
        return found

    def arguments(self, fields, version="d98e8a6", **more):
        """What that run leaves in its files."""
        sizes = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": len(self.stages),
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
        }
        theirs = dict(fields)
        if "moe_layer_freq" in theirs:
            theirs["moe_layer_freq"] = [int(each) for each in theirs["moe_layer_freq"].strip("[]").split(",")]
        return {**megatron_arguments(version, **theirs), **sizes, "moe_router_dtype": "fp32", **more}


WHOLE = World(1, [[4]], 1, 1)


def has_router(tensors, name):
    """Whether the layer of a tensor has experts."""
    return ".".join((*name.split(".")[:3], "mlp.router.weight")) in tensors


def without_experts(source, tensors):
    """All but the experts, as a source that as_megatron_cuts_it cuts."""
    other = object.__new__(FromModel)
    other.__dict__.update(source.__dict__)
    other.tensors = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    return other


def cut(source, world, tensors=None):
    """Folder -> {model key: {name: tensor}}; tensors: others of the same names and shapes than those of the source."""
    tensors = source.tensors if tensors is None else tensors
    dense = as_megatron_cuts_it(without_experts(source, tensors), world.tp, world.stages, True)
    found = {}
    for folder, (t, stage, x, e) in world.writers().items():
        parts = found[folder] = {}
        for chunk, (key, held) in enumerate(sorted(dense[t, stage].items())):
            parts[key] = {norm_before_experts(held, name): tensor.clone() for name, tensor in held.items()}
            first = sum(counts[c] for c in range(chunk) for counts in world.stages)
            first += sum(counts[chunk] for counts in world.stages[:stage])
            for local in range(world.stages[stage][chunk]):
                parts[key] |= of_layer(source.model, tensors, f"decoder.layers.{first + local}.", local, world, x, e)
    return found


def norm_before_experts(held, name):
    """A norm is inside the first linear layer of a dense MLP only."""
    if has_router(held, name):
        return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return name


def of_layer(model, tensors, own, local, world, x, e):
    """A rank's experts of one layer."""
    if f"{own}mlp.router.weight" not in tensors:
        return {}
    count, found = model.num_experts // world.ep, {}
    for number in range(count):
        for module, dim in (("linear_fc1", -2), ("linear_fc2", -1)):
            expert = tensors[f"{own}mlp.experts.{module}.weight"][e * count + number]
            shard = expert.chunk(world.etp, dim=dim)[x].reshape(-1, expert.shape[-1] // (world.etp if dim == -1 else 1))
            name = world.names.format(module=module, number=number)
            found[f"decoder.layers.{local}.mlp.experts.{name}"] = shard.clone()
            bias = tensors.get(f"{own}mlp.experts.{module}.bias")
            if bias is not None:  # that of the outputs is on all ranks of etp
                part = bias[e * count + number]
                part = part.chunk(world.etp, dim=-1)[x].flatten() if module == "linear_fc1" else part
                found[f"decoder.layers.{local}.mlp.experts.{name.replace('weight', 'bias')}"] = part.clone()
    return found


def write_classic(root, source, world, *, change=lambda folder, content: None, **more):
    """change: of what each file holds."""
    for folder, parts in cut(source, world).items():
        place = root / "iter_0000007" / folder
        place.mkdir(parents=True)
        content = {**parts, "args": argparse.Namespace(**world.arguments(source.fields, **more))}
        content |= {"checkpoint_version": 3.0, "iteration": 7}
        change(folder, content)
        torch.save(content, place / FILE)
    (root / TRACKER).write_text("7")


def module_order(held, world):
    """A chunk's parameters as Megatron-LM's modules list them: of Transformer Engine's layers with grouped experts, or
    of its own with one MLP after the other."""
    norm, attention = "self_attention.linear_qkv.layer_norm_weight", ["self_attention.linear_proj.weight"]
    attention = [*attention, norm] if world.names == GROUPED else [norm, *attention]
    attention += [f"self_attention.linear_qkv.{kind}" for kind in ("weight", "bias")]
    dense = ["pre_mlp_layernorm.weight", *(f"mlp.linear_fc1.{kind}" for kind in ("layer_norm_weight", "weight"))]
    places = [(module, number) for module in ("linear_fc1", "linear_fc2") for number in range(8)]
    if world.names == SEQUENTIAL:
        places.sort(key=lambda place: place[1])
    experts = [f"experts.{world.names.format(module=module, number=number)}" for module, number in places]
    shared = [f"shared_experts.{name}" for name in ("gate_weight", "linear_fc1.weight", "linear_fc2.weight")]
    layer = [*attention, *dense, "mlp.linear_fc2.weight", *(f"mlp.{n}" for n in ("router.weight", *experts, *shared))]
    inside = [f"decoder.layers.{number}.{name}" for number in range(4) for name in layer]
    found = [name for name in (*files.FIRST, *inside, *files.LAST) if name in held]
    assert set(held) - set(found) <= {name for name in held if name.endswith("expert_bias")}
    return found


def in_buckets(source, states, world, size):
    """As `dp_reshardable`; states: key -> tensors. With ep > 1 the experts are in buffers of a second optimizer."""
    found, pp = {}, len(world.stages)
    shared = ["embedding.word_embeddings.weight", "output_layer.weight"]
    alone = shared if pp > 1 and not source.model.untie_embeddings_and_output_weights else ()
    for key, tensors in states.items():
        held = cut(source, world, tensors)
        for folder, (t, stage, x, e) in world.writers().items():
            for chunk, part in enumerate(sorted(held[folder])):
                parameters = held[folder][part]
                order = module_order(parameters, world)
                groups = {"": (stage * world.tp + t, order)}
                if world.ep > 1:
                    kinds = ([name for name in order if (".mlp.experts." in name) == kind] for kind in (False, True))
                    places = (stage * world.tp + t, (stage * world.ep + e) * world.etp + x)
                    groups = dict(zip(("chained_0.", "chained_1."), zip(places, kinds)))
                for chain, (group, names) in groups.items():
                    beginning = f"{chain}optimizer.distributed.dp_group_idx_{group}"
                    full = size if (stage, chunk) == (0, 0) else None
                    for number, bucket in enumerate(files.buffer_of(parameters, names, full, alone)):
                        found[f"{beginning}.gbuf_idx_{chunk}.dtype_(x).bucket_idx_{number}.{key}"] = bucket
                    objects = [{"param_groups": [{"wd_mult": 1.0, "step": 5}]}]
                    found[f"{beginning}.optimizer/shard_0_1"] = objects
    return found


def whole_tensors(source, tensors, *, local=False):
    """Name -> tensor of torch_dist: experts of a layer as one; of all layers as one if all have experts."""
    dense = files.in_their_shape(source.model, without_experts(source, tensors).tensors, source.model.padded_vocab_size)
    found = {name if local else norm_before_experts(dense, name): tensor for name, tensor in dense.items()}
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            theirs = name.replace(".mlp.experts.", ".mlp.experts.experts.")
            halves = tensor.dim() == (3 if name.endswith("bias") else 4)
            found[theirs] = tensor.flatten(1, 2) if halves else tensor
    return files.stacked(found) if all(source.model.moe_layers) else found


def write_torch_dist(root, source, state, *, local=False, optimizer=None, world=WHOLE, **more):
    """state: further tensors. optimizer: what is no tensor in it."""
    folder = root / "iter_0000007"
    folder.mkdir(parents=True)
    files.write_dcp(folder, {**whole_tensors(source, source.tensors, local=local), **state})
    impl = {"transformer_impl": "local" if local else "transformer_engine", "moe_grouped_gemm": not local}
    training = {"use_distributed_optimizer": True, "global_batch_size": 8}
    source.arguments = world.arguments(source.fields, **impl, **training, **more)
    source.arguments["consumed_train_samples"] = 56
    common = files.common_state(source)
    if optimizer is not None:
        common["optimizer"] = optimizer
    torch.save(common, folder / "common.pt")
    (root / TRACKER).write_text("7")
