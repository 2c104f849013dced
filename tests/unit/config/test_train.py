"""How --step-batch-size-schedule is written."""

import pytest

from megatron.base.errors import ConfigError
from megatron.config.train import parse_steps


@pytest.mark.parametrize(
    ("text", "seq_length", "steps"),
    [
        ("0:768 250B:1536", 8192, [(0, 768), (30517578, 1536)]),
        ("0:768,250B:1536, 500B:3072", 8192, [(0, 768), (30517578, 1536), (61035156, 3072)]),
        ("0:8 1.5k:16 2M:1K 1t:2K", None, [(0, 8), (1500, 16), (2_000_000, 1000), (10**12, 2000)]),
        ("100:32 0:16", None, [(0, 16), (100, 32)]),
        ("0:64", 4096, [(0, 64)]),
    ],
)
def test_steps(text, seq_length, steps):
    assert parse_steps(text, seq_length) == tuple(steps)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no step"),
        ("768", "'768' is not THRESHOLD:BATCH_SIZE"),
        ("0:8 1X:16", "'1X:16' is not THRESHOLD:BATCH_SIZE"),
        ("0:8 inf:16", "'inf:16' is not"),
        ("0:8 -5:16", "'-5:16' is not"),
        ("0:0", "'0:0' is not"),
        ("5:8", "begins at 5; let it begin at 0"),
        ("0:8 100:16 101:32", "two steps begin at sample 6"),
    ],
)
def test_what_is_no_schedule(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_steps(text, 16 if "100" in text else None)
