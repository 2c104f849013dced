"""What Megatron-LM's own parser and checks leave in the arguments of a small model: names, and values that are
literals.

Three versions, in megatron_arguments.json, of --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64
--max-position-embeddings 64 --tokenizer-type NullTokenizer --vocab-size 99 --mock-data --transformer-impl local and
what a run needs beside.
"""

import json
from pathlib import Path

ARGUMENTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="ascii"))


def megatron_arguments(version, **changes):
    """Those of one version with changes, which must be arguments of that version. The vocabulary's size is its own."""
    derived = {"kv_channels": None, "ffn_hidden_size": None, "add_qkv_bias": False}
    vocabulary = {"tokenizer_type": "GPT2BPETokenizer", "vocab_size": 99, "padded_vocab_size": 128}
    found = {**ARGUMENTS[version], **derived, **vocabulary}
    assert changes.keys() <= found.keys(), sorted(changes.keys() - found.keys())
    return {**found, **changes}
