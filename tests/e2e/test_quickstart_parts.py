"""The parts of the quickstart that are its own: everything else in it is a command that other tests run."""

import json
import math
import sys

import pytest
from transformers import AutoTokenizer

from megatron.command_line.read import parse, read
from megatron.config.rules.check import check, problems
from megatron.config.run import with_batch_of_answers
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.tooling import parts
from megatron.training.logging.line import format_evaluation
from tools import quickstart, quickstart_rl


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder of the test's own, with the quickstart's output folder in it."""
    monkeypatch.chdir(tmp_path)
    quickstart.LOGS.mkdir(parents=True)
    return tmp_path


def test_sources_are_every_file_but_installed_packages_in_one_fixed_order(tmp_path):
    for name in "abcdefgh":
        (tmp_path / f"{name}.py").write_text(f"# {name}\n")
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "latin.py").write_bytes(b"# caf\xe9\n")  # not UTF-8
    (tmp_path / "empty.py").write_text("\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("# other\n")
    texts = quickstart.read_sources(tmp_path)
    assert sorted(texts) == sorted([*(f"# {name}\n" for name in "abcdefgh"), "# caf\n"])
    assert texts == quickstart.read_sources(tmp_path)
    assert texts != sorted(texts)


def test_tokenizer_is_a_folder_that_transformers_loads(tmp_path):
    text = "def f(x):\n    return x + 1  # ÿ\n"
    quickstart.save_tokenizer([text] * 3, 280, tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())  # something was learnt
    assert tokenizer.eos_token == quickstart.END_OF_TEXT
    assert 256 < len(tokenizer) <= 280 and tokenizer.eos_token_id not in ids


def test_unigram_entropy(tmp_path):
    with IndexedDatasetWriter(tmp_path / "data", "uint16") as writer:
        writer.add_document([5, 5, 0])
        writer.add_document([])
        writer.add_document([5, 9, 5, 0, 0])
        writer.finalize()
    expected = -(4 / 8 * math.log(4 / 8) + 3 / 8 * math.log(3 / 8) + 1 / 8 * math.log(1 / 8))
    assert quickstart.unigram_entropy(IndexedDataset(tmp_path / "data")) == pytest.approx(expected, rel=1e-12)


def test_losses_are_read_from_the_logs_of_both_legs(tmp_path):
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    first.write_text(
        "using 2 processes\n iteration        5/     10 | lm loss: 7.5E+00 | loss scale: 1.0 |\n"
        + format_evaluation("iteration 5 on validation set", 7.25)
    )
    second.write_text(
        " iteration       10/     10 | lm loss: 6.5E+00 | loss scale: 1.0 |\n"
        " iteration       11/     12 | loss scale: 1.0 |\n"  # a window in which no step was applied
        + format_evaluation("the end of training, iteration 12", 6.25)
        + format_evaluation("iteration 12 on test set", 6.0)
    )
    assert quickstart.read_losses([first, second]) == ([(5, 7.5), (10, 6.5)], [(5, 7.25), (12, 6.25)])


class TestCommands:
    def test_a_printed_command_is_the_one_that_runs(self, here):
        words = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]
        words += ["--name", "two words", "--list", "a", "b", "--quote", "it's", "--flag"]
        text = parts.format_command(words, width=40)
        assert len(text.splitlines()) > 2
        script = here / "command.sh"
        script.write_text(text)
        assert parts.stream(["bash", str(script)], here / "log", terminal=False) == 0
        assert json.loads((here / "log").read_text()) == words[3:]

    def test_lines_are_as_long_as_they_may_be(self):
        text = parts.format_command(["run", *(f"--flag-{i} {i}" for i in range(20))], width=50)
        lines = text.splitlines()
        assert all(len(line) <= 50 for line in lines)
        assert all(line.endswith(" \\") for line in lines[:-1]) and not lines[-1].endswith("\\")

    @pytest.mark.parametrize("terminal", [True, False])
    def test_output_is_shown_and_kept(self, here, capfdbinary, terminal):
        program = "import sys; print(sys.stdout.isatty(), flush=True); print('to stderr', file=sys.stderr); sys.exit(3)"
        assert parts.stream([sys.executable, "-c", program], here / "log", terminal=terminal) == 3
        assert (here / "log").read_text() == f"{terminal}\nto stderr\n"
        assert capfdbinary.readouterr().out.replace(b"\r", b"") == f"{terminal}\nto stderr\n".encode()

    def test_of_a_line_drawn_over_the_log_keeps_the_last(self):
        drawn = "start\r\n\x1b[?25l\r\x1b[2Kiteration 1/9 \x1b[31m--\x1b[0m\r\x1b[2Kiteration 2/9\r\x1b[2K a log line\r\nend"
        assert parts.plain_text(drawn) == "start\n a log line\nend"

    def test_a_failing_command_names_its_log(self, here):
        with pytest.raises(parts.PartFailedError, match=r"exit code 3; .*quickstart/logs/part\.log"):
            parts.run_command([sys.executable, "-c", "raise SystemExit(3)"], quickstart.LOGS / "part.log")

    def test_every_training_command_is_accepted_by_the_parser(self):
        dense = f"{quickstart.DENSE} {quickstart.DATA_PARALLEL} --load x"
        experts = f"{quickstart.EXPERTS} {quickstart.DATA_PARALLEL}"
        for flags in (f"{quickstart.DENSE} {quickstart.TENSOR_PARALLEL}", dense, experts):
            words = quickstart.training(flags, quickstart.ITERATIONS)
            run = parse(words[words.index("pretrain_gpt.py") + 1 :], description="")
            check(run, 2)


class TestMain:
    def test_stops_at_the_first_part_that_fails_with_one_line(self, here, monkeypatch, capsys):
        def fail() -> None:
            raise parts.PartFailedError("no disk")

        def never() -> None:
            raise AssertionError("ran after a part that failed")

        monkeypatch.setattr(quickstart, "ROOT", here)
        monkeypatch.setattr(quickstart, "collect_corpus", lambda: print("collected"))
        monkeypatch.setattr(quickstart, "train_tokenizer", fail)
        monkeypatch.setattr(quickstart, "preprocess", never)
        assert quickstart.main([]) == 1
        out, err = capsys.readouterr()
        assert "collected" in out
        assert err.strip() == "quickstart stopped at 'Train a tokenizer': no disk"

    def test_starts_from_an_empty_folder(self, here, monkeypatch):
        (here / quickstart.OUT / "old").write_text("left over")

        def look() -> None:
            raise parts.PartFailedError(str((here / quickstart.OUT / "old").exists()))

        monkeypatch.setattr(quickstart, "ROOT", here)
        monkeypatch.setattr(quickstart, "collect_corpus", look)
        assert quickstart.main([]) == 1
        assert not (here / quickstart.OUT / "old").exists()


class TestOfRewards:
    """The quickstart of learning from rewards; its commands are those that other tests run."""

    def test_its_command_lines_hold_and_its_log_is_read(self, tmp_path):
        for command in (quickstart_rl.warm_up(1), quickstart_rl.learning(1)):
            mode = "--sft" if "finetune.py" in command else "--perform-rl-step"
            line = read([mode, *command[command.index("--device") :]])
            assert not line.problems and not problems(with_batch_of_answers(line.run), 1)
        log = tmp_path / "log"
        log.write_text(
            "evaluation at iteration 0 | reward: 0.155 | exact: 0.155 | answer length: 4 | 200 prompts\n"
            "rollout before step 1 | reward: 0.1 | exact: 9\n"
            "evaluation at iteration 10 | reward: 0.4 | exact: 4e-01 | answer length: 4 | 200 prompts\n"
        )
        assert quickstart_rl.exact_answers(log) == [(0, pytest.approx(15.5)), (10, pytest.approx(40))]
