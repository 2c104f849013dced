"""tools/profile_machine.py on two processes: the file holds what the planner needs."""

import pytest

from megatron.planner.time.hardware import Place
from megatron.planner.time.profile_file import EMBEDDING, HEAD, read_profile
from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import MOCK, flags

pytestmark = pytest.mark.slow
SMALL = {"--untie-embeddings-and-output-weights": None, "--micro-batch-size": 1, "--global-batch-size": 4}
TOOL = "tests.e2e.helpers.tools:run"


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """A profile of two processes that had little time."""
    folder = tmp_path_factory.mktemp("profile")
    words = ["profile_machine.py", "--out", str(folder / "machine.json"), "--seconds", "1", "--micro-batch-sizes", "1"]
    result = run([*words, *flags(MOCK, SMALL)], folder / "log", 2, TOOL, timeout=120.0)
    assert result.codes == [0, 0], result.text
    return read_profile(str(folder / "machine.json")), folder


def test_the_first_figures_are_there_however_short_the_time(taken):
    profile, _ = taken
    first = profile.layers[0]
    assert (first.tp, first.cp, first.micro_batch) == (1, 1, 1)
    assert set(first.again_seconds) == {"core_attn", "norm", "mlp_act", "mlp", "full"}
    assert {row.end for row in profile.ends} == {EMBEDDING, HEAD}
    assert profile.products and profile.attention
    assert (profile.world_size, profile.devices_per_node, profile.device) == (2, 2, "cpu")


def test_every_kind_of_message_is_there(taken):
    profile, _ = taken
    found = {row.op for row in profile.messages}
    assert {Place(row.ranks, row.together) for row in profile.messages} == {Place(2, 2)}
    assert found == {
        *("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift"),
        *("bucket_all_gather", "bucket_reduce_scatter", "bucket_all_reduce", "send"),
    }


def test_what_had_no_time_is_named(taken):
    profile, _ = taken
    assert any(name.startswith("layers of tp 2") for name in profile.left_out)


def test_mistakes_are_one_line(tmp_path):
    words = ["profile_machine.py", "--out", str(tmp_path / "none" / "machine.json")]
    result = run([*words, *flags(MOCK)], tmp_path / "log", 1, TOOL)
    assert result.codes == [2] and len(result.stderr[0].splitlines()) == 1
    assert "machine.json: No such file or directory" in result.stderr[0]


def test_a_run_compares_itself_with_the_plan(taken):
    _, folder = taken
    options = {"--plan": folder / "machine.json", "--log-interval": 5}
    result = run(flags(MOCK, SMALL, options), folder / "run", 2, timeout=120.0)
    assert result.codes == [0, 0], result.text
    lines = [line for line in result.text.splitlines() if line.startswith("plan, ")]
    assert len(lines) == 2 and all("predicted" in line and "measured" in line for line in lines)


def test_a_run_refuses_the_profile_of_another_model(taken):
    _, folder = taken
    options = {"--plan": folder / "machine.json", "--ffn-hidden-size": 96}
    result = run(flags(MOCK, SMALL, options), folder / "refused", 1)
    assert result.codes == [2] and "ffn_hidden_size" in result.stderr[0]
