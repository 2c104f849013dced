"""Prints docs/models.md: the families of Hugging Face models, and what goes with each. Run:

    python -m tests.unit.models.models_table > docs/models.md

Rows come from the registry of families. The configuration of a family by transformers' defaults, or else of a published
model, is put to the rules of every feature.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import asdict
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from megatron.config.model import ModelConfig
from megatron.config.rules.check import problems
from megatron.core.models.hf.families import FAMILIES, WITH_IMAGES, parse_config
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.family.refused import REFUSED
from tests.unit.config.runs import make_run
from tests.unit.models import published, published_tables

PUBLISHED = {**published.PUBLISHED, **published_tables.PUBLISHED}
SIZES = ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank")
SAME = {"minicpm": "granite", "kimi_k2": "deepseek_v3"}  # they are read as the other one
ODD = {"glm4_moe"}  # by transformers' defaults 96 heads have 4096 channels
# Feature -> flags of a small run that has it, and processes.
PIPELINE = 0  # one process for each of the fewest equal stages
CP2 = {"context_parallel_size": 2}
PACKED = {"sft": True, "mock_data": False, "data_path": ("conversations",)}
FEATURES: dict[str, tuple[dict[str, Any], int]] = {
    "tp": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
    "pp": ({}, PIPELINE),
    "zb-h1": ({"pipeline_schedule": "zb-h1"}, PIPELINE),
    "cp p2p": (CP2, 2),
    "cp a2a": ({**CP2, "cp_comm_type": ("a2a",)}, 2),
    "cp all_gather": ({**CP2, "cp_comm_type": ("all_gather",)}, 2),
    "dynamic cp": ({**PACKED, "dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 32}, 2),
    "ZeRO-3": ({"data_parallel_sharding_strategy": "optim_grads_params"}, 2),
    "recompute": ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, 1),
    "activation offload": ({"pipeline_offload_ratio": 0.5}, 1),
    "FP8": ({"fp8_format": "hybrid", "fp8_recipe": "blockwise", "bf16": True}, 1),
    "LoRA": ({"lora_rank": 4, "load_hf": "folder", "lora_target_modules": ("o_proj",)}, 1),
    "multi-token prediction": ({"mtp_num_layers": 1}, 1),
    "CUDA graphs": ({"cuda_graph_impl": "local"}, 1),
    "batch-invariant mode": ({"batch_invariant_mode": True}, 1),
}
SUMMARY = """{count} model types are read from folders of Hugging Face and trained, and {written} of them are written back,
with the same bytes. Of models with images ({images}) the language model is trained. Logits and gradients are compared with
those of transformers {version}. [conversion.md](conversion.md#families) has the particulars of each family, and
[flags.md](flags.md) presets of published sizes."""
HEADER = """# Models

Generated from the registry of families and the rules of `megatron/config/rules`; do not edit. To update, run
`python -m tests.unit.models.models_table > docs/models.md`.

{summary}

| column | meaning |
|---|---|
| kind | dense, or with experts; how its layers attend to tokens |
| published | models whose config.json, as published, is read by a test |
| back | whether whole models are written in the family's format |
| adapters | whether LoRA adapters are read and written in PEFT's format |
| aligned | whether `tools/checkpoint/align.py` compares its modules one by one with transformers' |
| refused | features that a rule refuses for a model of the default sizes, of these: {features} |

| `model_type` | kind | published | back | adapters | aligned | refused |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """Returns the whole page as Markdown, with a final newline."""
    rows = [_row(family) for family in FAMILIES.values()]
    summary = SUMMARY.format(
        count=len(rows),
        written=sum(family.write is not None for family in FAMILIES.values()),
        version=transformers.__version__,
        images=", ".join(f"`{kind}`" for kind in WITH_IMAGES),
    )
    wrapped = textwrap.fill(" ".join(summary.split()), 120, break_on_hyphens=False)
    header = HEADER.format(summary=wrapped, features=", ".join(FEATURES))
    refused = ["", "These families are refused, because:", "", "| `model_type` | reason |", "|---|---|"]
    refused += [f"| `{kind}` | {reason} |" for kind, reason in sorted(REFUSED.items())]
    return header + "\n".join([*rows, *refused]) + "\n"


def example(family: Family) -> ModelConfig:
    """Returns the configuration of the family by transformers' defaults, or of a published model."""
    kind = SAME.get(family.model_type, family.model_type)
    if kind in CONFIG_MAPPING and kind not in ODD:
        config = CONFIG_MAPPING[kind]().to_dict()
    else:
        config = next(config for config in PUBLISHED.values() if config["model_type"] == kind)
    return parse_config(FAMILIES[kind], {**config, "model_type": kind}, kind)


def _row(family: Family) -> str:
    names = [name for name, config in PUBLISHED.items() if config["model_type"] == family.model_type]
    model = example(family)
    refused = _refused(model)
    has_adapters = family.has_adapters and family.write is not None and "LoRA" not in refused
    cells = [
        f"`{family.model_type}`",
        _kind(family, model),
        "; ".join(names),
        "yes" if family.write is not None else "no",
        "yes" if has_adapters else "no",
        "yes" if family.has_sites and not model.has_delta_net else "no",
        ", ".join(refused) or "none",
    ]
    return "| " + " | ".join(cells) + " |"


def _kind(family: Family, model: ModelConfig) -> str:
    kind = "dense" if family.experts is None else "experts"
    parts = {
        "latent attention": model.multi_latent_attention,
        "delta nets": model.has_delta_net,
        "windows": model.window_size is not None,
        "sinks": model.softmax_type != "vanilla",
        "parallel layers": model.parallel_residual,
    }
    return ", ".join([kind, *(name for name, has in parts.items() if has)])


def _refused(model: ModelConfig) -> list[str]:
    """Returns the features that a run of the model cannot have."""
    fields = {**asdict(model), "attention_dropout": 0.0, "hidden_dropout": 0.0}
    for name in SIZES:  # those of examples may be odd, unlike those of the published models
        if (size := fields[name]) is not None:
            fields[name] = -(-size // 64) * 64
    plain, result = set(problems(make_run(**fields), 1)), []
    for name, (flags, processes) in FEATURES.items():
        run_fields = {**fields, **flags}
        if processes == PIPELINE:
            assert model.num_layers is not None
            processes = next(stages for stages in range(2, 1 + model.num_layers) if model.num_layers % stages == 0)
            run_fields["pipeline_model_parallel_size"] = processes
        if set(problems(make_run(**run_fields), processes)) - plain:
            result.append(name)
    return result


if __name__ == "__main__":
    sys.stdout.write(page())
