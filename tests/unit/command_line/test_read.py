"""Command lines of this program and of other Megatrons: what is read, what is accepted, and what is refused."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.base.errors import ConfigError
from megatron.command_line.flag_parser import GROUP_TITLES, spellings_of
from megatron.command_line.read import canonical, parse, read
from megatron.config.features.feature import Note
from megatron.config.flag import flag_of, spelling
from megatron.config.presets import PRESETS
from megatron.config.run import PARTS, RunConfig, flag_fields

ROOT = Path(__file__).parents[3]


def parsed(line):
    return parse(line.split(), description="test")


def refusal(line):
    with pytest.raises(ConfigError) as error:
        parsed(line)
    return str(error.value)


def sample(spec):
    """Words for a flag, and the value they mean."""
    found = flag_of(spec)
    if isinstance(spec.default, bool):
        return [], not spec.default
    kind = spec.type
    one = next((c for c in found.choices or () if c != spec.default), None)
    one = one if one is not None else 7 if "int" in kind else 0.25 if "float" in kind else "word"
    if "tuple" in kind:
        count = found.nargs if isinstance(found.nargs, int) else 2
        return [str(one)] * count, (one,) * count
    return [str(one)], one


def test_no_argument_gives_the_defaults():
    assert parsed("") == RunConfig()


@pytest.mark.parametrize("name", flag_fields())
def test_every_spelling_of_every_flag_sets_its_field(name):
    part, spec = flag_fields()[name]
    words, value = sample(spec)
    for flag in spellings_of(spec):
        run = parse([flag, *words], description="test")
        assert run.value(name) == value and type(run.value(name)) is type(value)
        assert run.given == {name}
        changed = dataclasses.replace(getattr(RunConfig(), part), **{name: value})
        assert run == dataclasses.replace(RunConfig(), given=frozenset({name}), **{part: changed})


def test_field_names_are_unique_over_all_parts():
    assert len(flag_fields()) == sum(len(dataclasses.fields(cls)) for cls in PARTS.values())
    assert (
        set(PARTS)
        == set(GROUP_TITLES)
        == {f.name for f in dataclasses.fields(RunConfig)} - {"given", "notes", "already"}
    )


def test_names_follow_megatron():
    spelled = {name: spelling(spec) for name, (_, spec) in flag_fields().items()}
    assert spelled["tensor_model_parallel_size"] == "--tensor-model-parallel-size"
    assert spelled["add_bias_linear"] == "--disable-bias-linear"
    assert spelled["check_for_nan_in_loss_and_grad"] == "--no-check-for-nan-in-loss-and-grad"


def test_a_given_default_counts_as_given():
    assert parsed("--lr-decay-style linear").given == {"lr_decay_style"}


def test_the_last_of_two_wins_and_is_named():
    run = parsed("--lr 1 --bf16 --bf16 --lr=2")
    assert run.schedule.lr == 2.0
    assert run.notes == (Note("--lr", "1", "--lr 2", "given again"),)


def test_tuples():
    run = parsed("--data-path 0.3 a 0.7 b --rampup-batch-size 8 8 1000 --iterations-to-skip 4")
    assert run.data.data_path == ("0.3", "a", "0.7", "b")
    assert run.train.rampup_batch_size == (8, 8, 1000)
    assert run.train.iterations_to_skip == (4,)


class TestPreset:
    def test_sets_the_shape_and_gives_nothing(self):
        run = parsed("--preset llama3-8b")
        assert run.given == frozenset()
        assert (run.model.num_layers, run.model.num_kv_heads, run.model.rotary_base) == (32, 8, 500000.0)

    def test_flags_win_on_either_side(self):
        run = parsed("--num-layers 2 --preset llama3-8b --rotary-base 1e4")
        assert (run.model.num_layers, run.model.rotary_base, run.model.hidden_size) == (2, 1e4, 4096)
        assert run.given == {"num_layers", "rotary_base"}

    @pytest.mark.parametrize("name", PRESETS)
    def test_every_preset_parses(self, name):
        assert parsed(f"--preset {name}").model.num_layers

    def test_a_tokenizer_brings_its_own_vocabulary(self):
        words = "--preset llama3-8b --tokenizer-type"
        assert parsed(f"{words} HuggingFaceTokenizer --tokenizer-model t").model.vocab_size is None
        assert parsed(f"{words} HuggingFaceTokenizer --tokenizer-model t --vocab-size 9").model.vocab_size == 9
        assert (
            parsed(f"{words} NullTokenizer").model.vocab_size == parsed("--preset llama3-8b").model.vocab_size == 128256
        )

    def test_the_checkpoints_shape_would_win(self):
        assert "--use-checkpoint-args" in refusal("--preset llama2-7b --use-checkpoint-args --load d")

    def test_unknown_names_are_listed(self):
        assert "llama-tiny" in refusal("--preset llama9")


class TestRefusals:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("--lr", "--lr: needs one value after it"),
            ("--lr --bf16", "--lr: needs one value after it"),
            ("--lr fast", "--lr: needs a number, got 'fast'"),
            ("--num-layers 2.5", "--num-layers: needs a whole number, got '2.5'"),
            ("--normalization RMS", "--normalization: 'RMS' is not known; choose one of LayerNorm, RMSNorm"),
            ("--timing-log-level 3", "--timing-log-level: '3' is not known; choose one of 0, 1, 2"),
            ("--rampup-batch-size 1 2", "--rampup-batch-size: needs 3 values after it"),
            ("--iterations-to-skip", "--iterations-to-skip: needs at least one value after it"),
            ("--micro-batch 3", "--micro-batch 3 is not a known flag; did you mean --micro-batch-size?"),
            ("--micro-batchsize=3", "--micro-batchsize 3 is not a known flag; did you mean --micro-batch-size?"),
            ("--zzz", "--zzz is not a known flag; --help lists all of them"),
            ("--kv-lora-rankk 3", "--kv-lora-rankk 3 is not a known flag; did you mean --kv-lora-rank?"),
            ("stray --bf16", "'stray' belongs to no flag; remove it, or quote a value that has spaces"),
            ("-m --bf16", "-m is not a known flag; --help lists all of them"),
            ("--lr 1 2", "--lr: '2' belongs to no flag; remove it, or quote a value that has spaces"),
            ("--bf16 maybe", "--bf16: 'maybe' belongs to no flag; remove it, or quote a value that has spaces"),
            ("--num-layers 2.5e0", "--num-layers: needs a whole number, got '2.5e0'"),
            ("--train-iters inf", "--train-iters: needs a whole number, got 'inf'"),
            ("--zero-stage 7", "--zero-stage 7 is not known with this value; see --print-flags"),
            (
                "--mtp-num-layers 2 --mtp-use-repeated-layer",
                "--mtp-use-repeated-layer is not available here (one layer for all further predictions); train this "
                "model with the program that the command is from",
            ),
            (
                "--num-experts 8 --moe-router-load-balancing-type quantile_balancing",
                "--moe-router-load-balancing-type quantile_balancing is not available here (balances by quantiles of "
                "the scores); give aux_loss, seq_aux_loss, global_aux_loss or none",
            ),
            (
                "--num-experts 8 --seq-aux --moe-router-load-balancing-type aux_loss",
                "--seq-aux is not available here (a loss over each sample); give --moe-router-load-balancing-type "
                "seq_aux_loss",
            ),
            (
                "--num-experts 8 --n-shared-experts 2 --moe-ffn-hidden-size 64",
                "--n-shared-experts 2 is not available here (shared experts by their number); give "
                "--moe-shared-expert-intermediate-size, the width of all shared experts together",
            ),
            (
                "--num-experts 8 --first-k-dense-replace 1",
                "--first-k-dense-replace 1 is not available here (dense layers before those with experts); give "
                "--moe-layer-freq with a number per layer, such as ([0]*3+[1]*58) for 3 dense layers of 61",
            ),
            (
                "--fp8-format e4m3 --fp8-recipe custom",
                "--fp8-recipe custom is not available here (quantizers from a module of the user); give --fp8-recipe "
                "delayed or blockwise",
            ),
        ],
    )
    def test_one_line_says_what_to_write(self, line, message):
        assert refusal(line) == message

    def test_every_mistake_is_a_line(self):
        assert refusal("--use-mup --lrr 1 --bf16 --lr fast --num-layers 3").splitlines() == [
            "--use-mup is not available here (changes the layer's formula); train this model with the program that "
            "the command is from",
            "--lrr 1 is not a known flag; did you mean --lr?",
            "--lr: needs a number, got 'fast'",
        ]

    def test_flags_are_not_abbreviated(self):
        assert "did you mean --num-attention-heads?" in refusal("--num-attention-head 3")


class TestSpellings:
    @pytest.mark.parametrize(
        ("line", "same"),
        [
            ("--train_iters 7 --use_distributed_optimizer", "--train-iters 7 --use-distributed-optimizer"),
            ("--train-iters=7", "--train-iters 7"),
            ("--train-iters 2e8 --reduce-bucket-size=4.0e6", "--train-iters 200000000 --ddp-bucket-size 4000000"),
            ("--bf16 true --swiglu=False", "--bf16"),
            ("--bf16 --bf16 false", ""),
            ("--no-save-optim true --no-load-optim 0", "--no-save-optim"),
            ("--disable-gradient-accumulation-fusion", "--no-gradient-accumulation-fusion"),
            ("--normalization rmsnorm", "--normalization RMSNorm"),
            ("--min-lr -1e-3 --window-size -1,0", "--min-lr=-0.001 --window-size=-1,0"),
            ("--data-path 0.5 a 0.5 b", "--data-path 0.5 a 0.5 b"),
        ],
    )
    def test_as_people_write_them(self, line, same):
        assert dataclasses.replace(parsed(line), notes=(), already=()) == dataclasses.replace(parsed(same), notes=())

    def test_words_of_a_text_without_quotes_are_one_value(self):
        run = parsed("--tensorboard-dir MY RUNS --bf16")
        assert run.logging.tensorboard_dir == "MY RUNS"
        assert [note.flag for note in run.notes] == ["--tensorboard-dir"]

    def test_a_known_name_is_found(self):
        assert canonical("--moe_router_topk") == "--moe-router-topk"
        assert canonical("--disable-ckpt-fully-parallel-save") == "--no-ckpt-fully-parallel-save"
        assert canonical("--what_is_this") == "--what-is-this"


class TestOtherMegatrons:
    @pytest.mark.parametrize(
        ("line", "same"),
        [
            ("--rms-norm", "--normalization RMSNorm"),
            ("--RMSNorm --layernorm-epsilon 1e-6", "--normalization RMSNorm --norm-epsilon 1e-6"),
            ("--overlap-sp-ag --overlap-sp-rs", "--tp-comm-overlap"),
            ("--kaimm-gc-interval 50", "--manual-gc --manual-gc-interval 50"),
            ("--use-rotary-position-embeddings --no-position-embedding", "--position-embedding-type rope"),
            ("--no-position-embedding", "--position-embedding-type none"),
            ("--use-flash-attn", "--attention-backend auto"),
            ("--batch-size 4 --model-parallel-size 2", "--micro-batch-size 4 --tensor-model-parallel-size 2"),
            (
                "--checkpoint-activations --checkpoint-num-layers 2",
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            ),
            (
                "--patch-tokenizer-type LLamaTokenizer --load m",
                "--tokenizer-type HuggingFaceTokenizer --tokenizer-model m --load m",
            ),
            ("--sliding-window 4096", "--window-size 4095,0"),
            ("--attention-head-type multiquery", "--group-query-attention --num-query-groups 1"),
            ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params"),
            (
                "--num-experts 8 --moe-layer-freq -1 --first-k-dense-replace -1 --norm-topk-prob --moe-grouped-gemm "
                "--moe-token-dispatcher-type alltoall_seq --routed-scaling-factor 2.5 --moe-intermediate-size 64",
                "--num-experts 8 --moe-layer-freq 1 --moe-router-topk-normalization on "
                "--moe-router-topk-scaling-factor 2.5 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall",
            ),
            (
                "--num-experts 8 --moe-ffn-hidden-size 64 --n-shared-experts 1",
                "--num-experts 8 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64",
            ),
            (
                "--use-megatron-fsdp --data-parallel-sharding-strategy optim",
                "--data-parallel-sharding-strategy optim",
            ),
        ],
    )
    def test_another_name_is_the_flag_itself(self, line, same):
        assert dataclasses.replace(parsed(line), notes=(), already=()) == parsed(same)

    def test_the_flag_itself_goes_before_another_name_on_either_side(self):
        for line in ("--attention-backend fused --use-flash-attn", "--use-flash-attn --attention-backend fused"):
            run = parsed(line)
            assert run.model.attention_backend == "fused"
            assert [(note.flag, note.in_effect) for note in run.notes] == [
                ("--use-flash-attn", "--attention-backend fused")
            ]

    def test_what_is_so_anyway_is_listed(self):
        run = parsed("--use-mcore-models --data-impl mmap --use-mcore-models --lr 1")
        assert run.already == ("--use-mcore-models", "--data-impl mmap")
        assert run.notes == () and run.given == {"lr"}

    def test_what_changes_no_result_is_a_note(self):
        run = parsed("--ckpt-format torch_dist --async-strategy nvrx")
        assert [(note.flag, note.requested) for note in run.notes] == [
            ("--ckpt-format", "torch_dist"),
            ("--async-strategy", "nvrx"),
        ]
        assert run.given == frozenset()

    def test_flags_about_experts_that_change_no_result(self):
        run = parsed("--num-experts 8 --moe-token-dispatcher-type flex --moe-enable-deepep --moe-permute-fusion")
        assert [(note.flag, note.in_effect) for note in run.notes] == [
            ("--moe-token-dispatcher-type", "alltoall"),
            ("--moe-enable-deepep", "alltoall"),
            ("--moe-permute-fusion", "chosen at start"),
        ]
        run = parsed("--num-experts 8 --moe-grouped-gemm --seq-aux --moe-router-load-balancing-type seq_aux_loss")
        assert run.already == ("--moe-grouped-gemm", "--seq-aux") and run.notes == ()

    def test_and_a_refusal_when_flags_are_strict(self):
        lines = refusal("--ckpt-format torch_dist --async-strategy nvrx --use-mcore-models --strict-flags").splitlines()
        assert [line.split()[0] for line in lines] == ["--ckpt-format", "--async-strategy"]
        assert "torch_dist is not in effect" in lines[0] and all(
            line.endswith("and --strict-flags refuses that") for line in lines
        )

    def test_a_switch_that_is_off_asks_for_nothing(self):
        assert parsed("--async-save false --perform-rl-step false").notes == ()

    def test_a_family_depends_on_the_flag_that_turns_it_on(self):
        assert [note.flag for note in parsed("--moe-input-jitter-eps 0.1 --fp8-interval 1").notes] == [
            "--moe-input-jitter-eps",
            "--fp8-interval",
        ]
        refused = (
            "--moe-input-jitter-eps 0.1 is not available here (random factors on the inputs of routers and experts); "
            "remove it to train without noise"
        )
        for turned_on in ("--num-experts 8", "--preset mixtral-8x7b", "--load-hf d", "--use-checkpoint-args"):
            assert refusal(f"{turned_on} --moe-input-jitter-eps 0.1 --fp8-interval 1") == refused
        assert parsed("--preset llama3-8b --moe-input-jitter-eps 0.1").notes

    def test_outcomes_are_in_the_order_of_the_line(self):
        line = read(
            [
                "--lr",
                "1",
                "--rms-norm",
                "--use-mcore-models",
                "--async-strategy",
                "mcore",
                "--fp4-format",
                "x",
                "--lrr",
                "1",
            ]
        )
        assert [outcome.kind for outcome in line.outcomes] == ["read", "alias", "same", "noop", "refuse", "unknown"]
        assert line.run.schedule.lr == 1 and len(line.problems) == 2


@pytest.mark.parametrize("program", ["pretrain_gpt.py", "finetune.py"])
def test_mistakes_are_told_before_torch_is_imported(program):
    """All of them, those of the flags together too, and by a process that has not paid for torch."""
    argv = ["--lr", "fast", "--tensor-model-parallel-size", "3", "--use-mup"]
    command = [sys.executable, "-X", "importtime", program, *argv]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = [line for line in found.stderr.splitlines() if not line.startswith("import time:")]
    assert found.returncode == 2
    assert said == [
        "error: --use-mup is not available here (changes the layer's formula); train this model "
        "with the program that the command is from",
        "error: --lr: needs a number, got 'fast'",
    ]
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in found.stderr.splitlines() if "|" in line}
    assert "argparse" in imported and not {"torch", "numpy", "transformers"} & imported


def test_rules_are_told_together():
    line = "--num-layers 2 --hidden-size 63 --num-attention-heads 4 --lr 1 --seq-length 8 --mock-data --clip-grad -1"
    command = [sys.executable, "pretrain_gpt.py", *line.split(), "--spec", "a"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    for words in (
        "--spec a is not available",
        "--clip-grad must be",
        "--micro-batch-size must be given",
        "--hidden-size 63",
        "--tokenizer-type",
    ):
        assert words in found.stderr
    assert all(line.startswith("error: ") for line in found.stderr.splitlines())


@pytest.mark.parametrize("word", ["\udcff", "a\udc80b"])
def test_words_that_are_not_utf8_are_refused(word):
    with pytest.raises(ConfigError, match="is not UTF-8"):
        parse(["--save", word], description="test")


@pytest.mark.parametrize("flag", ["--save", "--load", "--data-path", "--vocab-file"])
def test_an_empty_word_is_no_path(flag):
    """It would mean the folder that the program is started in."""
    with pytest.raises(ConfigError, match=f"{flag}: is empty; give it a value"):
        parse([flag, ""], description="test")
