"""Files that list datasets stand for the data paths in them."""

import json

import pytest

from megatron.command_line.read import read, words_without

MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"]
SPLITS = {"train": [0.3, "a", 0.7, "b"], "valid": ["c"], "test": None}


def line_of(tmp_path, flag, content, *more):
    file = tmp_path / "datasets"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read([*MODEL, flag, str(file), *more])


def test_words_of_a_file(tmp_path):
    line = line_of(tmp_path, "--data-args-path", "0.3 a/text\n 0.7\tb/text \n")
    assert not line.problems
    assert line.run.data.data_path == ("0.3", "a/text", "0.7", "b/text")
    assert "data_path" in line.run.given


def test_a_file_of_splits(tmp_path):
    line = line_of(tmp_path, "--per-split-data-args-path", json.dumps(SPLITS))
    assert not line.problems
    data = line.run.data
    assert data.train_data_path == ("0.3", "a", "0.7", "b") and data.valid_data_path == ("c",)
    assert data.test_data_path is None and data.data_path is None


def test_another_program_can_replace_the_paths(tmp_path):
    """As tools do that start a run of the same words on other data."""
    file = tmp_path / "datasets"
    file.write_text("a/text")
    assert words_without([*MODEL, "--data-args-path", str(file)], {"data_path"}) == MODEL


@pytest.mark.parametrize(
    ("flag", "content", "more", "problem"),
    [
        ("--data-args-path", " \n", (), "names no dataset"),
        ("--data-args-path", "a --save b", (), "the flag --save"),
        ("--data-args-path", b"\xff\xfe", (), "codec can't decode"),
        ("--data-args-path", "a", ("--data-path", "b"), "and --data-path name the datasets twice"),
        ("--per-split-data-args-path", "a b", (), "Expecting value"),
        ("--per-split-data-args-path", "[]", (), "no JSON object"),
        ("--per-split-data-args-path", "[" * 100000, (), "nested too deeply"),
        ("--per-split-data-args-path", '{"train": "a"}', (), '"train" is no list'),
        ("--per-split-data-args-path", '{"train": []}', (), '"train" names no dataset'),
        ("--per-split-data-args-path", '{"eval": ["a"]}', (), '"eval" is none of'),
        ("--per-split-data-args-path", '{"train": null}', (), "names no dataset"),
        ("--per-split-data-args-path", '{"train": ["a"]}', ("--train-data-path", "b"), "--train-data-path name"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, flag, content, more, problem):
    (line,) = line_of(tmp_path, flag, content, *more).problems
    assert line.startswith(f"{flag} {tmp_path / 'datasets'}") and problem in line


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        (line,) = read([*MODEL, "--data-args-path", str(path)]).problems
        assert line.startswith(f"--data-args-path {path}") and "\n" not in line
