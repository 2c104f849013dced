"""Reads a config.json, or an adapter's, field by field, so that none is overlooked: an unread field is an error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from megatron.base.errors import CheckpointError
from megatron.config.interval import Interval

T = TypeVar("T")
_MISSING: Any = object()

# Fields without influence on a decoder's results: bookkeeping, token ids, defaults of generation that older versions of
# transformers wrote into every config.json, and marks of the tools that wrote them.
_NAMES = """
    architectures auto_map model_type dtype torch_dtype transformers_version _name_or_path _commit_hash name_or_path
    attn_implementation _attn_implementation _attn_implementation_autoset use_cache pretraining_tp tokenizer_class
    sep_token_id decoder_start_token_id prefix task_specific_params
    model_max_length return_dict output_hidden_states output_attentions output_scores return_dict_in_generate
    torchscript use_bfloat16 tf_legacy_loss pruned_heads problem_type finetuning_task id2label label2id
    is_encoder_decoder is_decoder
    add_cross_attention cross_attention_hidden_size tie_encoder_decoder chunk_size_feed_forward max_length min_length
    do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty _from_model_config gradient_checkpointing is_llama_config
    unsloth_fixed unsloth_version keys_to_ignore_at_inference output_router_logits
"""
HARMLESS = frozenset(_NAMES.split())
# An unknown field that is off asks for nothing, unless its name says that being off is a choice of its own.
_CHOICES = ("norm", "rope", "rotary", "tie", "scal", "act", "position", "causal", "gat", "glu", "dim", "size", "num")


class JsonFields:
    """The fields of a JSON object. Each `take` is recorded; `finish` reports the fields that were not taken."""

    def __init__(self, values: dict[str, Any], where: str, names: Mapping[str, str] | None = None) -> None:
        """`where` begins every message; it is the path of the file. names: of a field -> its name in this file, where
        that differs; messages have the file's."""
        self._values, self._where, self._names = values, where, names or {}
        self._taken: set[str] = set()

    def take(self, name: str, kind: type[T] | tuple[type[T], ...], default: Any = _MISSING) -> T:
        """Returns the field's value, of type `kind`; `default` if it is absent or null. Raises CheckpointError."""
        name = self._names.get(name, name)
        self._taken.add(name)
        value = self._values.get(name)
        if value is None:
            if default is _MISSING:
                raise self.error(f"{name} is missing; the file is incomplete")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        # A bool is an int in Python, but not a valid number here.
        if not isinstance(value, kinds) or (isinstance(value, bool) and int in kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise self.error(f"{name} is {value!r}, not a value of type {names}")
        return value

    def has(self, name: str) -> bool:
        """Returns whether the file has the field, possibly with a null."""
        name = self._names.get(name, name)
        self._taken.add(name)
        return name in self._values

    def number(self, name: str, interval: Interval, default: Any = _MISSING) -> float:
        """Returns a number in `interval`, which may be written as an integer or with a decimal point."""
        return float(self._in(interval, name, self.take(name, (int, float), default)))

    def integer(self, name: str, interval: Interval, default: Any = _MISSING) -> int:
        """Returns a whole number in `interval`."""
        return int(self._in(interval, name, self.take(name, int, default)))

    def numbers(self, name: str, interval: Interval) -> tuple[float, ...]:
        """Returns a list of numbers in `interval`, each written as an integer or with a decimal point."""
        numbers: list[Any] = self.take(name, list)
        for value in numbers:
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise self.error(f"{name} has {value!r}, not a value of type int or float")
            self._in(interval, name, value)
        return tuple(map(float, numbers))

    def optional_number(self, name: str, interval: Interval) -> float | None:
        """Returns `number`, or None if the field is absent or null."""
        return None if self.take(name, (int, float), None) is None else self.number(name, interval)

    def optional_integer(self, name: str, interval: Interval) -> int | None:
        """Returns `integer`, or None if the field is absent or null."""
        return None if self.take(name, int, None) is None else self.integer(name, interval)

    def only(self, name: str, supported: Any, *spellings: Any) -> None:
        """Raises CheckpointError unless the field is absent, null or the only supported value. spellings: others of that
        value."""
        value = self.take(name, object, supported)
        if value != supported and value not in spellings:
            raise self.error(f"{self._names.get(name, name)} is {value!r}; only {supported!r} is supported")

    def below(self, name: str, values: dict[str, Any]) -> JsonFields:
        """Returns the fields of an object in the field `name`; their messages name the file and that field."""
        return JsonFields(values, f"{self._where}: {name}")

    def finish(
        self,
        harmless: frozenset[str] = HARMLESS,
        advice: str = "if the model does not depend on it, remove it from the file",
    ) -> None:
        """Raises CheckpointError naming fields with a value that were not taken, because they may change the model."""
        left = {name: value for name, value in self._values.items() if not _asks_for_nothing(name, value)}
        unknown = sorted(set(left) - self._taken - harmless)
        if unknown:
            listed = ", ".join(f"{name} = {left[name]!r}" for name in unknown)
            raise self.error(f"unknown {'field' if len(unknown) == 1 else 'fields'} {listed}; {advice}")

    def _in(self, interval: Interval, name: str, value: float) -> float:
        name = self._names.get(name, name)
        if not math.isfinite(value):
            raise self.error(f"{name} is {value!r}; it must be {interval.words} and finite")
        if not interval.holds(value):
            raise self.error(f"{name} is {value!r}; it must be {interval.words}")
        return value

    def error(self, problem: str) -> CheckpointError:
        """Returns an error that names the file."""
        return CheckpointError(f"{self._where}: {problem}")


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Returns whether a field with this value changes no model: it is null or off, of transformers' own bookkeeping or
    of another program, or says of every layer that it attends to all tokens.
    """
    if value is None or name.startswith("_") or "." in name:
        return True
    if name == "layer_types":
        return isinstance(value, list) and set(value) == {"full_attention"}
    return value in (False, 0, "", [], {}) and not any(word in name for word in _CHOICES)
