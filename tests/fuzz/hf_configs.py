"""Random configurations of the Hugging Face families that are converted, sound and malformed ones.

Each is written as a folder of random weights and read by transformers and by this program. Either both compute the same
logits in fp32, and the folder that is exported again has the same bytes and a config.json that means the same to
transformers; or this program refuses it with one line that names the file. Not both, and never anything else.
`python -m tests.fuzz.hf_configs --seed S --cases N`
"""

from __future__ import annotations

import json
import random
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from megatron.base.errors import UserError
from megatron.config.data import TokenizerConfig
from megatron.conversion.convert import to_checkpoint, to_hf
from megatron.core.models.hf.families import read_config
from megatron.training.export import CheckpointSource
from tests.fuzz.campaign import Campaign, Failure, main
from tests.fuzz.hf_expert_fields import EXPERT_DRAWS, LATENT
from tests.fuzz.hf_fields import DRAWS, GPT, SQUARE, of_gpt, with_alpha
from tests.unit.models.hf_models import attention_of, random_model
from tests.unit.models.test_hf_conversion import load, logits_of

LENGTH = 24
LIMIT = 1e-4  # of the largest logit: rounding reaches 2e-5 in narrow models with large weights
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
STACKED = (
    *EXPERTS,
    "dots1",
    "solar_open",
    "flex_olmo",
    "granitemoe",
    "granitemoeshared",
    "gpt_oss",
    "gpt_neox",
    *EXPERT_DRAWS,
)  # in memory
SUBSETS = (
    "qwen3_5_moe_text",
    "hy_v3",
    "codegen",
    "exaone_moe",
)  # models of another family, too, which is written without the folder
GEMMAS = ("gemma2", "gemma3_text", "vaultgemma")
SCALING_KINDS = ("type", "rope_type")
ALL_DRAWS = DRAWS | EXPERT_DRAWS
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", *GEMMAS, "phi3", *EXPERTS, *GPT)
FAMILIES += tuple(ALL_DRAWS)


@dataclass(frozen=True)
class Case:
    """The text of a config.json, and the seed of its weights. `odd`: a field that was spoilt."""

    config: str
    seed: int
    odd: str | None = None


def draw(rng: random.Random) -> Case:
    """A configuration of one family; one in three has a field that is unusual, wrong or left out."""
    fields = _sound(rng)
    size = fields["hidden_size"] // fields["num_attention_heads"] if "hidden_size" in fields else 4
    has_two_channels = 2 in (fields.get("head_dim"), size)
    odd = _spoil(rng, fields) if rng.random() < 0.35 else None
    text = json.dumps(fields)
    if has_two_channels:  # transformers divides by the size of a head - 2
        text = text.replace('"dynamic"', '"linear"')
    return Case(text, rng.randrange(100), odd)


def _sound(rng: random.Random, family: str | None = None) -> dict[str, Any]:
    family = rng.choice(FAMILIES) if family is None else family
    groups = rng.choice((1, 2, 3, 4))
    heads = groups * rng.choice((1, 2, 3, 4))
    head_dim = rng.choice((2, 4, 6, 8, 10, 16))
    layers = rng.randint(1, 4)
    fields: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": heads * rng.choice((2, 4, 5, 8)),
        "intermediate_size": rng.randint(1, 70),
        "vocab_size": rng.randint(3, 150),
        "max_position_embeddings": rng.choice((32, 64, 100, 2048)),
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-8, 1e-2, 1.0)),
        "tie_word_embeddings": rng.random() < 0.4,
        "hidden_act": "silu",
        "initializer_range": rng.choice((0.02, 0.2, 0.5)),
        "bos_token_id": 1,
        "eos_token_id": rng.choice((2, [1, 2])),
        rng.choice(("torch_dtype", "dtype")): "float32",
    }
    # A Mixtral without it and with YaRN is an error of transformers.
    if family in ("qwen3", "mixtral") or fields["hidden_size"] // heads % 2 or rng.random() < 0.4:
        fields["head_dim"] = head_dim
    if family in LATENT:
        fields["num_key_value_heads"] = heads
        fields.pop("head_dim", None)
    if family in GEMMAS:
        fields |= _gemma(rng, layers)
    if family in GPT:
        return of_gpt(rng, fields)
    if family in SQUARE:
        fields.pop("head_dim", None)
        fields["hidden_size"] = heads * rng.choice((8, 12))
    if family in ALL_DRAWS:
        fields |= {"pad_token_id": None, **ALL_DRAWS[family](rng, layers, fields["hidden_size"] // heads)}
    if family == "granite":
        fields |= {
            "embedding_multiplier": rng.choice((1, 12.0, 0.3)),
            "attention_multiplier": rng.choice((1, 0.25, 0.015625)),
            "residual_multiplier": rng.choice((1.0, 0.22, 2)),
            "logits_scaling": rng.choice((1.0, 6, 16.0, 0.7)),
        }
    if family in ("llama", "granite", "smollm3"):
        fields |= {name: rng.random() < 0.5 for name in ("attention_bias", "mlp_bias") if rng.random() < 0.6}
    if family in ("qwen3", "qwen3_moe", "olmo2", "olmoe", *GEMMAS) and rng.random() < 0.4:
        fields["attention_bias"] = rng.random() < 0.7
    if family == "mistral":
        fields["sliding_window"] = rng.choice((None, 1, 2, 7, LENGTH, 4096))
    if family in ("qwen2", "qwen3"):
        fields |= _windows(rng, layers)
    if family in EXPERTS:
        fields |= _experts(rng, family, layers)
    if family == "olmoe":
        fields.pop("head_dim", None)
        fields["hidden_size"] = heads * rng.choice((2, 4, 6, 10))
    if family == "phi3":
        return _phi3(rng, fields)
    if family == "gemma3_text":
        fields.pop("attn_logit_softcapping", None)
        return fields | _two_rotary_embeddings(rng, fields["max_position_embeddings"])
    if family == "mellum":
        two = _two_rotary_embeddings(rng, fields["max_position_embeddings"], names=("rope_type",))
        return fields | {name: value for name, value in two.items() if name == "rope_parameters"}
    if family == "olmo3":
        two = _two_rotary_embeddings(rng, fields["max_position_embeddings"], names=("rope_type",))
        return fields | {name: value for name, value in two.items() if name != "rope_local_base_freq"}
    if family == "bloom":
        return fields
    fields |= _rotary(rng, fields["max_position_embeddings"])
    if family in ("ministral3", "mistral4"):
        return fields | _queries_by_position(rng, fields["max_position_embeddings"])
    if family == "gpt_neox":
        fields["rotary_emb_base"] = fields.pop("rope_theta", None) or 10000
    if family.startswith("hunyuan") and fields["hidden_size"] // heads > 2:
        return with_alpha(rng, fields)
    return fields


def _gemma(rng: random.Random, layers: int) -> dict[str, Any]:
    kinds = [rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": rng.choice((2, 4, 6, 16)),
        "query_pre_attn_scalar": rng.choice((1, 4, 7, 144, 256)),
        **rng.choice(({}, {"attn_logit_softcapping": rng.choice((None, 0.5, 2.0, 50.0))})),
        **rng.choice(({}, {"final_logit_softcapping": rng.choice((None, 0.5, 2.0, 30.0))})),
        **rng.choice(({}, {"sliding_window": rng.choice((1, 5, LENGTH, 4096))})),
        **rng.choice(({}, {"layer_types": kinds})),
    }


def _experts(rng: random.Random, family: str, layers: int) -> dict[str, Any]:
    experts = rng.randint(1, 9)
    name = "num_experts" if family == "qwen2_moe" else rng.choice(("num_experts", "num_local_experts"))
    fields: dict[str, Any] = {name: experts, "num_experts_per_tok": rng.randint(1, min(experts, 4))}
    if family == "mixtral":
        return fields | rng.choice(({}, {"sliding_window": rng.choice((None, 1, 7, 4096))}))
    fields |= rng.choice(({}, {"norm_topk_prob": rng.random() < 0.5}))
    if family == "olmoe":
        return fields | rng.choice(({}, {"clip_qkv": None}, {"clip_qkv": 0.5}))
    fields |= {"moe_intermediate_size": rng.randint(1, 30)}
    fields |= rng.choice(({}, {"decoder_sparse_step": rng.randint(1, 3)}))
    fields |= rng.choice(({}, {"mlp_only_layers": rng.sample(range(layers + 1), rng.randint(0, layers))}))
    if family == "qwen3_moe":
        window = {"use_sliding_window": True, "sliding_window": rng.choice((None, 1, 5, LENGTH))}
        return fields | rng.choice(({}, window, {**window, "use_sliding_window": False, "max_window_layers": 2}))
    kinds = [rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
    window = {"use_sliding_window": True, "sliding_window": rng.randint(1, LENGTH), "layer_types": kinds}
    fields |= rng.choice(({}, {"qkv_bias": rng.random() < 0.5}))
    fields |= {"shared_expert_intermediate_size": rng.randint(1, 40)}
    return fields | rng.choice(({}, window, {"use_sliding_window": False, "sliding_window": 0}))


def _phi3(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """With LongRoPE or a part of each head rotated: without either it is written as a Mistral, whose tensors differ."""
    fields.pop("head_dim", None)
    head_dim, part = rng.choice(((2, 1), (4, 1), (4, 0.5), (8, 1.0), (8, 0.25), (8, 0.75), (16, 0.5)))
    pairs = int(head_dim * part) // 2
    fields |= {
        "hidden_size": fields["num_attention_heads"] * head_dim,
        "pad_token_id": rng.choice((None, 0)),
        "sliding_window": rng.choice((None, 2, 7, LENGTH, 4096)),
    }
    lists = {
        name: [rng.choice((1, 1.0, 1.25, 7.5, 60.1)) for _ in range(pairs)] for name in ("short_factor", "long_factor")
    }
    scaling: dict[str, Any] = {rng.choice(("type", "rope_type")): rng.choice(("longrope", "longrope", "yarn")), **lists}
    if rng.random() < 0.3:
        scaling["attention_factor"] = rng.choice((1.0, 1.19, 2))
    if rng.random() < 0.3:
        scaling["factor"] = rng.choice((1, 4.0, 32))
    if rng.random() < 0.8:
        fields["original_max_position_embeddings"] = rng.choice((2, 8, LENGTH - 1, LENGTH, 4096))
    if part < 1 and rng.random() < 0.3:
        return fields | {"partial_rotary_factor": part}
    if rng.random() < 0.5:
        return fields | {"rope_scaling": scaling, "rope_theta": 10000.0, "partial_rotary_factor": part}
    return fields | {"rope_parameters": {**scaling, "rope_theta": 500000.0, "partial_rotary_factor": part}}


def _windows(rng: random.Random, layers: int) -> dict[str, Any]:
    kinds = [rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
    return rng.choice(
        (
            {},
            {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1},
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": rng.randint(0, layers + 1)},
            {"use_sliding_window": True, "sliding_window": rng.randint(1, LENGTH), "layer_types": kinds},
            {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        )
    )


def _rotary(rng: random.Random, context: int) -> dict[str, Any]:
    """`rope_parameters` of newer versions, `rope_scaling` of older ones, or both."""
    theta = rng.choice((10000, 10000.0, 500000.0, 1e6, 5.0))
    spellings = [_scaling(rng, context) for _ in range(2)]
    if rng.random() < 0.5:
        return {"rope_theta": theta, "rope_scaling": spellings[0]}
    new = spellings[0] or {"rope_type": "default"}
    fields: dict[str, Any] = {"rope_parameters": new | ({"rope_theta": theta} if rng.random() < 0.8 else {})}
    if rng.random() < 0.2:
        fields |= {"rope_scaling": spellings[1], "rope_theta": 777.0}
    return fields


def _queries_by_position(rng: random.Random, context: int) -> dict[str, Any]:
    """YaRN, with the factor of late queries."""
    scaling = {
        "rope_type": "yarn",
        "rope_theta": rng.choice((1e4, 1e6)),
        "factor": rng.choice((1.0, 4.0, 16)),
        "original_max_position_embeddings": rng.choice((3, 8, 64)),
        "llama_4_scaling_beta": rng.choice((0.1, 1.0)),
        **rng.choice(({}, {"max_position_embeddings": context})),
        **rng.choice(({}, {"mscale": 1.0, "mscale_all_dim": 1.0})),
    }
    return {"rope_parameters": scaling, "rope_scaling": None, "rope_theta": None}


def _two_rotary_embeddings(rng: random.Random, context: int, names: tuple[str, ...] = SCALING_KINDS) -> dict[str, Any]:
    """That of layers without a window, with a scaling or without, and that of layers with one; or none of them."""
    scaling = _scaling(rng, context, names)
    if rng.random() < 0.5:
        fields: dict[str, Any] = {"rope_theta": rng.choice((10000.0, 1000000)), "rope_scaling": scaling}
        return fields | rng.choice(({}, {"rope_local_base_freq": rng.choice((10000, 500.0))}))
    whole = (scaling or {"rope_type": "default"}) | rng.choice(({}, {"rope_theta": 1e6}))
    sliding = {"rope_type": "default"} | rng.choice(({}, {"rope_theta": rng.choice((10000.0, 77.0))}))
    return rng.choice(({}, {"rope_parameters": {"full_attention": whole, "sliding_attention": sliding}}))


def _scaling(rng: random.Random, context: int, names: tuple[str, ...] = SCALING_KINDS) -> dict[str, Any] | None:
    """`names`: those of its kind."""
    kind, key = rng.choice(("default", "linear", "llama3", "dynamic", "yarn", "yarn")), rng.choice(names)
    original = rng.choice((1, 8, 16, 31, 10**6))
    factor = rng.choice((1, 1.0, 2, 4.0, 7.5, 32.0))
    if kind == "default":
        return None
    if kind in ("linear", "dynamic"):
        return {key: kind, "factor": factor}
    scaling: dict[str, Any] = {key: kind, "factor": factor}
    if rng.random() < 0.8:
        scaling["original_max_position_embeddings"] = original
    if kind == "llama3":
        low, high = rng.choice(((1.0, 4.0), (1, 4), (0.5, 8.0), (3.0, 3.5)))
        return scaling | {"low_freq_factor": low, "high_freq_factor": high}
    for name, values in {
        "beta_fast": (32, 32.0, 8.0, 1.5),
        "beta_slow": (1, 1.0, 0.25),
        "attention_factor": (1.0, 0.5, 1.3),
        "mscale": (1.0, 0.707),
        "mscale_all_dim": (1.0, 0.5),
        "truncate": (True, False),
    }.items():
        if rng.random() < 0.25:
            scaling[name] = rng.choice(values)
    return scaling


WRONG = (0, -1, 1, 3, 7, 2.5, "8", True, None, [], {}, 1e30, float("nan"), "sliding_attention")
EXTRA = ["logit_scale", "partial_rotary_factor", "attention_multiplier", "use_mrope", "rope_interleaved", "rotary_pct"]
EXTRA += ["original_max_position_embeddings", "sliding_window", "layer_types", "attention_bias", "mlp_bias", "head_dim"]
EXTRA += ["quantization_config", "use_cache", "max_sequence_length", "num_experts", "pretraining_tp"]
EXTRA += ["num_local_experts", "norm_topk_prob", "clip_qkv", "mlp_only_layers", "router_jitter_noise"]
DELETE = object()
# Of these transformers has defaults of a size that no test should make.
KEPT = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
KEPT += ("num_experts", "num_local_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
KEPT += ("n_layer", "n_embd", "n_inner", "n_head", "n_positions")
KEPT += ("n_routed_experts", "n_shared_experts")


def _spoil(rng: random.Random, fields: dict[str, Any]) -> str:
    """Give one field, or one of a scaling's, a value that may be wrong, or take it away, or add one; return its
    name."""
    places = [fields, *(fields[name] for name in ("rope_scaling", "rope_parameters") if fields.get(name))]
    place = rng.choice(places)
    name = rng.choice([*place, *EXTRA] if place is fields else [*place, "partial_rotary_factor", "short_factor"])
    if name == "model_type":
        name = "vocab_size"
    value = rng.choice((*WRONG, DELETE, DELETE))
    if value is DELETE and name not in KEPT:
        place.pop(name, None)
    elif value is not DELETE:
        place[name] = value
    return str(name)


@torch.no_grad()
def check(case: Case, folder: Path) -> str:
    """ "same" or "refused"; "only here": this program reads what transformers does not, such as a null for a
    default."""
    hf_logging.set_verbosity_error()
    source = folder / "hf"
    source.mkdir()
    (source / "config.json").write_text(case.config)
    theirs = _theirs(source, case.seed)
    if theirs is None:
        if case.odd is None:
            raise Failure("transformers does not take what was meant to be sound")
        return _ours_alone(source, case)
    tensors = dict(theirs.state_dict())
    if theirs.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    if theirs.config.model_type in STACKED:
        # The tensors of the state stack the experts, or have other names. Those of the hub are read one time in two,
        # and always written.
        theirs.save_pretrained(folder / "hub")
        tensors = load_file(folder / "hub/model.safetensors")
        if case.seed % 2:
            save_file(tensors, source / "model.safetensors", {"format": "pt"})
    try:
        ours, read = load(source)
    except UserError as error:
        return _refused(error, case)
    tokens = torch.randint(0, theirs.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    expected = theirs(tokens).logits
    _same_logits(logits_of(ours, tokens, theirs.config.vocab_size), expected, "ours")
    nothing = TokenizerConfig()
    to_checkpoint(read, folder / "ours", dtype=torch.float32, tokenizer=nothing)
    base = str(source) if theirs.config.model_type in SUBSETS else None
    to_hf(
        CheckpointSource(folder / "ours/iter_0000000"),
        folder / "back",
        dtype=torch.float32,
        tokenizer=nothing,
        base=base,
    )
    back = load_file(folder / "back/model.safetensors")
    if back.keys() != tensors.keys() or any(
        not torch.equal(*(side.reshape(-1).view(torch.uint8) for side in (tensor, back[name])))
        for name, tensor in tensors.items()
    ):
        raise Failure("the exported weights differ")
    again = AutoModelForCausalLM.from_pretrained(
        folder / "back", attn_implementation=attention_of(theirs.config.model_type), experts_implementation="eager"
    )
    _same_logits(again(tokens).logits, expected, "the exported folder's")
    for name in ("rms_norm_eps", "max_position_embeddings", "vocab_size", "initializer_range", "tie_word_embeddings"):
        now, before = (getattr(config, name, None) for config in (again.config, theirs.config))
        if now != before:
            raise Failure(f"exported {name} is {now}, was {before}")
    return "same"


def _theirs(folder: Path, seed: int) -> Any:
    """The model that transformers makes of config.json, with random weights; None when it cannot."""
    try:
        config = AutoConfig.from_pretrained(folder)
        config._attn_implementation = attention_of(config.model_type)
        config._experts_implementation = "eager"
        with torch.random.fork_rng():
            model = random_model(AutoModelForCausalLM._model_mapping[type(config)], config, seed)
        model(torch.zeros(1, LENGTH, dtype=torch.long))
    except Exception:  # whatever a wrong value makes of it
        return None
    return model


def _ours_alone(folder: Path, case: Case) -> str:
    try:
        read_config(folder)
    except UserError as error:
        return _refused(error, case)
    return "only here"


def _refused(error: UserError, case: Case) -> str:
    message = str(error)
    if case.odd is None:
        raise Failure(f"refused what was meant to be sound: {message}")
    if "\n" in message or "config.json" not in message or len(message) > 600:
        raise Failure(f"refused without a clear line: {message}")
    return "refused"


def _same_logits(found: torch.Tensor, expected: torch.Tensor, whose: str) -> None:
    if not expected.isfinite().all():
        raise Failure("transformers computes logits that are not finite, and this program takes the model")
    off = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    if not off <= LIMIT:
        raise Failure(f"{whose} logits are off by {off:.1e} of the largest")


def simpler(case: Case) -> Iterator[Case]:
    """Without a field, and without a field of its scaling."""
    fields = json.loads(case.config)
    for name, value in fields.items():
        if name not in KEPT:
            yield replace(case, config=json.dumps(_without(fields, name)))
        for key in value if isinstance(value, dict) else ():
            yield replace(case, config=json.dumps(fields | {name: _without(value, key)}))


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def command(case: Case) -> str:
    """Just this case, however it was shrunk."""
    return f"python -m tests.fuzz.hf_configs --config {shlex.quote(case.config)} --weights {case.seed}"


def see(config: str, seed: int) -> None:
    """Run one configuration and print what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        print(check(Case(config, seed, "unknown"), Path(folder)))


CAMPAIGN = Campaign("hf_configs", draw, check, simpler, command)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--config"]:
        see(sys.argv[2], int(sys.argv[4]))
    else:
        main(CAMPAIGN)
