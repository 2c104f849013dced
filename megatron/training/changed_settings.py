"""Names what a continued run trains on otherwise than the run that saved its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.base.log import get_logger
from megatron.config.data import DEFAULT_SPLIT, split_shares
from megatron.config.run import flag_fields, flag_name
from megatron.core.datasets.blend import parse_blend

log = get_logger(__name__)

# The parts of a configuration that say which tokens have which loss, and their fields that do not.
_PARTS = ("data", "tokenizer", "moe", "rl")
_OF_NO_LOSS = {
    "data_cache_path",
    "num_workers",
    "data_order",  # data_order.py says what another order means
    "data_sharding",
    "chat_template",
    "tokenizer_hf_include_special_tokens",
    "trust_remote_code",
    "moe_token_dispatcher_type",
    "moe_per_layer_logging",
    "rl_generation_batch_size",
    "rm_timeout",
    "rm_workers",
    "save_rollouts",
    "eval_prompt_data",
    "eval_prompts",
}
_OF_TRAINING = {"seed", "calculate_per_token_loss", "z_loss_coeff"}
_PATHS = {"tokenizer_model", "vocab_file", "merge_file", "custom_rm_path", "prompt_data", "preference_data"}
_BLENDS = {"data_path", "train_data_path", "valid_data_path", "test_data_path"}


def name_changed_settings(path: Path, saved: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Logs the flags that change a run's samples or the meaning of its loss, where they differ from a checkpoint's.

    saved, config: of the run in the checkpoint `path` and of this one, as `RunConfig.to_dict` returns them; what
    `saved` does not say is not compared. Files and folders count by name: they may have moved.
    """
    differences = []
    for name, (part, field) in flag_fields().items():
        if name not in _OF_TRAINING and (part not in _PARTS or name in _OF_NO_LOSS):
            continue
        if field.name not in saved.get(part, {}):
            continue
        old, new = (_comparable(name, held[part][field.name]) for held in (saved, config))
        if old != new:
            differences.append(f"{flag_name(name)} {old} there and {new} here")
    if differences:
        log.warning("this run does not train as the one that saved %s: %s", path, "; ".join(differences))


def name_blend(words: Sequence[str] | None, flag: str) -> str | None:
    """Returns the names of a flag's datasets without their folders, each behind its share if weights are given."""
    if not words:
        return None
    prefixes, weights = parse_blend(words, flag)
    names = [Path(prefix).name for prefix in prefixes]
    if weights is None:
        return " ".join(names)
    return " ".join(f"{weight / sum(weights)} {name}" for weight, name in zip(weights, names, strict=True))


def name_split(text: str | None) -> str:
    """Returns the shares of --split, which add up to 1."""
    return ",".join(f"{share:.6g}" for share in split_shares(text or DEFAULT_SPLIT))


def _comparable(name: str, value: Any) -> Any:
    if name == "split":
        return name_split(value)
    if name in _BLENDS:
        return name_blend(value, flag_name(name))
    if name in _PATHS and value is not None:
        return " ".join(Path(path).name for path in (value if isinstance(value, list | tuple) else [value]))
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
