"""The file of NCCL's options: what it may hold, and the line that says what is wrong with it."""

import subprocess
import sys

import pytest

from megatron.base.errors import ConfigError
from megatron.config.communicators import CommunicatorOptions, communicator_settings
from megatron.config.parallel import ParallelConfig
from megatron.config.rules.check import problems
from tests.unit.config.runs import SMALL, make_run

TEXT = """---
# the cards of this machine
dp_cp:
  cga_cluster_size: 2   # clusters of thread blocks
  max_ctas: 16

tp: {min_ctas: 4, net_name: "ib"}
'pp':
    is_high_priority_stream: false
"""


def settings(tmp_path, text, *groups):
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    return communicator_settings(
        ParallelConfig(nccl_communicator_config_path=str(path), high_priority_stream_groups=groups)
    )


def test_both_spellings(tmp_path):
    assert settings(tmp_path, TEXT).named == {
        "dp_cp": CommunicatorOptions(cga_cluster_size=2, max_ctas=16),
        "tp": CommunicatorOptions(min_ctas=4, net_name="IB"),
        "pp": CommunicatorOptions(is_high_priority_stream=False),
    }
    assert communicator_settings(ParallelConfig()).named == {}
    assert settings(tmp_path, "# nothing\n").named == {}


def test_named_groups_have_high_priority(tmp_path):
    found = settings(tmp_path, "pp:\n  max_ctas: 2\n  is_high_priority_stream: false\n", "pp", "mp")
    assert found.named["pp"] == CommunicatorOptions(max_ctas=2, is_high_priority_stream=True)
    assert found.of(["model"]) == CommunicatorOptions(is_high_priority_stream=True)


def test_the_narrower_name_takes_precedence(tmp_path):
    """Whatever comes first in the file; an option that only the wider one has stays."""
    found = settings(tmp_path, "intra_dp_cp: {max_ctas: 8}\ndp_cp: {max_ctas: 16, min_ctas: 2}\npos_embd:\n")
    assert found.of(["shard"]) == CommunicatorOptions(max_ctas=8, min_ctas=2)
    assert found.of(["replicas"]) == found.of(["dp", "dp_cp"]) == CommunicatorOptions(max_ctas=16, min_ctas=2)
    assert found.of(["tp"]) == CommunicatorOptions()
    assert found.without_group == ["pos_embd"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dpcp:\n  max_ctas: 2\n", "no group is called dpcp; give one of dp, dp_cp, "),
        ("5: {max_ctas: 2}\n", "no group is called 5; give one of dp, dp_cp, "),
        ("tp:\n  max_cta: 2\n", "max_cta of tp is not an option of NCCL; give one of cga_cluster_size, "),
        ("tp: {max_ctas: 65}\n", "max_ctas of tp is 65, not a whole number from 1 to 64; change it"),
        ("tp: {max_ctas: true}\n", "max_ctas of tp is True, not a whole number"),
        ("tp:\n  cga_cluster_size: -1\n", "cga_cluster_size of tp is -1, not a whole number from 0 to 8; change it"),
        ("tp: {min_ctas: 1.5}\n", "min_ctas of tp is 1.5, not a whole number"),
        ("tp: {min_ctas: [1]}\n", "min_ctas of tp is [1], not a whole number"),
        ("tp:\n  net_name: ethernet\n", "net_name of tp is 'ethernet', not a network; give IB or Socket"),
        ("tp:\n  is_high_priority_stream: 1\n", "is_high_priority_stream of tp is 1, neither true nor false"),
        ("tp: {min_ctas: 8, max_ctas: 4}\n", "tp has min_ctas 8 above max_ctas 4; lower the first"),
        ("tp:\n\tmax_ctas: 1\n", "is not YAML (while scanning for the next token"),
        ("tp: 5\n", "tp is 5, not options; write 'dp_cp: {max_ctas: 16}'"),
        ("tp\n", "holds no groups; write groups and options as 'dp_cp: {max_ctas: 16}'"),
        ("tp: {max_ctas: {least: 1}}\n", "max_ctas of tp is {'least': 1}, not a whole number"),
    ],
)
def test_what_is_wrong(tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        settings(tmp_path, text)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(tmp_path / "nccl.yaml") in str(error.value)


def test_a_file_that_cannot_be_read_is_a_mistake_of_the_command_line(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, why in (("missing", "cannot be read (No such file"), ("binary", "is not YAML"), (".", "(Is a directory")):
        (found,) = problems(make_run(nccl_communicator_config_path=str(tmp_path / name)), 1)
        assert why in found


def test_before_torch_is_imported(tmp_path):
    """One line, exit code 2."""
    (tmp_path / "nccl.yaml").write_text("tp:\n  max_ctas: many\n")
    small = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "train_iters", "lr")
    flags = [word for name in small for word in (f"--{name.replace('_', '-')}", str(SMALL[name]))]
    flags += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
    code = """
import sys
sys.modules["torch"] = None
from megatron.command_line.entry import run_of
run_of(sys.argv[1:], "")
"""
    path = tmp_path / "nccl.yaml"
    for typed, line in (
        (
            ["--nccl-communicator-config-path", str(path)],
            f"{path}: max_ctas of tp is 'many', not a whole number from 1 to",
        ),
        (["--high-priority-stream-groups", "dp", "up"], "--high-priority-stream-groups"),
    ):
        command = [sys.executable, "-c", code, *flags, *typed]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
        assert line in ended.stderr
