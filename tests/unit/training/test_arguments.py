import dataclasses

import pytest

from megatron.config.flag import flag_of, spelling
from megatron.config.interval import SIZE
from megatron.config.run import PARTS, RunConfig, flag_fields
from megatron.core.errors import ConfigError
from megatron.core.models.presets import PRESETS
from megatron.training.arguments import (
    GROUP_TITLES,
    FlagParser,
    build_parser,
    parse,
    path_word,
    print_arguments,
    spellings_of,
    within,
)  # fmt: skip
from megatron.training.retired_flags import ADVICE, advice


def parsed(line):
    return parse(line.split(), description="test")


def refusal(line):
    with pytest.raises(ConfigError) as error:
        parsed(line)
    assert "\n" not in str(error.value)
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
    assert set(PARTS) == set(GROUP_TITLES) == {f.name for f in dataclasses.fields(RunConfig)} - {"given"}


def test_names_follow_megatron():
    spelled = {name: spelling(spec) for name, (_, spec) in flag_fields().items()}
    assert spelled["tensor_model_parallel_size"] == "--tensor-model-parallel-size"
    assert spelled["add_bias_linear"] == "--disable-bias-linear"
    assert spelled["check_for_nan_in_loss_and_grad"] == "--no-check-for-nan-in-loss-and-grad"


def test_a_given_default_counts_as_given():
    assert parsed("--lr-decay-style linear").given == {"lr_decay_style"}


def test_the_last_of_two_wins():
    assert parsed("--lr 1 --lr=2").schedule.lr == 2.0


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
            ("--micro-batchsize=3", "--micro-batchsize=3 is not a known flag; did you mean --micro-batch-size?"),
            ("--zzz", "--zzz is not a known flag; --help lists all of them"),
            ("stray --bf16", "'stray' belongs to no flag; remove it, or quote a value that has spaces"),
            ("--use-mcore-models --bf16", "--use-mcore-models is always on here; remove it"),
            ("--batch-size 4", "--batch-size 4 is now --micro-batch-size"),
            ("--moe-grouped-gemm", "--moe-grouped-gemm is not available yet (mixture of experts); remove it"),
        ],
    )
    def test_one_line_says_what_to_write(self, line, message):
        assert refusal(line) == message

    def test_all_unknown_flags_are_named_at_once(self):
        message = refusal("--use-flash-attn --moe-router-topk 2 --lrr 1 --bf16")
        assert "--use-flash-attn is now --attention-backend flash" in message
        assert "--moe-router-topk 2 is not available yet (mixture of experts)" in message
        assert "--lrr 1 is not a known flag; did you mean --lr?" in message

    def test_flags_are_not_abbreviated(self):
        assert "did you mean --num-attention-heads?" in refusal("--num-attention-head 3")


class TestAdvice:
    def test_no_retired_flag_is_a_flag(self):
        known = set(build_parser("test").spellings)
        assert known.isdisjoint(ADVICE)
        assert all(advice(flag) is None for flag in known)

    def test_flags_that_advice_names_exist(self):
        known = set(build_parser("test").spellings)
        for text in ADVICE.values():
            for word in text.replace(";", " ").replace(":", " ").replace(",", " ").split():
                assert not word.startswith("--") or word in known, f"{word} in '{text}'"

    def test_unknown_to_megatron_too(self):
        assert advice("--not-a-flag") is None


def test_help_lists_every_flag_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as stop:
        parsed("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in build_parser("test").spellings:
        assert flag in text
    for title in GROUP_TITLES.values():
        assert f"\n{title}:\n" in text
    assert "decay of the mean of gradients (default: 0.9)" in text
    assert "None)" not in text and "SUPPRESS" not in text


class TestListing:
    def test_format(self):
        lines = print_arguments(parsed("--lr 0.5")).splitlines()
        assert lines[0] == "------------------------ arguments ------------------------"
        assert lines[-1] == "-------------------- end of arguments ---------------------"
        assert "  lr .............................................. 0.5" in lines
        assert len(lines) == len(flag_fields()) + 2

    def test_order_and_columns(self):
        body = print_arguments(RunConfig()).splitlines()[1:-1]
        names = [line.split()[0] for line in body]
        assert names == sorted(flag_fields(), key=str.lower)
        assert {line.index(" ", len(name) + 3) for line, name in zip(body, names)} == {51}


@pytest.mark.parametrize("word", ["\udcff", "a\udc80b"])
def test_words_that_are_not_utf8_are_refused(word):
    with pytest.raises(ConfigError, match="is not UTF-8"):
        parse(["--save", word], description="test")


@pytest.mark.parametrize("flag", ["--save", "--load", "--data-path", "--vocab-file"])
def test_an_empty_word_is_no_path(flag):
    """It would mean the folder that the program is started in."""
    with pytest.raises(ConfigError, match=f"{flag}: is empty; give it a value"):
        parse([flag, ""], description="test")


class TestFlagsOfTools:
    def parser(self):
        parser = FlagParser()
        parser.add_argument("--size", type=within(int, SIZE))
        parser.add_argument("--id", type=int)
        parser.add_argument("--share", type=float)
        parser.add_argument("--folder", type=path_word)
        return parser

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("--size 0", "--size: must be from 1 to 134217728, got 0"),
            ("--size -2", "--size: must be from 1 to 134217728, got -2"),
            ("--size many", "--size: needs a whole number, got 'many'"),
            (f"--id {2**63}", f"--id: must be from -{2**63} to {2**63 - 1}, got {2**63}"),
            ("--share nan", "--share: must be finite, got nan"),
            ("--share 1e400", "--share: must be finite, got 1e400"),
            ("--folder=", "--folder: is empty; give it a value, or leave it out"),
        ],
    )
    def test_a_value_outside_is_named(self, line, says):
        with pytest.raises(ConfigError) as error:
            self.parser().parse_args(line.split())
        assert str(error.value) == says

    def test_values_inside(self):
        args = self.parser().parse_args(f"--size 1 --id {-(2**63)} --share=-1e-400 --folder a".split())
        assert vars(args) == {"size": 1, "id": -(2**63), "share": 0.0, "folder": "a"}
