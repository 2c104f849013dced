"""Scripts that grow without end are refused in a moment, and not read until the machine stops."""

import pytest

from megatron.base.errors import ConfigError
from megatron.tooling.launch_script.shell.interpret import invocations

DOUBLING = {
    "text": f'x=aa; for i in {" ".join(map(str, range(60)))}; do x="$x$x"; done; python train.py $x',
    "lines": "x=aa\n" + 'x="$x$x"\n' * 60 + "python train.py $x",
    "appended": "x=aa\n" + 'x+="$x"\n' * 60,
    "elements": "x=(a a)\n" + 'x=("${x[@]}" "${x[@]}")\n' * 60,
    "appended elements": "x=(a a)\n" + 'x+=("${x[@]}")\n' * 60,
    "replaced": "x=aa\n" + "x=${x//a/$x}\n" * 60,
    "one word": "x=" + "a" * 1000 + "\npython train.py " + "$x" * 1000,
    "output": "x=aa\n" + 'x=$(echo "$x$x")\n' * 60,
    "a local name": "f() { local x=$1$1; " + 'x="$x$x"; ' * 60 + "}\nf aa",
}


@pytest.mark.parametrize("script", DOUBLING.values(), ids=DOUBLING)
def test_a_text_that_doubles(script):
    with pytest.raises(ConfigError, match="longer than a command"):
        invocations(script, (), {}, lambda name: None)


def test_numbers_do_not_grow_either():
    (found,) = invocations("python train.py $((1 << 1000000000000)) $((2**62))", (), {}, lambda name: None)
    assert found.words[-1] == str(2**62) and "1 << 1000000000000" in found.words[-2]


def test_a_long_word_is_a_word():
    (found,) = invocations("x=" + "a" * 100_000 + "\npython train.py $x", (), {}, lambda name: None)
    assert len(found.words[-1]) == 100_000
