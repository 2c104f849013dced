"""A small valid run to break, one field at a time."""

from typing import Any

from megatron.config.run import PARTS, RunConfig, flag_fields

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "micro_batch_size": 2,
    "train_iters": 10,
    "lr": 1e-3,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 1000,
}

# A small run that evaluates and saves only when it is told to; it lacks the number of layers.
SHORT_RUN = {
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "vocab_size": 120,
    "make_vocab_size_divisible_by": 8,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_length": 16,
    "global_batch_size": 12,
    "num_workers": 0,
    "eval_iters": 1,
    "eval_interval": 100,
    "train_iters": 30,
    "save_interval": 100,
}


def make_run(given: tuple[str, ...] = (), **fields: Any) -> RunConfig:
    """SMALL with `fields` changed; None unsets one."""
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name, value in {**SMALL, **fields}.items():
        part, spec = flag_fields()[name]
        parts[part][name] = spec.default if value is None else value
    return RunConfig(**{part: cls(**parts[part]) for part, cls in PARTS.items()}, given=frozenset(given))
