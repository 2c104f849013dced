"""Parameters of the presets with experts: of the whole model, and those that a token passes, as published."""

import dataclasses

import pytest

from megatron.command_line.read import parse
from megatron.config.model import ModelConfig
from megatron.config.presets import PRESETS, preset
from megatron.config.rules.check import check
from megatron.spec.decoder import decoder_spec

# Name -> (parameters, parameters per token), of the files on the Hugging Face hub and of a token's experts.
PUBLISHED = {
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),  # 46.7B, 12.9B
    "mixtral-8x22b": (140_620_634_112, 39_152_031_744),  # 141B, 39B
    "qwen1.5-moe-a2.7b": (14_315_784_192, 2_689_173_504),  # 14.3B, 2.7B
    "qwen2-57b-a14b": (57_408_658_944, 14_249_270_784),  # 57.41B, 14B
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),  # 30.5B, 3.3B
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),  # 235B, 22B
    "qwen3-next-80b-a3b": (79_674_391_296, 3_874_929_408),  # 80B, 3B without the embeddings
    "qwen3.5-35b-a3b": (34_660_610_688, 3_454_988_928),  # 35B, 3B
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208),  # 15.7B, 2.4B without the embeddings
    "deepseek-v2": (235_741_434_880, 21_375_800_320),  # 236B, 21B
    "deepseek-v3": (671_026_404_352, 37_552_282_624),  # 671B, 37B
    "moonlight-16b-a3b": (15_960_108_544, 2_914_774_528),  # 16B, 3B
    "kimi-k2": (1_026_408_209_408, 32_861_477_888),  # 1T, 32B
    "glm-4.7-flash": (29_943_390_976, 3_896_763_136),  # 30B, 3B without the embeddings
    "glm-4.5-air": (106_852_245_504, 13_424_123_904),  # 106B, 12B without the embeddings
    "minimax-m2": (228_689_748_992, 11_030_537_216),  # 230B, 10B without the embeddings
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),  # 20.9B, 3.6B without the embeddings of the input
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),  # 116.8B, 5.1B without the embeddings of the input
    "olmoe-1b-7b": (6_919_161_856, 1_282_017_280),  # 6.9B, 1.3B
}
RUN = "--seq-length 2048 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer"
LAYOUT = (
    "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
)


def parameters(model: ModelConfig) -> int:
    return sum(parameter.numel for parameter in decoder_spec(model).parameters().values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters(name):
    model = ModelConfig(**preset(name))
    chosen_only = dataclasses.replace(model, num_experts=model.moe_router_topk)
    of_expert = model.hidden_size + model.router_bias
    routers = sum(model.moe_layers) * (model.num_experts - model.moe_router_topk) * of_expert
    assert (parameters(model), parameters(chosen_only) + routers) == PUBLISHED[name]


def test_every_published_one_is_counted():
    assert {name for name, fields in PRESETS.items() if "num_experts" in fields} - set(PUBLISHED) == {"moe-tiny"}


@pytest.mark.parametrize("name", [*PUBLISHED, "moe-tiny"])
def test_they_train_as_they_are(name):
    vocabulary = "--vocab-size 4096" if name == "moe-tiny" else ""
    check(parse(f"--preset {name} {vocabulary} {RUN} {LAYOUT}".split(), description=""), 4)
