"""The table of flags that other Megatrons have: complete, free of contradictions, and true of this program's flags."""

import re
from pathlib import Path

import pytest

from megatron.command_line.flag_parser import build_parser
from megatron.command_line.read import UNKNOWN, canonical, read
from megatron.config.flag_table import (
    ALIAS,
    NOOP,
    OUTCOMES,
    READ,
    REFUSE,
    SAME,
    find_row,
    flag_table,
    is_listed,
    read_flags,
)

# Megatron-LM's flags at d98e8a64 (August 2026), by name.
MEGATRON = Path(__file__).with_name("megatron_flags.txt").read_text().split()
OWN = set(build_parser("").spellings)
FLAG = re.compile(r"--[a-zA-Z0-9][\w-]*")
FLAGS_IN_TEXT = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@pytest.mark.parametrize("flag", MEGATRON)
def test_every_flag_of_megatron_is_answered_by_name(flag):
    name = canonical(flag)
    assert name in OWN or is_listed(name)
    if name not in OWN:
        outcome = read([flag]).outcomes[0]
        assert outcome.kind in (SAME, NOOP, REFUSE, ALIAS) or "is not known with this value" in outcome.why


def test_what_is_said_to_be_read_is_what_is_read():
    assert {row.flag for row in flag_table() if row.outcome == READ} == read_flags() == OWN & set(MEGATRON) - {"--help"}
    others = [row for row in flag_table() if row.outcome != READ and not row.values and not row.beside]
    assert not [row.flag for row in others if row.flag in OWN]


def test_rows_are_whole():
    for row in flag_table():
        assert (
            row.subject
            and row.flag.startswith("--")
            and row.outcome in OUTCOMES
            and re.fullmatch(r"\d|[+*]", row.arity)
        )
        assert row.outcome == READ or row.text or row.outcome == ALIAS, row
        assert bool(row.instead) or row.outcome not in (NOOP, ALIAS, REFUSE), row
        assert FLAG.fullmatch(row.flag), f"{row.flag} is no name"
        assert not row.values or row.arity != "0", f"{row.flag} takes no value"
        assert "_" not in row.flag or row.outcome == READ


def test_no_row_hides_another():
    keys = [(row.flag, value, row.beside) for row in flag_table() for value in row.values or ("",)]
    assert len(keys) == len(set(keys)), sorted({key for key in keys if keys.count(key) > 1})


def test_flags_that_rows_name_exist():
    for row in flag_table():
        for flag in FLAGS_IN_TEXT.findall(f"{row.instead} {row.text}"):
            known = flag in OWN or is_listed(flag) or flag == "--max-restarts"  # torchrun's
            assert known, f"{flag} in the row of {row.flag}"
        for condition in row.beside.split():
            other = condition.partition("=")[0]
            assert other in OWN or is_listed(other)


@pytest.mark.parametrize(
    "row", [row for row in flag_table() if row.outcome == ALIAS], ids=lambda row: " ".join([row.flag, *row.values[:1]])
)
def test_an_alias_is_understood(row):
    conditions = [condition.split("=") for condition in row.beside.split()]
    names = set(FLAGS_IN_TEXT.findall(row.instead)) - {flag for flag, *_ in conditions}
    assert names <= OWN
    switches = {row.flag for row in flag_table() if row.arity == "0"}
    needed = [word for flag, *value in conditions for word in (flag, *(value or ["8"] * (flag not in switches)))]
    # One of these is a value of the flag that is meant.
    words = row.values or (
        ("8", "0.5", "uniform", "selective", "rope") if "{" in row.instead and row.arity != "0" else ("",)
    )
    lines = [read([row.flag, *filter(None, [word]), *needed]) for word in words]
    understood = [line for line in lines if not line.problems]
    assert understood and (not row.values or understood == lines)
    assert all(line.outcomes[0].kind == ALIAS and line.run.given for line in understood)


def test_certain_values_go_before_others_and_then_flags_beside():
    assert find_row("--megatron-fsdp-main-grads-dtype", ("fp32",), {}).outcome == SAME
    assert find_row("--megatron-fsdp-main-grads-dtype", ("bf16",), {}).outcome == REFUSE
    assert find_row("--moe-input-jitter-eps", ("0.1",), {}).outcome == NOOP
    assert find_row("--moe-input-jitter-eps", ("0.1",), {"--num-experts": ("8",)}).outcome == REFUSE
    assert find_row("--attention-backend", ("local",), {}).outcome == ALIAS
    assert find_row("--attention-backend", ("flash",), {}).outcome == READ
    assert find_row("--no-such-flag", (), {}) is None


# What a user types instead of one of every twenty flags: a letter is missing or doubled, or a word is missing.
KNOWN = {*MEGATRON, *OWN, *(row.flag for row in flag_table())}
NAMES = sorted(name for name in KNOWN if len(name) > 4)[::20]
MISSPELLED = sorted(
    {name[: len(name) // 2] + name[len(name) // 2 + 1 :] for name in NAMES}
    | {name + name[-1] for name in NAMES}
    | {re.sub("-(num|use|size)-", "-", name) for name in NAMES}
)


@pytest.mark.parametrize(
    "beside", [[], ["--num-experts", "8", "--fp8-format", "hybrid"]], ids=["alone", "with experts"]
)
def test_a_name_that_no_program_has_is_refused(beside):
    for name in MISSPELLED:
        if canonical(name) not in KNOWN:
            outcome = read([name, "1", *beside]).outcomes[0]
            assert outcome.kind == UNKNOWN and " 1 is not a known flag; " in outcome.why, outcome


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--fp8-formt hybrid", "--fp8-format"),
        ("--moe-num-experts 64", "--num-experts"),
        ("--moe-router-top-k 2", "--moe-router-topk"),
        ("--n-routed-experts 64", "--num-experts"),
        ("--mtp-num-layer 1", "--mtp-num-layers"),
        ("--hybrid-layer-patern M*", "--hybrid-layer-pattern"),
    ],
)
def test_and_the_closest_name_is_given(words, meant):
    assert read(words.split()).problems == (f"{words} is not a known flag; did you mean {meant}?",)


# Flags that change how a model is trained, and not which model: without them the same model is trained.
TRAINING = {"--freeze-all-layers", "--moe-input-jitter-eps", "--moe-router-force-biased", "--tp-comm-overlap-cfg"}


def test_nobody_is_told_to_remove_a_part_of_the_model():
    removed = {row.flag for row in flag_table() if row.outcome == REFUSE and "remove" in row.instead}
    of_model = {row.flag for row in flag_table() if row.subject in ("Layers and kernels", "Mixture of experts")}
    formula = {row.flag for row in flag_table() if row.text in ("changes the layer's formula", "another loss")}
    assert removed & (of_model | formula) <= TRAINING | {"--moe-dispatch-fwd-dtype", "--moe-combine-bwd-dtype"}
    refused = read(["--use-mup", "--num-layers", "4", "--mtp-num-layers", "2", "--mtp-hsm"]).problems
    assert len(refused) == 2 and "remove" not in " ".join(refused)


@pytest.mark.parametrize("words", ["--recompute-norm -bf16", "--swiglu -bf16", "-bf16"])
def test_a_flag_with_one_dash_is_no_value(words):
    assert "-bf16 is not a known flag; did you mean --bf16?" in read(words.split()).problems


def test_a_flag_takes_no_more_values_than_it_has():
    assert read(["--timing-log-option", "minmax", "bf16"]).problems == (
        "--timing-log-option: 'bf16' belongs to no flag; remove it, or quote a value that has spaces",
    )
