"""Which layers have a window, from the flags' text."""

import pytest

from megatron.base.errors import ConfigError
from megatron.config.layers import attention_windows, keys_in_window, layer_pattern
from megatron.config.model import ModelConfig


@pytest.mark.parametrize(
    ("text", "layers", "found"),
    [
        ("1", 4, 1),
        (" 6 ", 2, 6),
        ("[1]", 1, (1,)),
        ("[0, 0, 1, 1]", 4, (0, 0, 1, 1)),
        ("([1]*3+[0])*2", 8, (1, 1, 1, 0) * 2),
        ("2*[1,0] + [0]", 5, (1, 0, 1, 0, 0)),
        ("[0]*6+[1]*18", 24, (0,) * 6 + (1,) * 18),
        ("[1]*0+[0]", 1, (0,)),
        pytest.param("+".join(["[1]"] * 126), 126, (1,) * 126, id="many terms"),
    ],
)
def test_a_pattern(text, layers, found):
    assert layer_pattern(text, layers) == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0", "must be 1 or more"),
        ("[1,0]", "is for 2 layers, but --num-layers is 4"),
        ("[1]*5", "is for 5 layers"),
        ("[1]*1000000000000", "is for 1000000000000 layers"),
        ("[1,0,2,1]", "neither"),
        ("[1,0,True,1]", "neither"),
        ("[[1],0,1,1]", "neither"),
        ("[1]*[4]", "neither"),
        ("[1]+3", "neither"),
        ("2+2", "neither"),
        ("-1", "neither"),
        ("2.5", "neither"),
        ("1,0,1,0", "neither"),
        ("", "neither"),
        ("[1", "neither"),
        ("layers", "neither"),
        ("[int('1')]*4", "neither"),
        ("[1 for _ in range(4)]", "neither"),
        ("__import__('os').getcwd()", "neither"),
        pytest.param("(" * 1000 + "1" + ")" * 1000, "neither", id="too many brackets"),
        pytest.param("+".join(["[]"] * 20_000), "neither", id="too many terms"),
    ],
)
def test_what_is_no_pattern(text, reason):
    with pytest.raises(ValueError, match=reason):
        layer_pattern(text, 4)


@pytest.mark.parametrize(
    ("size", "window"),
    [(None, None), ("127,0", 128), ("(4095, 0)", 4096), ("0,0", 1), ("-1,0", None), ("(-1,0)", None)],
)
def test_a_window_counts_the_own_key_too(size, window):
    assert keys_in_window(size) == ModelConfig(window_size=size).window == window


@pytest.mark.parametrize("size", ["127", "127,0,0", "a,0", "", ",", "127,1", "127,-1", "-2,0", "1.5,0"])
def test_what_is_no_window(size):
    with pytest.raises(ConfigError, match="--window-size"):
        keys_in_window(size)


@pytest.mark.parametrize(
    ("size", "skip", "windows"),
    [
        (None, None, (None,) * 6),
        (None, "anything", (None,) * 6),  # given_flags_have_an_effect judges that
        ("-1,0", "2", (None,) * 6),
        ("7,0", None, (8,) * 6),
        ("7,0", "1", (None,) * 6),
        ("7,0", "2", (8, None) * 3),
        ("7,0", "3", (8, 8, None) * 2),
        ("7,0", "4", (8, 8, 8, None, 8, 8)),
        ("7,0", "7", (8,) * 6),
        ("7,0", "[0]*4+[1]*2", (None,) * 4 + (8,) * 2),
    ],
)
def test_which_layers_have_it(size, skip, windows):
    """As Megatron-LM counts: of layers from 1, those that N divides have full attention; in a list, those with 0."""
    assert attention_windows(size, skip, 6) == windows
    assert ModelConfig(num_layers=6, window_size=size, window_attn_skip_freq=skip).windows == windows
