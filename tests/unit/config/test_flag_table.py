"""The table of flags that other Megatrons have: complete, free of contradictions, and true of this program's flags."""

import re
from pathlib import Path

import pytest

from megatron.command_line.flag_parser import build_parser
from megatron.command_line.read import canonical, read
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
    assert not [row.flag for row in flag_table() if row.outcome != READ and not row.values and row.flag in OWN]


def test_rows_are_whole():
    for row in flag_table():
        assert (
            row.subject
            and row.flag.startswith("--")
            and row.outcome in OUTCOMES
            and re.fullmatch(r"\d|[+*]", row.arity)
        )
        assert row.outcome == READ or row.text or row.outcome == ALIAS, row
        assert bool(row.here) or row.outcome not in (NOOP, ALIAS), row
        assert not row.values or row.arity != "0", f"{row.flag} takes no value"
        assert "_" not in row.flag or row.outcome == READ


def test_no_row_hides_another():
    keys = [(row.flag, value, row.beside) for row in flag_table() for value in row.values or ("",)]
    assert len(keys) == len(set(keys)), sorted({key for key in keys if keys.count(key) > 1})


def test_flags_that_rows_name_exist():
    for row in flag_table():
        for flag in FLAGS_IN_TEXT.findall(f"{row.here} {row.text}"):
            known = flag in OWN or is_listed(flag) or flag == "--max-restarts"  # torchrun's
            assert known, f"{flag} in the row of {row.flag}"
        if row.beside:
            other = row.beside.partition("=")[0]
            assert other in OWN or is_listed(other)


@pytest.mark.parametrize(
    "row", [row for row in flag_table() if row.outcome == ALIAS], ids=lambda row: " ".join([row.flag, *row.values[:1]])
)
def test_an_alias_is_understood(row):
    beside, _, value = row.beside.partition("=")
    names = set(FLAGS_IN_TEXT.findall(row.here)) - {beside}
    assert names <= OWN
    needed = [beside, value or "8"] if beside else []
    # One of these is a value of the flag that is meant.
    words = row.values or (
        ("8", "0.5", "uniform", "selective", "rope") if "{" in row.here and row.arity != "0" else ("",)
    )
    lines = [read([row.flag, *filter(None, [word]), *needed]) for word in words]
    understood = [line for line in lines if not line.problems]
    assert understood and (not row.values or understood == lines)
    assert all(line.outcomes[0].kind == ALIAS and line.run.given for line in understood)


def test_certain_values_go_before_others_and_then_flags_beside():
    assert find_row("--main-grads-dtype", ("fp32",), {}).outcome == SAME
    assert find_row("--main-grads-dtype", ("bf16",), {}).outcome == REFUSE
    assert find_row("--moe-input-jitter-eps", ("0.1",), {}).outcome == NOOP
    assert find_row("--moe-input-jitter-eps", ("0.1",), {"--num-experts": ("8",)}).outcome == REFUSE
    assert find_row("--attention-backend", ("local",), {}).outcome == ALIAS
    assert find_row("--attention-backend", ("flash",), {}).outcome == READ
    assert find_row("--no-such-flag", (), {}) is None
