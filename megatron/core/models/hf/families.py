"""Reads and writes the config.json of the supported families, each of which is a table in family/."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.read_file import read_json
from megatron.config.interval import AT_LEAST_ONE, BELOW_ONE, NOT_NEGATIVE, POSITIVE, Interval
from megatron.config.latent_attention import LatentAttentionModel
from megatron.config.model import PADDING_FIELDS, RUNTIME_FIELDS, ModelConfig
from megatron.core.models.carried import CarriedTensors
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.apertus import APERTUS
from megatron.core.models.hf.family.bloom import BLOOM
from megatron.core.models.hf.family.cohere import COHERE, COHERE2
from megatron.core.models.hf.family.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, KIMI_K2, YOUTU
from megatron.core.models.hf.family.dots1 import DOTS1, SOLAR_OPEN
from megatron.core.models.hf.family.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE, HELIUM
from megatron.core.models.hf.family.exaone4 import EXAONE4, EXAONE_MOE
from megatron.core.models.hf.family.falcon import FALCON
from megatron.core.models.hf.family.family import GELU_TANH, NO_FIELD, SILU, SQUARED_RELU, XIELU, Family
from megatron.core.models.hf.family.gemma import GEMMA
from megatron.core.models.hf.family.gemma2 import GEMMA2, VAULTGEMMA
from megatron.core.models.hf.family.gemma3 import GEMMA3
from megatron.core.models.hf.family.glm import GLM, GLM4
from megatron.core.models.hf.family.glm4_moe import GLM4_MOE
from megatron.core.models.hf.family.gpt2 import GPT2, GPT_BIGCODE
from megatron.core.models.hf.family.gpt_neox import GPT_NEOX
from megatron.core.models.hf.family.gpt_oss import GPT_OSS
from megatron.core.models.hf.family.gptj import CODEGEN, GPTJ
from megatron.core.models.hf.family.granite import GRANITE, GRANITEMOE, GRANITEMOESHARED, HYPERCLOVAX, MINICPM
from megatron.core.models.hf.family.granite_swa import GRANITE_SWA, GRANITEMOE_SWA
from megatron.core.models.hf.family.hunyuan import HUNYUAN, HUNYUAN_MOE
from megatron.core.models.hf.family.hy_v3 import HY_V3
from megatron.core.models.hf.family.indexed import DEEPSEEK_V32, GLM_MOE_DSA
from megatron.core.models.hf.family.kimi_linear import KIMI_LINEAR
from megatron.core.models.hf.family.llama import BAICHUAN, CWM, INTERNLM3, IQUESTCODER, LLAMA, MINISTRAL, MISTRAL
from megatron.core.models.hf.family.mellum import MELLUM
from megatron.core.models.hf.family.minimax_m2 import MINIMAX_M2
from megatron.core.models.hf.family.ministral3 import MINISTRAL3, MISTRAL4
from megatron.core.models.hf.family.mixtral import MIXTRAL
from megatron.core.models.hf.family.mpt import MPT
from megatron.core.models.hf.family.nanochat import NANOCHAT
from megatron.core.models.hf.family.nemotron import ARCEE, JAIS2, NEMOTRON
from megatron.core.models.hf.family.olmo import OLMO
from megatron.core.models.hf.family.olmo2 import OLMO2, OLMO3
from megatron.core.models.hf.family.olmoe import FLEX_OLMO, OLMOE
from megatron.core.models.hf.family.phi import PERSIMMON, PHI
from megatron.core.models.hf.family.phi3 import PHI3
from megatron.core.models.hf.family.qwen import QWEN2, QWEN3
from megatron.core.models.hf.family.qwen_delta import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from megatron.core.models.hf.family.qwen_moe import QWEN2_MOE, QWEN3_MOE
from megatron.core.models.hf.family.refused import REFUSED
from megatron.core.models.hf.family.seed_oss import SEED_OSS
from megatron.core.models.hf.family.smollm3 import SMOLLM3
from megatron.core.models.hf.family.stablelm import STABLELM
from megatron.core.models.hf.family.starcoder2 import STARCODER2
from megatron.core.models.hf.fp8 import QUANTIZATION, Scaling, parse_scaling
from megatron.core.models.hf.rotary import read_rotary, write_rotary

CONFIG_FILE = "config.json"
# Models whose `text_config` is a decoder of a supported family, and whose other parts are for images alone.
WITH_IMAGES = ("mistral3", "llava", "llava_next", "gemma3", "qwen3_5", "qwen3_5_moe")
# Much larger than any model: lists of layers are made before the weights are checked.
_LAYERS = Interval("from 1 to 100000", lambda x: 1 <= x <= 100_000)


def read_config(folder: Path) -> tuple[Family, ModelConfig]:
    """Returns the family and the model that `folder`/config.json describes. No communication. Raises CheckpointError.

    Precision, kernels and dropout of hidden states are not in the file: they have their defaults, dropout is 0. Of a
    model that also sees images it is the language model, which text alone does not tell from a model of its own.
    """
    return _parse(config_of(folder), folder / CONFIG_FILE)


def read_scaling(folder: Path) -> Scaling | None:
    """Returns how the FP8 weights of `folder` are scaled; None if its config.json says nothing about it.

    No communication. Raises CheckpointError, see parse_scaling.
    """
    return parse_scaling(JsonFields(config_of(folder), str(folder / CONFIG_FILE)))


def parse_config(family: Family, values: dict[str, Any], where: str) -> ModelConfig:
    """Returns the model that the content of a config.json describes. Raises CheckpointError naming unknown fields."""
    newer = {family.older.get(name, name): value for name, value in values.items()}
    fields = JsonFields(newer, where, family.fields)
    parse_scaling(fields)  # which numbers the weights are, not which model
    common = _read_common(fields, where, family)
    settings = {**common, **family.read(fields, common)}
    fields.finish()
    return ModelConfig(**settings)


def write_config(
    model: ModelConfig, like: Path | None = None, carried: CarriedTensors | None = None
) -> tuple[Family, dict[str, Any]]:
    """Returns a family that can represent a model, and its config.json without token ids. Raises ConfigError if none
    can.

    `like` is a folder whose config.json is used instead if it describes the same model, because it has more
    information, such as token ids. So is that of `carried`, with a model for images if its tensors are there.
    """
    configs = [] if carried is None or not carried.tensors else [(dict(carried.config), bool(carried.prefix))]
    like_config = None if like is None else _config_if_there(like)
    configs += [] if like_config is None else [(like_config, False)]
    for config, has_images in configs:
        described = _parse_if_known(config)
        if described is not None and described[0].write is not None and _maths(described[1]) == _maths(model):
            # What is written has no FP8 weights, whatever that folder has.
            values = config if has_images else _decoder_values(config)
            predicted = {"num_nextn_predict_layers": model.mtp_num_layers} if model.mtp_num_layers else {}
            fields = {name: value for name, value in values.items() if name != QUANTIZATION}
            return described[0], fields | (predicted if described[0].predicts else {})
    nearest: tuple[list[str], Family] | None = None
    for family in _families_for(model):
        values = _written(family, model)
        different = _differences(family, values, model)
        if different == []:
            return family, values
        if different is not None and (nearest is None or len(different) < len(nearest[0])):
            nearest = different, family
    lacks = "" if nearest is None else f": {nearest[1].model_type}, the nearest, has no {', '.join(nearest[0])}"
    raise ConfigError(f"no supported Hugging Face family describes the model, which is therefore not written{lacks}")


def _written(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The config.json with which this family comes nearest to a model."""
    assert family.write is not None
    values = {"architectures": [family.architecture], "model_type": family.model_type, "torch_dtype": model.dtype_name}
    common = _write_common(model, family)
    if family.width == 0 and not model.uses_ffn_dim:
        del common["intermediate_size"]
    fields = {family.fields.get(name, name): value for name, value in (common | family.write(model)).items()}
    fields.pop(NO_FIELD, None)
    return values | fields


def _differences(family: Family, values: dict[str, Any], model: ModelConfig) -> list[str] | None:
    """The fields, with the model's values, in which a config.json describes another model; None if no model has it."""
    wanted = _maths(model)
    try:
        stored = _maths(parse_config(family, values, family.model_type))
    except (CheckpointError, ConfigError):
        return None
    return [f"{name} {value}" for name, value in wanted.items() if name not in stored or value != stored[name]]


def base_family(model: ModelConfig, base: Path | None) -> Family:
    """Returns the family of the folder `base` if it describes this model, else the one that `write_config` takes.

    Its modules are those that adapters of the model are for, also where the family's whole models are not written.
    Raises ConfigError, see `write_config`.
    """
    config = None if base is None else _config_if_there(base)
    described = None if config is None else _parse_if_known(config)
    if described is not None and _maths(described[1]) == _maths(model):
        return described[0]
    return write_config(model)[0]


def config_of(folder: Path) -> dict[str, Any]:
    """Returns the content of `folder`/config.json. Raises CheckpointError."""
    path = folder / CONFIG_FILE
    try:
        values = read_json(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not there; give a folder in Hugging Face format: config.json and *.safetensors"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return values


def has_images(folder: Path) -> bool:
    """Returns whether the folder holds a model of WITH_IMAGES, a language model beside others. Raises
    CheckpointError."""
    return config_of(folder).get("model_type") in WITH_IMAGES


def layers_for_prediction(folder: Path) -> int:
    """Returns the number of layers behind the last one that predict further tokens, according to config.json, which
    the folder need not hold. Raises CheckpointError."""
    number = _decoder_values(config_of(folder)).get("num_nextn_predict_layers")
    return number if isinstance(number, int) else 0


def _decoder_values(values: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json, or the part of it that describes the language model."""
    inner = values.get("text_config")
    if values.get("model_type") not in WITH_IMAGES or not isinstance(inner, dict):
        return values
    # What holds for the whole model stands outside.
    names = ("tie_word_embeddings", QUANTIZATION, *(name for name in ("dtype", "torch_dtype") if name not in inner))
    kind = inner.get("model_type")
    sizes = FAMILIES[kind].sizes if isinstance(kind, str) and kind in FAMILIES else {}
    return {**sizes, **inner} | {name: values[name] for name in names if name in values}


def _parse(config: dict[str, Any], path: Path) -> tuple[Family, ModelConfig]:
    """The family and the model that the content of a config.json describes; `path` is for messages."""
    values = _decoder_values(config)
    kind = values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        reason = f": {REFUSED[kind]}" if isinstance(kind, str) and kind in REFUSED else ""
        raise CheckpointError(f"{path}: model_type {kind!r} is not supported{reason}; {', '.join(FAMILIES)} are")
    return family, parse_config(family, values, str(path))


def _parse_if_known(config: dict[str, Any]) -> tuple[Family, ModelConfig] | None:
    """`_parse`, or None for an unsupported config.json, which therefore describes another model."""
    try:
        return _parse(config, Path(CONFIG_FILE))
    except CheckpointError:
        return None


def _config_if_there(folder: Path) -> dict[str, Any] | None:
    """`config_of`, or None for a file that is missing or cannot be read."""
    try:
        return config_of(folder)
    except CheckpointError:
        return None


def _read_common(fields: JsonFields, where: str, family: Family) -> dict[str, Any]:
    """Returns the fields of all families. The defaults are those of a file without the field; None: derived."""
    heads, hidden = fields.integer("num_attention_heads", AT_LEAST_ONE), fields.integer("hidden_size", AT_LEAST_ONE)
    groups = fields.optional_integer("num_key_value_heads", AT_LEAST_ONE)
    if groups is None:
        groups = heads if fields.has("num_key_value_heads") else family.groups or heads
    if heads % groups:
        raise fields.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    head_dim = fields.optional_integer("head_dim", AT_LEAST_ONE) or family.head_dim
    if head_dim is None and hidden % heads:
        raise fields.error(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim"
        )
    size = head_dim or hidden // heads
    if size % 2:
        raise fields.error(f"head_dim is {size}; rotary embeddings need an even one")
    # The first conversions of Llama 1 have only the other name, some later ones both.
    newer = fields.take("max_position_embeddings", int, None)
    older = fields.has("max_sequence_length") and newer is None
    context = fields.integer(
        "max_sequence_length" if older else "max_position_embeddings",
        AT_LEAST_ONE,
        *(() if family.context is None else (family.context,)),
    )
    fields.only("hidden_act", family.activation, *family.spellings)
    if family.width == 0:
        width = fields.optional_integer("intermediate_size", AT_LEAST_ONE)
    else:
        width = fields.integer("intermediate_size", AT_LEAST_ONE, *(() if family.width is None else (family.width,)))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields.take(name, (int, list), None)
    return {
        "num_layers": fields.integer("num_hidden_layers", _LAYERS),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "kv_channels": head_dim,
        "ffn_hidden_size": width,
        "vocab_size": fields.integer("vocab_size", AT_LEAST_ONE),
        "max_position_embeddings": context,
        "norm_epsilon": fields.number("rms_norm_eps", POSITIVE, family.epsilon),
        "init_method_std": fields.number("initializer_range", NOT_NEGATIVE, family.std),
        "attention_dropout": fields.number("attention_dropout", BELOW_ONE, 0.0),
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", bool, family.tied),
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "swiglu": family.activation == SILU,
        "geglu": family.gated and family.activation == GELU_TANH,
        "openai_gelu": family.activation == GELU_TANH,
        "squared_relu": family.activation == SQUARED_RELU,
        "xielu": family.activation == XIELU,
        "add_bias_linear": False,
        **read_rotary(
            fields,
            where,
            default_theta=family.theta,
            default_percent=family.percent,
            default_original=family.original,
            default_local_theta=family.local_theta,
            context=context,
            alpha_channels=size if family.scales_by_alpha else None,
            scales_queries=family.scales_queries,
            unread=family.rope_of_images,
        ),
    }


def _write_common(model: ModelConfig, family: Family) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "hidden_act": family.activation,
        "use_cache": True,
        **write_rotary(model),
    }


DENSE = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GLM, GLM4, GRANITE, OLMO2, GEMMA, GEMMA2, GEMMA3, PHI3, BAICHUAN),
    *(MINISTRAL, SEED_OSS, ERNIE4_5, STARCODER2, EXAONE4, CWM, NEMOTRON, ARCEE, HELIUM, STABLELM, HYPERCLOVAX),
    *(VAULTGEMMA, JAIS2, MINICPM, GPT2, GPT_BIGCODE, QWEN3_5, GRANITE_SWA),
    *(GPT_NEOX, FALCON, IQUESTCODER, OLMO3),
    *(PHI, GPTJ, CODEGEN, PERSIMMON),
    *(COHERE, COHERE2, OLMO, BLOOM, MPT, APERTUS),
    *(HUNYUAN, INTERNLM3, NANOCHAT, MINISTRAL3),
)
WITH_EXPERTS = (
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GLM4_MOE, MINIMAX_M2, DOTS1, SOLAR_OPEN, FLEX_OLMO, GRANITEMOE),
    *(QWEN3_NEXT, QWEN3_5_MOE, GPT_OSS, ERNIE4_5_MOE),
    *(EXAONE_MOE, HY_V3, GRANITEMOESHARED, GRANITEMOE_SWA, HUNYUAN_MOE),
    *(MELLUM,),
)
WITH_LATENTS = (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    KIMI_K2,
    GLM4_MOE_LITE,
    DEEPSEEK_V32,
    GLM_MOE_DSA,
    YOUTU,
    MISTRAL4,
    KIMI_LINEAR,
)
FAMILIES = {family.model_type: family for family in (*DENSE, *WITH_EXPERTS, *WITH_LATENTS)}


# Fields of the run, of padding and of initial values, and two that are written as others: num_query_groups, and the
# bias of each projection. The two temperatures of YaRN show in its magnitude and in the scale of attention. Predictions
# of further tokens change no output.
_WITHOUT_A_PART = {
    *(*RUNTIME_FIELDS, *PADDING_FIELDS, "init_method_xavier_uniform", "apply_output_scale_init"),
    *("group_query_attention", "add_bias_linear", "mscale", "mscale_all_dim", "mtp_num_layers"),
}
_LATENTS = {field.name for field in dataclasses.fields(LatentAttentionModel)}


def _families_for(model: ModelConfig) -> Sequence[Family]:
    """The families that may describe a model, those first that are preferred where several do."""
    families: Sequence[Family] = DENSE if model.num_experts is None else WITH_EXPERTS
    if model.multi_latent_attention:
        if model.num_experts is not None and model.moe_shared_expert_intermediate_size is None:
            raise ConfigError(
                "no supported Hugging Face family has latent attention and experts without shared ones; the model "
                "cannot be written in that format"
            )
        has_experts, has_indexer = model.num_experts is not None, model.indexer_topk is not None
        families = tuple(
            family
            for family in WITH_LATENTS
            if (family.carried is not None, family.experts is not None) == (has_indexer, has_experts)
        )
    return [family for family in families if family.write is not None]


def _maths(model: ModelConfig) -> dict[str, Any]:
    """Returns the fields that determine the model's outputs, with the values in effect, however they were given."""
    values = {
        field.name: model.in_effect(field.name)
        for field in dataclasses.fields(ModelConfig)
        if _has_a_part(model, field.name)
    }
    if model.num_experts is not None and values["moe_router_num_groups"] == 1:
        values |= {"moe_router_group_topk": 1, "moe_router_group_score": None}
    if all(model.moe_layers):
        values["ffn_hidden_size"] = None
    has_gelu = not (model.swiglu or model.quick_geglu or model.squared_relu or model.xielu)
    values["openai_gelu"] = has_gelu and model.tanh_gelu
    del values["bias_gelu_fusion"]
    if model.position_embedding_type == "longrope":
        values["short_factor"], values["long_factor"] = model.longrope_factors
    return values


def _has_a_part(model: ModelConfig, field: str) -> bool:
    """Returns False for fields that do not determine outputs, that others replace, and of a part that the model
    lacks."""
    if field in _WITHOUT_A_PART:
        return False
    if field in _LATENTS and field != "multi_latent_attention":
        return model.multi_latent_attention
    if field.startswith("linear_"):
        return model.has_delta_net
    if field.startswith("moe_"):
        # Whether the weights are divided by their sum says what the place of the softmax says. Precision is the run's.
        return model.num_experts is not None and field not in ("moe_router_pre_softmax", "moe_router_dtype")
    yarn, longrope = (model.position_embedding_type == kind for kind in ("yarn", "longrope"))
    if field.startswith("yarn_"):
        return yarn
    if field == "rope_scaling_factor":
        return yarn or model.use_rope_scaling
    if field == "rope_scaling_original_max_position_embeddings":
        return yarn or longrope or model.use_rope_scaling
    return model.use_rope_scaling or not field.startswith("rope_scaling_")
