"""The longest sequence of a model."""

from __future__ import annotations

from megatron.config.model import ModelConfig


def context_limit(model: ModelConfig) -> tuple[int, str] | None:
    """Returns (the tokens of the longest sequence for which a model is defined, the flag that says so), or None."""
    limits = {"--max-position-embeddings": model.max_position_embeddings, "--indexer-topk": model.indexer_topk}
    return min(((limit, flag) for flag, limit in limits.items() if limit is not None), default=None)
