"""Restores a model from a checkpoint or a Hugging Face folder alone, for tools that run it without training.

Its shape and its tokenizer are those saved. The result does not depend on which of the two it came from.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.log import get_logger
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.core.datasets.tokenizer import Tokenizer, build_tokenizer
from megatron.core.dist_checkpointing.folders import find
from megatron.core.dist_checkpointing.store import load, read_state
from megatron.core.groups import Groups, with_experts
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hf.adapter import AdapterSource
from megatron.core.models.hf.families import CONFIG_FILE
from megatron.core.models.hf.side_files import tokenizer_of
from megatron.core.models.hf.source import HFSource
from megatron.core.models.source import fill
from megatron.core.parameter import Parameter, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.kernels.fused import missing
from megatron.schedule.partition import partition
from megatron.spec.lora import is_adapter
from megatron.training.checkpoint_tensors import bias_tensors, model_tensors
from megatron.training.export import saved_parts
from megatron.training.saved_run import check_state
from megatron.training.together import together

log = get_logger(__name__)


@dataclass(frozen=True)
class Saved:
    """The description of a saved model, before anything is built.

    `path` is a checkpoint of this program, or a folder in Hugging Face format; `hf` then has its weights. `adapter` is
    PEFT's, applied to it. `model` has the precision in which it is stored. `dtype` is the one in which to run it; None
    for the stored one. `base` is the Hugging Face model with which its training began, if it began with one.
    """

    path: Path
    model: ModelConfig
    tokenizer: TokenizerConfig
    hf: HFSource | None = None
    adapter: AdapterSource | None = None
    dtype: torch.dtype | None = None
    base: str | None = None

    @property
    def name(self) -> str:
        """The name of the folder that the user gave."""
        return (self.path.parent if self.hf is None else self.path).resolve().name

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the weights, or of most of them if a Hugging Face folder mixes several."""
        return getattr(torch, self.model.dtype_name) if self.hf is None else self.hf.dtype


def read_saved(directory: str, step: int | None) -> Saved:
    """Reads the newest checkpoint in `directory`, or that of iteration `step`. No communication. Raises
    CheckpointError.
    """
    path = find(Path(directory), step)
    if path is None:
        is_hf = (Path(directory) / CONFIG_FILE).is_file()
        fix = "--load-hf takes its Hugging Face model" if is_hf else "give the folder that a run saved in"
        raise CheckpointError(f"--load {directory} holds no checkpoint; {fix}")
    state = read_state(path)
    check_state(path, state)
    return Saved(path, *saved_parts(state), base=state["config"]["checkpoint"].get("load_hf"))


def read_hf(directory: str, adapter: str | None = None) -> Saved:
    """Reads a folder in Hugging Face format: config.json, the tokenizer if there is one, and the headers of its
    weights.

    `adapter` is the folder of an adapter that will be applied with `with_adapter`. No communication. Raises
    CheckpointError for files that are missing, damaged or unsupported.
    """
    source = HFSource(Path(directory), adapter)
    return Saved(
        source.path, _in_dtype(source.model, source.dtype), tokenizer_of(source.path), hf=source, base=str(source.path)
    )


def with_adapter(saved: Saved, folder: str) -> Saved:
    """Returns the saved model with the LoRA adapter of a folder in PEFT's format. No communication. Raises
    CheckpointError.
    """
    adapter = AdapterSource(Path(folder), saved.model)
    return dataclasses.replace(saved, model=adapter.model, adapter=adapter)


def parse_dtype(bf16: bool, fp16: bool, fp32: bool, stored: torch.dtype) -> torch.dtype:
    """Returns the dtype that flags ask for; without one the dtype in which the weights are stored. Raises
    ConfigError."""
    flags = {"--bf16": bf16, "--fp16": fp16, "--fp32": fp32}
    names = [name for name, is_on in flags.items() if is_on]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} are given together; give one of them")
    if not names:
        if stored not in (torch.bfloat16, torch.float16, torch.float32):
            raise ConfigError(f"the weights are stored as {stored}; give --bf16, --fp16 or --fp32")
        return stored
    return {"--bf16": torch.bfloat16, "--fp16": torch.float16, "--fp32": torch.float32}[names[0]]


def check_tp(saved: Saved, tp: int) -> None:
    """Raises ConfigError unless `tp` processes can share each layer of the saved model."""
    model = saved.model
    assert model.num_attention_heads
    heads, groups, width, vocabulary = (
        model.num_attention_heads,
        model.num_kv_heads,
        model.ffn_dim,
        model.padded_vocab_size,
    )
    common = math.gcd(heads, width, vocabulary)
    fitting = [n for n in range(1, common + 1) if common % n == 0 and 0 in (groups % n, n % groups)]
    if tp not in fitting:
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} does not divide the model of {saved.path}: {heads} heads, {groups} "
            f"key/value heads, MLP width {width}, padded vocabulary {vocabulary}; use one of "
            f"{', '.join(map(str, fitting))}"
        )


def check_pp(saved: Saved, pp: int) -> None:
    """Raises ConfigError unless the layers of the saved model can be distributed equally over `pp` processes."""
    layers = saved.model.num_layers
    assert layers
    if layers % pp:
        raise ConfigError(
            f"--pipeline-model-parallel-size {pp} does not divide the {layers} layers of {saved.path}; "
            f"use a divisor of {layers}"
        )


def restore_tokenizer(saved: Saved, **changes: Any) -> Tokenizer:
    """Returns the saved tokenizer with changed fields of its configuration. Raises ConfigError and DataError.

    No communication. A checkpoint cannot request that a tokenizer's own code is run: trust_remote_code is False unless
    it is in `changes`.
    """
    config = dataclasses.replace(saved.tokenizer, **{"trust_remote_code": False, **changes})
    tokenizer = build_tokenizer(config, saved.model.vocab_size)
    assert saved.model.vocab_size
    if tokenizer.vocab_size > saved.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids but the model of {saved.path} knows "
            f"{saved.model.vocab_size}; give the tokenizer it was trained with"
        )
    return tokenizer


def restore_model(
    saved: Saved, groups: Groups, device: torch.device, timeout_seconds: float = 1800.0
) -> tuple[GPTModel, Build]:
    """Returns the saved weights under the layout of `groups`, for evaluation: no dropout, gradients or sequence
    parallelism.

    Weights are rounded once to the precision that `saved` asks for; attention uses the fastest kernel of this machine,
    or those of --batch-invariant-mode, where they run, if the model was trained so.
    Each rank reads its own slices of its pipeline stage's layers. Collective over the world: small objects only. Raises
    CheckpointError, and ConfigError for layers that the pipeline ranks cannot share equally.
    """
    model_config = _in_dtype(saved.model, saved.dtype or saved.stored)
    config = dataclasses.replace(
        model_config,
        attention_backend="auto",
        batch_invariant_mode=model_config.batch_invariant_mode and (device.type == "cpu" or missing(device) is None),
        gradient_accumulation_fusion=False,
        mtp_num_layers=0,
    )
    if config.num_experts:
        groups = with_experts(groups, timeout_seconds)
    kernels, rng = choose_kernels(config, device), RngTracker(0, groups, device)
    build = Build(config, groups, False, kernels, rng, device)
    assert config.num_layers
    stage = partition(config.num_layers, range(groups.pp.size))[groups.pp.rank]
    model = GPTModel(build, [stage]).eval().requires_grad_(False)
    parameters, source, adapter = local_parameters(model), saved.hf, saved.adapter
    adapters = {n: p for n, p in parameters.items() if is_adapter(n)} if adapter else {}
    parameters = {n: p for n, p in parameters.items() if n not in adapters}
    with groups.heartbeat.phase("load-checkpoint"):
        if source is None:
            _read_checkpoint(saved.path, parameters, groups, saved.stored)
            if config.moe_router_enable_expert_bias:
                load(saved.path, bias_tensors(dict(model.named_buffers()), groups), group=groups.world)
        else:
            together(groups.world, lambda: fill(parameters, source, dict(model.named_buffers())))
        if adapter is not None:
            together(groups.world, lambda: fill(adapters, adapter))
    sizes = f"tp {groups.tp.size}, pp {groups.pp.size}"
    log.info("loaded %s: %s on %s, %s", saved.path, config.dtype_name, device, sizes)
    return model, build


def _read_checkpoint(path: Path, parameters: dict[str, Parameter], groups: Groups, stored: torch.dtype) -> None:
    """Reads a checkpoint in the dtype in which it was saved; another dtype requires conversion in host memory."""
    pieces = model_tensors(parameters, groups)
    if all(piece.data.dtype == stored for piece in pieces):
        load(path, pieces, group=groups.world)
        return
    read = [dataclasses.replace(piece, data=torch.empty(piece.data.shape, dtype=stored)) for piece in pieces]
    load(path, read, group=groups.world)
    for piece, stored_piece in zip(pieces, read, strict=True):
        piece.data.copy_(stored_piece.data)


def _in_dtype(model: ModelConfig, dtype: torch.dtype) -> ModelConfig:
    """Returns the model in bf16 or fp16, and in fp32 for any other dtype."""
    return dataclasses.replace(model, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
