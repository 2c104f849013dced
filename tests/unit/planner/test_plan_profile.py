"""tools/plan.py time --profile: what it prints, and what it refuses."""

import pytest

from megatron.planner.time.profile_file import write_profile
from tests.unit.planner.profiles import EMBED, LAYER, LOSS, MODEL, RUN, STEP, profile_of
from tools.plan import main


@pytest.fixture
def path(tmp_path):
    """A profile in a file."""
    write_profile(profile_of(), str(tmp_path / "machine.json"))
    return str(tmp_path / "machine.json")


def test_the_step_is_that_of_the_profile(path, capsys):
    assert main(["time", "--profile", path, "--world-size", "1", *RUN]) == 0
    text = capsys.readouterr().out
    computed = 4 * (MODEL.num_layers * sum(LAYER) + sum(EMBED) + sum(LOSS)) + STEP
    seconds = float(text.split("\nstep ")[1].split(" ms")[0]) / 1e3
    assert computed < seconds < 1.3 * computed  # the rest is the update
    assert f"a prediction from {path}, taken on 4 x cpu on 2026-01-01" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cluster", "h100:1x8"], "was taken on cpu, and the run is for h100"),
        (["--hidden-size", "512"], "hidden_size 256 and not 512"),
        (["--bf16"], "was taken in float32, and the run is in bfloat16"),
        (["--swiglu", "--num-query-groups", "2", "--group-query-attention"], "num_query_groups None and not 2"),
    ],
)
def test_another_machine_or_model_is_refused_with_both(path, flags, message, capsys):
    assert main(["time", "--profile", path, *RUN, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_a_machine_must_be_named(capsys):
    assert main(["time", *RUN]) == 2
    assert "give --cluster, such as h100:4x8, or --profile" in capsys.readouterr().err
