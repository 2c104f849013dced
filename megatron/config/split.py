"""Parses --split."""

from __future__ import annotations

import re
from functools import reduce
from operator import add

from megatron.base.errors import ConfigError

DEFAULT_SPLIT = "969,30,1"
_NUMBER = re.compile(r"[.0-9]+")
_OTHER_NOTATION = re.compile(r"[^\W\d]|[-+]")  # letters, signs and underscores: 1e3 is not the numbers 1 and 3


def split_shares(text: str) -> tuple[float, float, float]:
    """Returns the fractions of training, validation and test, normalised to 1, from up to three numbers like
    "969,30,1".

    As in Megatron-LM, other text around the numbers is ignored, especially spaces and quotes that a script passes on.
    Raises ConfigError.
    """
    try:
        shares = [] if _OTHER_NOTATION.search(text) else [float(word) for word in _NUMBER.findall(text)]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or sum(shares) <= 0:
        raise ConfigError(
            f"--split '{text}' must be up to three decimal numbers with a sum above 0, such as {DEFAULT_SPLIT}"
        )
    # Not `sum`, which rounds differently since Python 3.12: the last bit may move a document to another split.
    total = reduce(add, shares)
    train, valid, test = (share / total for share in shares + [0.0] * (3 - len(shares)))
    return train, valid, test
