import re
from pathlib import Path

import pytest

from megatron.base.errors import ConfigError
from megatron.base.version import VERSION
from megatron.command_line.flag_parser import (
    GROUP_TITLES,
    FlagParser,
    build_parser,
    path_word,
    print_arguments,
    within,
)  # fmt: skip
from megatron.command_line.read import parse
from megatron.config.interval import SIZE
from megatron.config.run import RunConfig, flag_fields


def test_help_lists_every_flag_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as stop:
        parse(["--help"], description="test")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in build_parser("test").spellings:
        assert flag in text
    for title in GROUP_TITLES.values():
        assert f"\n{title}:\n" in text
    assert "decay of the mean of gradients (default: 0.9)" in text
    assert "None)" not in text and "SUPPRESS" not in text


@pytest.mark.parametrize("ask", [lambda words: parse(words, description="test"), FlagParser().parse_args])
def test_the_version_is_printed_before_mistakes_and_has_its_place_in_the_changelog(ask, capsys):
    with pytest.raises(SystemExit) as stop:
        ask(["--version", "--lr", "x"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"Megatron-Patched {VERSION} (Python 3.")
    changelog = (Path(__file__).parents[3] / "CHANGELOG.md").read_text()
    assert re.search(r"^## ([\d.]+)", changelog, re.M)[1] == VERSION


class TestListing:
    def test_format(self):
        lines = print_arguments(parse(["--lr", "0.5"], description="test")).splitlines()
        assert lines[0] == "------------------------ arguments ------------------------"
        assert lines[-1] == "-------------------- end of arguments ---------------------"
        assert "  lr .............................................. 0.5" in lines
        assert len(lines) == len(flag_fields()) + 2

    def test_order_and_columns(self):
        body = print_arguments(RunConfig()).splitlines()[1:-1]
        names = [line.split()[0] for line in body]
        assert names == sorted(flag_fields(), key=str.lower)
        assert {line.index(" ", len(name) + 3) for line, name in zip(body, names)} == {51}


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
