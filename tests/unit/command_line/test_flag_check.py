"""tools/check_flags.py: what becomes of a command line, without starting it."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.command_line.flag_check import check_command
from megatron.command_line.read import read

ROOT = Path(__file__).parents[3]
LINE = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3
    --micro-batch-size 1 --train-iters 5 --tokenizer-type NullTokenizer --vocab-size 100 --mock-data
    --use-mcore-models --rms-norm --async-save --save-interval 7 --attention-dropout=0
"""
GOOD = LINE.split()


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools" / "check_flags.py"))


def test_an_accepted_line():
    verdict = check_command(GOOD, None)
    assert verdict.accepted and verdict.world_size == 1
    kinds = {o.typed.flag: o.kind for o in verdict.outcomes}
    assert [
        kinds[flag] for flag in ("--use-mcore-models", "--rms-norm", "--async-save", "--save-interval", "--lr")
    ] == [*("same", "alias", "noop", "noop", "read")]
    equivalent = check_command(verdict.words, 1)
    assert equivalent.accepted and equivalent.words == verdict.words
    assert {o.kind for o in equivalent.outcomes} == {"read"}
    assert read(verdict.words).run.model == read(GOOD).run.model


def test_flags_and_rules_are_told_together():
    verdict = check_command([*GOOD, "--use-mup", "--hidden-size", "63", "--kv-channels", "0"], 3)
    assert not verdict.accepted
    said = {flags: line for line, flags in verdict.problems}
    assert "layer's formula" in said["--use-mup",]
    assert "must be from 1" in said["--kv-channels",]


def test_a_value_that_cannot_be_read_breaks_no_rule():
    verdict = check_command([*GOOD, "--num-layers", "many"], 1)
    assert [line for line, _ in verdict.problems] == ["--num-layers: needs a whole number, got 'many'"]


class TestTool:
    def test_an_accepted_command(self, tool, capsys):
        assert tool["main"](["--world-size", "2", "--", "pretrain_gpt.py", *GOOD, "--tensorboard-dir", "a b"]) == 0
        out = capsys.readouterr().out
        assert "on 2 processes" in out and "already in effect: --use-mcore-models" in out
        assert "--rms-norm" in out and "--normalization RMSNorm" in out and "nothing is saved" in out
        command = out.split("the equivalent command here:\n")[1].replace("\\\n", " ")
        assert command.startswith("torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2")
        assert "--tensorboard-dir 'a b'" in command and "--async-save" not in command

    def test_a_refused_command(self, tool, capsys):
        assert tool["main"](["--", *GOOD, "--use-mup"]) == 1
        out = capsys.readouterr().out
        assert "refused, 1 problems:\n  --use-mup is not available here" in out and "equivalent" not in out

    @pytest.mark.parametrize("program", ["pretrain_gpt.py", "megatron/train_gpt.py", "$HERE/pretrain_mcore_qwen2.py"])
    def test_a_program_that_trains_a_gpt(self, tool, capsys, program):
        assert tool["main"](["--", "python", program, *GOOD]) == 0
        assert "\npython pretrain_gpt.py --num-layers 2" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "name",
        """pretrain_bert pretrain_t5 pretrain_mamba pretrain_vlm pretrain_ict pretrain_retro pretrain_hybrid
        pretrain_vision_classify train_dpo train_qwen2_5_vl pretrain_megatron_llava pretrain_qwen3_next
        pretrain_megatron_falcon40b train_llama_dpo train training finetune_bert pretrain_llama_reward""".split(),  # noqa: SIM905
    )
    def test_a_program_that_trains_something_else(self, tool, capsys, name):
        assert tool["main"](["--", "torchrun", f"$MEGATRON/{name}.py", *GOOD]) == 1
        out = capsys.readouterr().out
        assert f"  {name}.py is not available here (by its name" in out and "equivalent" not in out

    @pytest.mark.parametrize("program", ["finetune.py", "$PATCH/finetune_megatron_llama.py", "posttrain_gpt.py"])
    def test_fine_tuning_stays_fine_tuning(self, tool, capsys, program):
        words = [word for word in GOOD if word != "--mock-data"] + ["--data-path", "chat"]
        assert tool["main"](["--", "python", program, *words]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{sum(word.startswith('--') for word in words)} flags of {program} on 1 processes")
        assert "\npython finetune.py --num-layers 2" in out and "--sft" not in out

    def test_a_finetune_that_trains_on_documents(self, tool, capsys):
        assert tool["main"](["--", "python", "finetune.py", *GOOD, "--model_name", "gpt"]) == 0
        assert "\npython pretrain_gpt.py --num-layers 2" in capsys.readouterr().out

    def test_a_program_whose_name_is_unknown(self, tool, capsys):
        assert tool["main"](["--", f"python $PROGRAM {' '.join(GOOD)}"]) == 0
        assert (
            "assumed, because the script does not determine it: $PROGRAM is pretrain_gpt.py" in capsys.readouterr().out
        )

    def test_a_script(self, tool, tmp_path, capsys):
        script = tmp_path / "run.sh"
        script.write_text(f"ARGS='{' '.join(GOOD)}'\ntorchrun --nproc_per_node 4 pretrain_gpt.py $ARGS --save $OUT\n")
        assert tool["main"](["--", str(script)]) == 0
        out = capsys.readouterr().out
        assert "on 4 processes" in out and "unknown from the script alone: $OUT" in out and '--save "$OUT"' in out

    def test_many_lines(self, tool, tmp_path, capsys):
        lines = tmp_path / "lines.jsonl"
        cases = [
            {"id": "a", "argv": GOOD, "world": 2},
            {"id": "b", "argv": [*GOOD, "--use-mup"], "world": None},
            {"id": "c", "argv": GOOD, "program": "pretrain_t5.py"},
        ]
        lines.write_text("\n".join(map(json.dumps, cases)))
        assert tool["main"](["--lines", str(lines)]) == 1
        captured = capsys.readouterr()
        first, second, third = map(json.loads, captured.out.splitlines())
        assert first == {"id": "a", "world": 2, "accepted": True, "refused": []}
        assert second["id"] == "b" and [r["flags"] for r in second["refused"]] == [["--use-mup"]]
        assert (
            "pretrain_t5.py is not available here" in third["refused"][0]["why"]
            and third["program"] == "pretrain_t5.py"
        )
        assert captured.err == "1 of 3 lines are accepted\n"

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            ([], "there is nothing to check"),
            (["--lines", "x", "--", "--lr", "1"], "--lines x and a command are given together"),
            (["--", "cat", "x"], "starts no known training script"),
            (["--world-size", "0", "--", "--lr", "1"], "--world-size: must be from 1"),
        ],
    )
    def test_what_cannot_be_read(self, tool, argv, says, capsys):
        assert tool["main"](argv) == 2
        assert says in capsys.readouterr().err

    @pytest.mark.parametrize(
        "text",
        ["{", "[]", '{"argv": 3}', '{"argv": ["--lr"], "world": 0}', '{"world": 1}', "[" * 10**5, '{"argv": ["\xf6"]}'],
    )
    def test_lines_that_are_no_command(self, tool, text, tmp_path, capsys):
        lines = tmp_path / "lines.jsonl"
        lines.write_bytes(f'{{"argv": []}}\n{text}\n'.encode("latin-1"))
        assert tool["main"](["--lines", str(lines)]) == 2
        assert f"{lines}:2 is not a JSON object" in capsys.readouterr().err

    def test_it_needs_no_torch(self):
        command = [sys.executable, "-X", "importtime", "tools/check_flags.py", "--", *GOOD]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert not [
            line
            for line in found.stderr.splitlines()
            if line.rsplit("|")[-1].strip().split(".")[0] in ("torch", "numpy")
        ]
