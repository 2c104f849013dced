"""Families that are a table over the one decoder: the logits, gradients and greedy tokens of transformers, and the same
bytes there and back, in shapes that publishers do not use."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.conversion.align import ModelPair
from megatron.conversion.convert import to_checkpoint, to_hf
from megatron.core.inference.generate import check_lengths
from megatron.core.models.hf import families
from megatron.core.models.hf.source import HFSource
from megatron.core.models.resized import ResizedVocabulary
from megatron.training.export import CheckpointSource, adapter_export
from tests import pool
from tests.unit.models.builds import CPU, assert_gradients, losses, make_ids
from tests.unit.models.hf_families import DYNAMIC, FAMILIES, FORMS, HUNYUAN, SUBSETS, WRITTEN_AS
from tests.unit.models.hf_models import edit_json, random_model
from tests.unit.models.published_tables import PUBLISHED
from tests.unit.models.test_hf_conversion import in_our_names, load, logits_of
from tests.unit.models.test_hf_generation import continue_greedily, continued_by_transformers, on_a_rank

LENGTH, NEW = 24, 64
# (hidden size, query heads, key and value heads, width of the MLP, layers, vocabulary, tied)
SHAPES = ((72, 6, 2, 37, 3, 97, False), (40, 5, 1, 50, 4, 131, True), (48, 12, 12, 29, 2, 64, False))


def make_model(family, shape, **changes):
    """A random model of transformers."""
    hidden, heads, groups, width, layers, vocabulary, tied = shape
    fields = {**FAMILIES.get(family, {}), **changes}
    if (wider := fields.pop("wide", None)) is not None:
        fields["head_dim"] = hidden // heads + wider
    if kinds := fields.get("layer_types"):
        fields["layer_types"] = (kinds * layers)[:layers]
    values = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if "kv_lora_rank" in fields else groups,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **fields},
    }
    names = families.FAMILIES[family].fields
    config = CONFIG_MAPPING[family](**{names.get(key, key): values[key] for key in values if names.get(key, key)})
    return random_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES, ids=("a", "b", "c"))
def test_logits_gradients_and_the_way_back(tmp_path, family, shape):
    compare(tmp_path, make_model(family, shape), family, shape)


@pytest.mark.parametrize(("family", "changes"), FORMS)
def test_another_form_of_a_family(tmp_path, family, changes):
    compare(tmp_path, make_model(family, SHAPES[0], **changes), family, SHAPES[0])


def as_published(folder):
    """Of Kimi Linear transformers writes the dense layers, too, under the name of those with experts."""
    tensors = load_file(folder / "model.safetensors")
    dense = [f".block_sparse_moe.{name}_proj." for name in ("gate", "up", "down")]
    if json.loads((folder / "config.json").read_text())["model_type"] == "kimi_linear":
        names = {
            key: key.replace("block_sparse_moe", "mlp") if any(d in key for d in dense) else key for key in tensors
        }
        save_file(
            {names[key]: tensor for key, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
        )


def compare(tmp_path, theirs, family, shape):
    """With the logits, gradients and bytes of `theirs`."""
    theirs.save_pretrained(tmp_path / "hf")
    as_published(tmp_path / "hf")
    ours, source = load(tmp_path / "hf")
    ids = make_ids(2, LENGTH + 1) % (shape[5] - 1) + 1  # the token of padding has no gradient in transformers
    tokens = ids[:, :-1]
    with torch.no_grad():
        logits = logits_of(ours, tokens, shape[5])
    expected = theirs(tokens).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    losses(ours, ids).mean().backward()
    F.cross_entropy(expected.transpose(1, 2), ids[:, 1:]).backward()
    form = families.FAMILIES[family].stored
    parameters = {name: parameter for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    gradients = {name: parameters[key].grad for key, name in form.usual(parameters).items()}
    gradients = {name: form.usual_view(name, grad) for name, grad in gradients.items()}
    assert_gradients({key: p.grad for key, p in ours.named_parameters()}, in_our_names(source, gradients))

    nothing = TokenizerConfig()
    to_checkpoint(source, tmp_path / "ours", dtype=torch.float32, tokenizer=nothing)
    back, base = tmp_path / "back", str(tmp_path / "hf") if family in SUBSETS else None
    to_hf(CheckpointSource(tmp_path / "ours/iter_0000000"), back, dtype=torch.float32, tokenizer=nothing, base=base)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert families.read_config(tmp_path / "back")[0].model_type == WRITTEN_AS.get(family, family)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back",
        attn_implementation=theirs.config._attn_implementation,
        experts_implementation="eager",
    )
    with torch.no_grad():
        assert (again(tokens).logits - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_an_apertus_with_another_activation(tmp_path):
    """The slope at zero is a tensor of the folder, too. A folder without it cannot be loaded by transformers, so that it
    is written for a model that comes from elsewhere."""
    make_model("apertus", SHAPES[0]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    slope = "model.layers.1.mlp.act_fn.beta"
    save_file({**tensors, slope: torch.tensor(0.4)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{slope} is 0.4.*; only the number 0.5 is supported"):
        load(tmp_path)
    without = {name: tensor for name, tensor in tensors.items() if "act_fn.beta" not in name}
    save_file(without, tmp_path / "model.safetensors", {"format": "pt"})
    nothing = TokenizerConfig()
    to_hf(load(tmp_path)[1], tmp_path / "back", dtype=torch.bfloat16, tokenizer=nothing)
    assert load_file(tmp_path / "back/model.safetensors")[slope].equal(torch.tensor(0.5, dtype=torch.bfloat16))


def test_an_apertus_without_a_rope_has_that_of_its_publisher():
    values = CONFIG_MAPPING["apertus"](head_dim=128).to_dict()
    family = families.FAMILIES["apertus"]
    model = families.parse_config(family, values, "x")
    assert model.use_rope_scaling
    assert families.parse_config(family, {**values, "rope_parameters": None}, "x") == model


@pytest.mark.parametrize("family", ["internlm3", "hunyuan_v1_dense"])
def test_samples_beyond_the_context_of_dynamic_scaling(tmp_path, family):
    """In training each forward has the frequencies of its length; generation is refused there."""
    theirs = make_model(family, SHAPES[0], **DYNAMIC, max_position_embeddings=10)
    theirs.save_pretrained(tmp_path)
    ours, source = load(tmp_path)
    with torch.no_grad():
        for length in (10, 11, LENGTH):  # transformers goes by the longest sequence so far
            tokens = make_ids(2, length) % SHAPES[0][5]
            expected = theirs(tokens).logits
            assert (logits_of(ours, tokens, SHAPES[0][5]) - expected).abs().max() <= 1e-5 * expected.abs().max()
    with pytest.raises(ConfigError, match="above the model's --max-position-embeddings 10"):
        check_lengths([6], 5, source.model)


def test_experts_of_two_ranks_continue_a_hunyuan(tmp_path):
    shape = (48, 4, 2, 30, 2, 96, False)
    theirs = make_model("hunyuan_v1_moe", shape)
    theirs.save_pretrained(tmp_path)
    assert pool.run(2, on_a_rank, tmp_path, NEW) == [continued_by_transformers(theirs, NEW)] * 2


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm is False; only True"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla is True; only False"),
        ("hunyuan_v1_dense", {"attention_head_dim": 5}, "attention_head_dim is 5; only 16 is"),
        ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic"}}, "factor is missing"),
        (
            "hunyuan_v1_dense",
            {"head_dim": 2, "rope_parameters": HUNYUAN["rope_parameters"]},
            "alpha is 30.0, and heads",
        ),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2, 1]}, r"moe_topk is \[1, 2, 1\]; only one number for all 3 layers"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 2]}, "only one number for all 3 layers"),
        ("hunyuan_v1_moe", {"moe_topk": 6}, "moe_topk is 6; there are 5 experts"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": [37, 37, 36]}, "moe_intermediate_size is .* only 37"),
        ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert is 2; only 1"),
        ("internlm3", {"qkv_bias": False, "bias": True}, "qkv_bias is False and bias True; .* only equal ones"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 3.0}}, "unknown field alpha"),
    ],
)
def test_models_that_transformers_does_not_run(tmp_path, family, fields, message):
    make_model(family, SHAPES[0]).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises(CheckpointError, match=message):
        families.read_config(tmp_path)


def test_fields_that_transformers_does_not_read_in_an_olmo3(tmp_path):
    """It scales no layer of such a file, and has no other name for the base of layers with a window."""
    make_model("olmo3", SHAPES[0]).save_pretrained(tmp_path)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    edit_json(tmp_path / "config.json", rope_scaling=scaling)
    with pytest.raises(CheckpointError, match="rope_scaling has a type"):
        families.read_config(tmp_path)
    edit_json(tmp_path / "config.json", rope_scaling=None, rope_local_base_freq=300.0)
    with pytest.raises(CheckpointError, match="rope_local_base_freq is not read by transformers"):
        families.read_config(tmp_path)


def test_a_minicpm_is_the_granite_with_its_factors(tmp_path):
    """Files of MiniCPM have factors from which those of each layer follow; its tensors have a Llama's names."""
    shape = SHAPES[0]
    hidden, heads, layers = shape[0], shape[1], shape[4]
    factors = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / math.sqrt(layers),
        "logits_scaling": hidden / 20,
        "attention_multiplier": 1 / math.sqrt(hidden // heads),
    }
    theirs = make_model("granite", shape, **factors)
    theirs.save_pretrained(tmp_path)
    of_minicpm = {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 20}
    edit_json(tmp_path / "config.json", **of_minicpm, mlp_bias=None, **dict.fromkeys(factors))
    ours, source = load(tmp_path)
    tokens = make_ids(2, LENGTH) % shape[5]
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (logits_of(ours, tokens, shape[5]) - expected).abs().max() <= 1e-5 * expected.abs().max()
    family, values = families.write_config(source.model, like=tmp_path)
    assert family.model_type == "granite" and {name: values[name] for name in factors} == factors


BAICHUAN_13B = {
    "architectures": ["BaichuanForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_baichuan.BaichuanConfig",
        "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM",
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "gradient_checkpointing": False,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 13696,
    "model_max_length": 4096,
    "model_type": "baichuan",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.29.2",
    "use_cache": True,
    "vocab_size": 64000,
}


class NotRotated(torch.nn.Module):
    """In place of a rotary embedding: angles of zero."""

    def __init__(self, channels):
        super().__init__()
        self.channels = channels

    def forward(self, x, position_ids):
        angles = torch.zeros(*position_ids.shape, self.channels)
        return angles.cos(), angles.sin()


def biased_mask(heads, length):
    """The mask of transformers, with ALiBi by BLOOM's function."""
    bias = build_alibi_tensor(torch.ones(1, length, dtype=torch.int64), heads, torch.float32)
    return bias.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), float("-inf")).unsqueeze(0)


@pytest.mark.parametrize("heads", [12, 8])
def test_a_baichuan_13b_is_a_llama_with_alibi(tmp_path, heads):
    """transformers has no model for it. Its name for the context tells it from Baichuan-7B, which rotates."""
    shape = (48, heads, heads, 29, 2, 64, False)
    theirs = make_model("llama", shape)
    theirs.save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn."
        tensors[f"{at}W_pack.weight"] = torch.cat([tensors.pop(f"{at}{x}_proj.weight") for x in "qkv"])
    save_file(tensors, tmp_path / "hf/model.safetensors", {"format": "pt"})
    sizes = json.loads((tmp_path / "hf/config.json").read_text())
    published = {name: sizes.get(name, value) for name, value in BAICHUAN_13B.items()}
    own = {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"]}
    (tmp_path / "hf/config.json").write_text(json.dumps({**published, **own}))

    theirs.model.rotary_emb = NotRotated(theirs.config.head_dim)
    ours, source = load(tmp_path / "hf")
    tokens = make_ids(2, LENGTH) % shape[5]
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=biased_mask(heads, tokens.shape[1])).logits
        assert (logits_of(ours, tokens, shape[5]) - expected).abs().max() <= 1e-5 * expected.abs().max()
    to_checkpoint(source, tmp_path / "ours", dtype=torch.float32, tokenizer=TokenizerConfig())
    saved = CheckpointSource(tmp_path / "ours/iter_0000000")
    to_hf(saved, tmp_path / "back", dtype=torch.float32, tokenizer=TokenizerConfig())
    after = load_file(tmp_path / "back/model.safetensors")
    assert tensors.keys() == after.keys() and all(torch.equal(tensors[key], after[key]) for key in tensors)
    assert families.read_config(tmp_path / "back")[1] == source.model
    edit_json(tmp_path / "hf/config.json", z_loss_weight=0)
    with pytest.raises(CheckpointError, match="Baichuan 2 normalises its head"):
        families.read_config(tmp_path / "hf")


@pytest.mark.parametrize("bases", [(10000.0, 500.0, 0), (0, 0, 300.0), (70.0, 0, 70.0), (0, 20.0, 0)])
def test_a_granite_with_a_base_for_each_layer(tmp_path, bases):
    theirs = make_model("granite_swa", SHAPES[0], layer_rope_theta=list(bases))
    theirs.save_pretrained(tmp_path)
    ours, source = load(tmp_path)
    tokens = make_ids(2, LENGTH) % SHAPES[0][5]
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (logits_of(ours, tokens, SHAPES[0][5]) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert families.write_config(source.model)[1]["layer_rope_theta"] == list(bases)
    for wrong, message in (([1.0, 2.0, 0], "is not 0"), ([5.0, 6.0, 7.0], "several bases"), ([True] * 3, "is not 0")):
        edit_json(tmp_path / "config.json", layer_rope_theta=wrong)
        with pytest.raises(CheckpointError, match=message):
            families.read_config(tmp_path)


@pytest.mark.parametrize(
    ("flags", "family"),
    [
        ({}, "gpt2"),
        ({"bias_gelu_fusion": False}, "gpt2"),
        ({"group_query_attention": True}, "gpt_bigcode"),
        ({"position_embedding_type": "rope"}, "starcoder2"),
    ],
)
def test_a_run_without_flags_for_its_architecture_trains_a_gpt2(flags, family):
    model = ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=100,
        max_position_embeddings=64,
        **flags,
    )
    assert families.write_config(model)[0].model_type == family


def test_scaling_of_a_model_that_no_family_describes():
    """Families without rotary embedding lack the fields of its scaling."""
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 99}
    rotary = {"position_embedding_type": "yarn", "max_position_embeddings": 64}
    with pytest.raises(ConfigError, match="no supported Hugging Face family describes the model"):
        families.write_config(ModelConfig(**shape, **rotary, softmax_type="off-by-one"))


def test_gpt2_as_it_is_on_the_hub(tmp_path):
    """Names without the prefix that transformers writes, and masks that follow from config.json."""
    theirs = make_model("gpt2", SHAPES[1])
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 128, 128).tril() for layer in range(SHAPES[1][4])}
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    ours, source = load(tmp_path)
    tokens = make_ids(2, LENGTH) % SHAPES[1][5]
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (logits_of(ours, tokens, SHAPES[1][5]) - expected).abs().max() <= 1e-5 * expected.abs().max()
    for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
        key = f"decoder.layers.1.{name}.weight"
        shape = source.shapes[key]
        half = Box((*(0 for _ in shape[1:]), shape[-1] // 2), (*shape[:-1], shape[-1] - shape[-1] // 2))
        part = dict(ours.named_parameters())[key].detach()[..., shape[-1] // 2 :]
        assert torch.equal(source.read(key, half, torch.float32), part), "a rank reads its own elements"
    with pytest.raises(ConfigError, match="gpt2, whose modules are not compared"):
        ModelPair(tmp_path, torch.float32, pool.groups(), CPU, ours=None)
    adapted = dataclasses.replace(source.model, lora_rank=2)
    with pytest.raises(ConfigError, match="adapters of gpt2 are not written"):
        adapter_export(SimpleNamespace(model=adapted, base=str(tmp_path), path=tmp_path), tmp_path / "a", torch.float32)


def test_new_tokens_have_the_mean_of_the_biases(tmp_path):
    theirs = make_model("phi", SHAPES[0])
    theirs.save_pretrained(tmp_path)
    source, new = HFSource(tmp_path), 5
    tokens = SHAPES[0][5] + new
    larger = ResizedVocabulary(source, dataclasses.replace(source.model, vocab_size=tokens))
    theirs.resize_token_embeddings(tokens)
    name, expected = "output_layer.bias", theirs.lm_head.bias.detach()
    (rows,) = larger.shapes[name]
    biases = larger.read(name, Box((0,), (rows,)), torch.float32)
    torch.testing.assert_close(biases[:tokens], expected, rtol=0, atol=1e-6)
    assert rows > tokens and not biases[tokens:].any() and expected[-new:].all()
    assert larger.read(name, Box((tokens - 2,), (3,)), torch.float32).equal(biases[tokens - 2 : tokens + 1])


def test_a_codegen_that_transformers_does_not_run():
    for changes, message in (
        ({"n_head": 2}, "n_head is 2, .* multiple of 4"),
        ({"rotary_dim": 18}, "size of a head, 16"),
    ):
        values = {**PUBLISHED["CodeGen 350M"], **changes}
        with pytest.raises(CheckpointError, match=message):
            families.parse_config(families.FAMILIES["codegen"], values, "config.json")


def test_a_part_of_a_head_that_is_no_binary_fraction():
    """30 / 44 of 44 channels are 29 in floating-point numbers."""
    values = {**PUBLISHED["GPT-J 6B"], "n_embd": 176, "rotary_dim": 30}
    model = families.parse_config(families.FAMILIES["gptj"], values, "config.json")
    assert model.rotary_dim == 30 and families.write_config(model)[1]["rotary_dim"] == 30


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_publishers_file_means_what_transformers_makes_of_it(name):
    """With the fields that publishers write and transformers does not."""
    values = PUBLISHED[name]
    family = families.FAMILIES[values["model_type"]]
    written = json.loads(CONFIG_MAPPING[family.model_type].from_dict(values).to_json_string())
    model, again = (families.parse_config(family, fields, "x") for fields in (values, written))
    assert again == dataclasses.replace(model, kv_channels=again.kv_channels)
    assert again.head_dim == model.head_dim


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2 .* 1 norm is"),
        ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn is 3"),
        ({"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn False"),
        ({"multi_query": False, "num_kv_heads": 2}, "num_kv_heads is 2; .* 4"),
    ],
)
def test_forms_of_falcon_that_transformers_does_not_run(changes, message):
    falcon = {**PUBLISHED["Falcon 7B"], **changes}
    with pytest.raises(CheckpointError, match=message):
        families.parse_config(families.FAMILIES["falcon"], falcon, "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_fields_that_are_unknown(tmp_path, family):
    theirs = make_model(family, SHAPES[1])
    theirs.save_pretrained(tmp_path)
    as_published(tmp_path)
    assert continue_greedily(tmp_path, pool.groups(), NEW) == continued_by_transformers(theirs, NEW)
    for name, value in {"logit_bias_scale": 0.5, "rms_norm_offset": True}.items():
        edit_json(tmp_path / "config.json", **{name: value})
        with pytest.raises(CheckpointError, match=f"config.json: unknown field {name} = {value}"):
            families.read_config(tmp_path)
        fields = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({key: fields[key] for key in fields if key != name}))


def test_greedy_tokens_of_two_ranks_that_share_the_bias_of_the_head(tmp_path):
    """From a file that holds masks, as the publisher's do."""
    theirs = make_model("codegen", (48, 12, 12, 30, 2, 131, True))
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    masks = {f"transformer.h.{layer}.attn.causal_mask": torch.ones(1, 1, 128, 128).tril().bool() for layer in range(2)}
    save_file(tensors | masks, tmp_path / "model.safetensors", {"format": "pt"})
    assert pool.run(2, on_a_rank, tmp_path, NEW) == [continued_by_transformers(theirs, NEW)] * 2
