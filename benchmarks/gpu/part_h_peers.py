"""Part H: other programs on the 8B slice of part G, in the same run: one microbatch per step, bf16 weights and
moments."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.case import Case, Result, Setting
from benchmarks.gpu.measure import combine, package
from benchmarks.gpu.part_g_speed import SLICE_8B, needs
from benchmarks.gpu.runs import (
    TOY_FP8,
    Peak,
    Speed,
    configured,
    described,
    device_of,
    fp8_flags,
    measure_speed,
    run_seconds,
    start,
    step_flops,
)
from megatron.config.run import RunConfig

LR, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0
WARM, TIMED = 3, 6
INDUCTOR_SECONDS = 40.0  # to compile a model
# tokens and labels [b, s] -> loss
Model = Callable[[Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    """A model and the function that computes its loss."""

    module: nn.Module
    loss: Model


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part."""
    of = functools.partial
    compiled, engine = of(transformers, compiled=True), transformer_engine
    peers: dict[str, Callable[[Setting, RunConfig], Peer]] = {
        "transformers, fused AdamW": of(transformers, compiled=False, fp8=None),
        "transformers, compiled": of(compiled, fp8=None),
        "transformers, compiled, torchao tensorwise": of(compiled, fp8="tensorwise"),
        "transformers, compiled, torchao rowwise": of(compiled, fp8="rowwise"),
        "Transformer Engine, bf16": of(engine, recipe=None),
        "Transformer Engine, fp8 current": of(engine, recipe="Float8CurrentScaling"),
    }
    ours = {"this framework": "", "this framework, fp8 tensorwise": fp8_flags("tensorwise")}
    seconds = run_seconds(f"{SLICE_8B} --global-batch-size 1", WARM + TIMED)
    return [
        *(Case(name, of(framework, setting, flags), seconds) for name, flags in ours.items()),
        *(
            Case(name, of(measure, setting, peer), seconds + (INDUCTOR_SECONDS if "compiled" in name else 0.0))
            for name, peer in peers.items()
        ),
    ]


def shape(setting: Setting) -> str:
    """Returns the flags of the model, with one microbatch per step."""
    return f"{TOY_FP8 if setting.toy else SLICE_8B} --bf16 --global-batch-size 1"


def framework(setting: Setting, flags: str) -> Result:
    """The framework with one microbatch per step, in fp32 masters, moments and gradients."""
    needs(setting, flags)
    speed = measure_speed(f"{shape(setting)} {flags}", setting, start(setting), WARM, TIMED)
    return Result(described(speed), {"tflops": speed.tflops, "ms": speed.step.ms, "spread": speed.step.spread})


def measure(setting: Setting, made: Callable[[Setting, RunConfig], Peer]) -> Result:
    """Trains a peer with torch's fused AdamW, and measures its steps like those of the framework."""
    run = configured(shape(setting), setting)
    torch.manual_seed(1)
    meter = Peak(setting)
    peer = made(setting, run)
    optimizer = torch.optim.AdamW(peer.module.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    assert run.data.seq_length and run.model.vocab_size
    length, tokens = run.data.seq_length, run.data.seq_length
    ids = torch.randint(run.model.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device_of(setting))

    def step() -> float:
        loss = peer.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    for _ in range(WARM):
        loss = step()
    meter.reset()
    ms = []
    for _ in range(TIMED):
        begun = time.perf_counter()
        loss = step()
        if setting.cuda:
            torch.cuda.synchronize()
        ms.append(1e3 * (time.perf_counter() - begun))
    timing = combine([ms[: TIMED // 2], ms[TIMED // 2 :]])
    speed = Speed(timing, timing.rate(tokens), timing.rate(step_flops(run, 1)) / 1e12, meter.bytes(), loss)
    values: dict[str, Any] = {"tflops": speed.tflops, "ms": timing.ms, "spread": timing.spread, "peak": speed.peak}
    return Result(described(speed), values)


def transformers(setting: Setting, run: RunConfig, *, compiled: bool, fp8: str | None) -> Peer:
    """transformers' Llama in bf16 with SDPA; its linear layers, but not the head, in torchao's fp8. Raises
    MissingError."""
    library, model = package("transformers"), run.model
    config = library.LlamaConfig(
        vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=model.ffn_dim,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_kv_heads, max_position_embeddings=run.data.seq_length,
        tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    ao = package("torchao.float8") if fp8 is not None else None
    with device_of(setting):  # the CPU would take long to draw the weights
        module = library.LlamaForCausalLM(config).to(torch.bfloat16)
    if ao is not None:
        recipe = ao.Float8LinearConfig.from_recipe_name(fp8)
        ao.convert_to_float8_training(module, config=recipe, module_filter_fn=lambda _, name: name != "lm_head")

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return module(input_ids=tokens, labels=labels, shift_labels=labels).loss

    # On the CPU the graph is traced and not compiled: a compiler would take longer than the whole dry run.
    return Peer(module, torch.compile(loss, backend="aot_eager" if setting.toy else "inductor") if compiled else loss)


class EngineDecoder(nn.Module):
    """A Llama of Transformer Engine's layers."""

    def __init__(self, te: Any, run: RunConfig) -> None:
        super().__init__()
        model = run.model
        assert model.num_layers and model.hidden_size and model.vocab_size
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size, **bf16)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                model.hidden_size, model.ffn_dim, model.num_attention_heads, num_gqa_groups=model.num_kv_heads,
                layernorm_epsilon=1e-5, hidden_dropout=0.0, attention_dropout=0.0, bias=False, activation="swiglu",
                normalization="RMSNorm", self_attn_mask_type="causal", params_dtype=torch.bfloat16,
                fuse_qkv_params=True, attn_input_format="bshd",
            )
            for _ in range(model.num_layers)
        )  # fmt: skip
        self.norm = te.RMSNorm(model.hidden_size, eps=1e-5, **bf16)
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False, **bf16)
        channels = model.hidden_size // (model.num_attention_heads or 1)
        self.rotary = te.RotaryPositionEmbedding(channels, rotary_base=model.rotary_base)


def transformer_engine(setting: Setting, run: RunConfig, *, recipe: str | None) -> Peer:
    """Transformer Engine's layers between torch's embedding and head. Raises MissingError."""
    te = package("transformer_engine.pytorch")
    recipes = package("transformer_engine.common.recipe")
    setting.needs_cuda("Transformer Engine")
    module = EngineDecoder(te, run)
    chosen = None if recipe is None else getattr(recipes, recipe)()
    rotary = module.rotary(run.data.seq_length).to("cuda")

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = module.embedding(tokens)
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            for layer in module.layers:
                hidden = layer(hidden, rotary_pos_emb=rotary)
        logits = module.head(module.norm(hidden))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return Peer(module, loss)
