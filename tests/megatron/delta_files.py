"""Files of a model with gated delta nets that we write and Megatron-LM reads, and the other way: the same bits.

By hand, with an interpreter that has what Megatron-LM imports (see on_cpu.py): `python tests/megatron/delta_files.py
MEGATRON`. In fp32, on one process and on two ranks of tp, in both formats: Megatron-LM loads what we write, must compute
our loss, and saves it, of which we must read our bits; in torch_dist with the state of its distributed optimizer. Its
modules are its own; it builds delta nets from Transformer Engine's alone, whose names of norms the files have. Exit code
1 if anything differs. It is a script, as models.py is.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
import typing
from pathlib import Path

import torch
from models import LIMIT, NORM_OF_DELTA_NET, our_fields, ours, their_loss, their_model

ROOT = Path(__file__).parents[2]
NAME, FILE, FORMS = "like Qwen3-Next", "model_optim_rng.pt", ("torch_dist", "torch")
DENSE_NORMS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
DELTA_NORMS = {"input_layernorm.": NORM_OF_DELTA_NET}
MLP_NORMS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


# How Megatron-LM's training program saves with --dist-ckpt-optim-fully-reshardable.
SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def source_and_state():
    """Our model, and a state of Adam whose fp32 weights are the model's."""
    from tests.unit.models.test_mcore import FromModel  # noqa: PLC0415
    from tests.unit.models.test_mcore_writers import State  # noqa: PLC0415

    source = FromModel(our_fields(NAME))
    state = State(source)
    state.by_key["master"] = source
    return source, state


def write(folder, ranks):
    """Writes both formats, and the loss and the weights."""
    from megatron.core.models.mcore.dist_writer import write_torch_dist  # noqa: PLC0415
    from megatron.core.models.mcore.training_state import TrainingState  # noqa: PLC0415
    from megatron.core.models.mcore.writer import write_mcore  # noqa: PLC0415

    ours(NAME, f"{folder}/ours.pt")
    (source, state), tp = source_and_state(), int(ranks)
    dist, classic = (Path(folder, form) for form in FORMS)
    write_torch_dist(source, dist, tp=tp, local=False, dtype=torch.float32, training=state.training())
    write_mcore(source, classic, tp=tp, pp=1, fused_norms=True, dtype=torch.float32, training=TrainingState())


def load_and_save(folder, ranks, rank):
    """Prints the relative difference of Megatron-LM's loss from ours, of each format, and saves its weights."""
    if not hasattr(typing, "override"):  # Megatron-LM asks for Python 3.12
        typing.override = lambda function: function
    # Processes that it spawns to write would import this script anew, without what is replaced.
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = torch.multiprocessing.get_context = lambda method=None: fork
    store = torch.distributed.FileStore(f"{folder}/store", int(ranks))
    model, (_, (expected,), _) = their_model(NAME, int(rank), int(ranks), store), torch.load(f"{folder}/ours.pt")
    for form, load in zip(FORMS, (in_torch_dist, in_classic), strict=True):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        (path,) = (place for place in Path(folder, form).iterdir() if place.is_dir())
        torch.distributed.barrier()
        load(model, path, Path(folder, f"{form} of theirs"), int(rank))
        print(f"{form} {abs(their_loss(model).item() / expected.item() - 1):.1e}")


def in_torch_dist(model, path, saved, rank):
    """Loads and saves weights and optimizer by Megatron-LM's own functions."""
    from on_cpu import mend_distributed_optimizer  # noqa: PLC0415

    mend_distributed_optimizer()
    from megatron.core import dist_checkpointing, distributed, optimizer  # noqa: PLC0415

    parallel = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
    replica = distributed.DistributedDataParallel(model.config, parallel, model)
    settings = {"lr": 1e-3, "min_lr": 1e-4, "weight_decay": 0.1, "adam_beta2": 0.95, "params_dtype": torch.float32}
    adam = optimizer.get_megatron_optimizer(
        optimizer.OptimizerConfig(optimizer="adam", use_distributed_optimizer=True, **settings), [replica]
    )

    def state(*, is_loading):
        weights = model.sharded_state_dict(metadata=dict(SHARDING))
        of_adam = adam.sharded_state_dict(weights, is_loading=is_loading, metadata=dict(SHARDING))
        return {"model": weights, "optimizer": of_adam}

    loaded = dist_checkpointing.load(state(is_loading=True), str(path))
    model.load_state_dict(loaded["model"])
    adam.load_state_dict(loaded["optimizer"])
    if rank == 0:
        saved.mkdir()
    torch.distributed.barrier()
    common = {"args": loaded["args"], "iteration": 0, "checkpoint_version": 3.0, "content_metadata": SHARDING}
    dist_checkpointing.save(state(is_loading=False) | common, str(saved))


def in_classic(model, path, saved, rank):
    """A file of the state of its modules, with the names of Transformer Engine's norms."""
    place = f"mp_rank_{rank:02d}"
    content = torch.load(path / place / FILE, weights_only=False)
    names = {engine_name(model, name): name for name in model.state_dict()}
    missing = [name for name in names if name not in content["model"] and not name.endswith("_extra_state")]
    assert not missing and content["model"].keys() <= names.keys(), (missing, content["model"].keys() - names.keys())
    inside = [[name for name in order if "layer_norm_" not in name] for order in (content["model"], names)]
    assert inside[0] == [name for name in inside[1] if name in content["model"]], "the order of modules is another"
    model.load_state_dict({names[name]: tensor for name, tensor in content["model"].items()}, strict=False)
    (saved / place).mkdir(parents=True)
    content["model"] = {engine_name(model, name): value for name, value in model.state_dict().items()}
    torch.save(content, saved / place / FILE)


def engine_name(model, name):
    """The name of a tensor with the norms inside of linear layers."""
    _, _, after = name.partition("decoder.layers.")
    if not after:
        return name
    layer = model.decoder.layers[int(after.partition(".")[0])]
    norms = DELTA_NORMS if hasattr(layer.self_attention, "in_proj") else DENSE_NORMS
    for module, inside in {**norms, **MLP_NORMS}.items():
        name = name.replace(f".{module}", f".{inside}")
    return name


def read(folder):
    """Prints the number of tensors of each format that are not our bits, and their names."""
    from megatron.base.box import Box  # noqa: PLC0415
    from megatron.core.models.mcore.source import MCoreSource  # noqa: PLC0415

    source, state = source_and_state()
    wholes = {name: Box((0,) * len(shape), shape) for name, shape in source.shapes.items()}
    for form in FORMS:
        saved = MCoreSource(Path(folder, f"{form} of theirs"), None, None)
        pairs = [(name, saved.read(name, whole, torch.float32), source.tensors[name]) for name, whole in wholes.items()]
        for key in state.by_key if form == "torch_dist" else ():
            tensors = state.by_key[key].tensors
            pairs += [(f"{key} {name}", saved.read_state(name, key, wholes[name]), tensors[name]) for name in wholes]
        changed = [name for name, tensor, expected in pairs if not torch.equal(tensor, expected)]
        print(form, len(changed), *changed)


def main():
    """Runs each side in processes of its own."""
    megatron, wrong = sys.argv[1], 0
    theirs = f"{megatron}{os.pathsep}{ROOT}/tests/megatron"
    paths = types.SimpleNamespace(ours=f"{ROOT}{os.pathsep}{ROOT}/tests/megatron", theirs=theirs)

    def started(path, *words):
        environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "TORCHDYNAMO_DISABLE": "1"}
        command = [sys.executable, __file__, *map(str, words)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def lines(*processes):
        outputs = [process.communicate() for process in processes]
        assert not any(process.returncode for process in processes), "\n".join(error for _, error in outputs)
        return [output.splitlines()[-2:] for output, _ in outputs]

    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            lines(started(paths.ours, "write", folder, ranks))
            losses = lines(*(started(paths.theirs, "load_and_save", folder, ranks, rank) for rank in range(ranks)))
            weights = lines(started(paths.ours, "read", folder))
        print(f"{ranks} ranks of tp: losses {losses}, weights {weights}")
        numbers = [float(line.split()[1]) for of_rank in (*losses, *weights) for line in of_rank]
        wrong += not max(numbers) <= LIMIT
    return 1 if wrong else 0


if __name__ == "__main__":
    sides = {"write": write, "load_and_save": load_and_save, "read": read}
    sys.exit(sides[sys.argv[1]](*sys.argv[2:]) if sys.argv[1] in sides else main())
