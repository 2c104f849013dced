"""What a user can get wrong: one line on stderr, from one rank, exit code 2, nothing written."""

import json
import shutil

import pytest
from tokenizers import pre_tokenizers

from tests.e2e.helpers.launch import Torchrun, run
from tests.e2e.helpers.runs import MOCK, VOCAB, flags, write_dataset

TP2 = {"--tensor-model-parallel-size": 2}
SAVE = {"--save-interval": 2, "--train-iters": 4}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A dataset, and a run's checkpoints of iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("good")
    write_dataset(folder / "data", 1)
    done = run(flags(MOCK, SAVE, {"--save": folder / "save"}), folder / "log")
    assert done.codes == [0], done.text
    return folder


def refused(result, *parts):
    """Check how the run ended and return its lines, one for each mistake."""
    text = "".join(result.stderr)
    assert result.codes[0] == 2 and set(result.codes) <= {2, -15}, (result.codes, result.text)
    lines = text.splitlines()
    assert lines and text.endswith("\n") and all(line.startswith("error: ") for line in lines), result.text
    assert len(lines) == len(set(lines)), "each mistake is told once, by one rank"
    assert "Traceback" not in result.text
    missing = [part for part in parts if str(part) not in text]
    assert not missing, (missing, text)
    return text


FLAGS = {
    "heads": ({**TP2, "--num-attention-heads": 3, "--hidden-size": 48}, "--num-attention-heads 3", "-size 2"),
    "groups": (
        {
            **TP2,
            "--num-attention-heads": 6,
            "--hidden-size": 48,
            "--group-query-attention": None,
            "--num-query-groups": 3,
        },
        "--num-query-groups",
        "3 key/value heads",
        "-size 2",
    ),
    "vocabulary": (
        {**TP2, "--vocab-size": 63, "--make-vocab-size-divisible-by": 1},
        "padded vocabulary 63",
        "--make-vocab-size-divisible-by 2",
    ),
    "sequence": ({**TP2, "--sequence-parallel": None, "--seq-length": 31}, "--seq-length 31", "-size 2"),
    "world": ({"--tensor-model-parallel-size": 3}, "world size 2", "tp 3"),
    "no effect": (
        {"--ckpt-step": 4, "--strict-flags": None},
        "--ckpt-step has no effect: nothing is loaded",
        "add --load",
    ),
    "unknown": ({"--sequence-paralel": None}, "--sequence-paralel", "--sequence-parallel"),
    "value": ({"--lr": "fast"}, "--lr", "fast"),
}


@pytest.mark.parametrize("env", [{"RANK": "abc"}, {"RANK": 1}, {"WORLD_SIZE": ""}, {"LOCAL_RANK": -1}])
def test_an_environment_that_no_launcher_made(env, tmp_path):
    refused(
        run(flags(MOCK), tmp_path / "log", env=env), "the environment says RANK=", *(f"{n}={v}" for n, v in env.items())
    )


@pytest.mark.parametrize("case", FLAGS)
def test_flags_that_do_not_go_together(case, tmp_path):
    change, *parts = FLAGS[case]
    save = {"--save": tmp_path / "save", "--save-interval": 5}
    refused(run(flags(MOCK, save, change), tmp_path / "log", 2), *parts)
    assert not (tmp_path / "save").exists()


def test_real_torchrun_ends_with_our_line(tmp_path):
    """The message stands alone before the launcher's report, which quotes it as the cause."""
    result = Torchrun(flags(MOCK, {"--sequence-paralel": None}), tmp_path, 2).wait()
    ours, *report = result.stderr[0].splitlines()
    assert ours.startswith("error: --sequence-paralel") and result.codes == [1]  # torchrun's own code
    cause = "\n".join(report).partition("Root Cause")[2]
    assert "rank      : 0" in cause and "exitcode  : 2" in cause and ours in cause, result.stderr[0]
    assert "error: " not in result.stdout[0]


class TestData:
    def flags(self, tmp_path, prefix, **changes):
        save = {"--save": tmp_path / "save", "--save-interval": 5}
        return flags(save, {"--data-path": (prefix,), "--split": "1,0,0"}, changes)

    def copy(self, good, tmp_path):
        for suffix in ("idx", "bin"):
            shutil.copy(good / f"data.{suffix}", tmp_path / f"data.{suffix}")
        return tmp_path / "data"

    @pytest.mark.parametrize("suffix", ["idx", "bin"])
    @pytest.mark.parametrize("fault", ["missing", "truncated", "empty"])
    def test_files(self, suffix, fault, good, tmp_path):
        prefix = self.copy(good, tmp_path)
        path = tmp_path / f"data.{suffix}"
        if fault == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: 100 if fault == "truncated" else 0])
        refused(run(self.flags(tmp_path, prefix), tmp_path / "log"), path, "does not exist" * (fault == "missing"))
        assert not (tmp_path / "save").exists()

    def test_missing_on_one_rank_only(self, good, tmp_path):
        argv = self.flags(tmp_path, good / "data")
        env = {"FAULTY_RANK": 1, "FAULTY_PREFIX": tmp_path / "none"}
        result = run(argv, tmp_path / "log", 2, driver="tests.e2e.helpers.drivers:own_data_path", env=env)
        refused(result, "on rank 1: ", tmp_path / "none.idx", "does not exist")
        assert not (tmp_path / "save").exists()

    @pytest.mark.parametrize("workers", [0, 1])
    def test_token_ids_of_another_tokenizer(self, workers, good, tmp_path):
        """Found when the sample is read: by then the run has begun, and only this rank knows."""
        argv = self.flags(tmp_path, good / "data", **{"--vocab-size": VOCAB - 1, "--num-workers": workers})
        refused(run(argv, tmp_path / "log"), good / "data", f"token id {VOCAB - 1}", f"vocabulary of {VOCAB - 1}")

    def test_token_ids_of_another_tokenizer_on_one_rank(self, good, tmp_path):
        """The rank that reads them says what is wrong; the one that waits for it says for whom, and quotes it."""
        write_dataset(tmp_path / "large", 1, vocab=2 * VOCAB)
        argv = self.flags(tmp_path, good / "data")
        env = {"FAULTY_RANK": 1, "FAULTY_PREFIX": tmp_path / "large"}
        result = run(argv, tmp_path / "log", 2, driver="tests.e2e.helpers.drivers:own_data_path", env=env)
        assert result.codes == [1, 2] and "Traceback" not in result.text
        message = result.stderr[1].removeprefix("error: ").strip()
        assert f"{tmp_path / 'large.bin'} holds token id" in message
        assert result.stderr[0].startswith("error on rank 0: ") and f"rank 1 ended: {message}" in result.stderr[0]


class TestTokenizer:
    def test_larger_than_the_vocabulary(self, good, tmp_path):
        tokens = [*pre_tokenizers.ByteLevel.alphabet(), "<|endoftext|>"]
        (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
        kind = {"--tokenizer-type": "GPT2BPETokenizer", "--save": tmp_path / "save", "--save-interval": 5}
        files = {"--vocab-file": tmp_path / "vocab.json", "--merge-file": tmp_path / "merges.txt"}
        result = run(flags(MOCK, kind, files), tmp_path / "log")
        refused(result, f"the tokenizer has {len(tokens)} ids", f"--vocab-size is {VOCAB}")
        assert not (tmp_path / "save").exists()

    @pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer", "GPT2BPETokenizer"])
    def test_files_that_are_missing(self, kind, tmp_path):
        gone = tmp_path / "gone"
        files = {"--tokenizer-model": gone}
        if kind == "GPT2BPETokenizer":
            files = {"--vocab-file": gone, "--merge-file": gone}
        refused(run(flags(MOCK, {"--tokenizer-type": kind}, files), tmp_path / "log"), gone)


class TestCheckpoint:
    def flags(self, tmp_path, load, **changes):
        save = {"--save": tmp_path / "save", "--load": load}
        return flags(MOCK, SAVE, save, changes)

    def copy(self, good, tmp_path):
        shutil.copytree(good / "save", tmp_path / "copy")
        return tmp_path / "copy" / "iter_0000004"

    @pytest.mark.parametrize(
        ("change", "parts"),
        [
            ({"--num-layers": 3}, ["another model", "num_layers is 2 there and 3 here", "--use-checkpoint-args"]),
            ({"--bf16": None}, ["float32 weights", "bfloat16", "leave out --bf16"]),
            ({"--optimizer": "sgd"}, ["optimizer adam, not sgd", "--no-load-optim"]),
            ({"--train-iters": 8}, ["decay_length: 4 saved, 8 asked", "--override-opt_param-scheduler"]),
            ({"--ckpt-step": 3}, ["no checkpoint of iteration 3", "2, 4"]),
        ],
        ids=lambda value: next(iter(value)).strip("-") if isinstance(value, dict) else "",
    )
    def test_of_another_run(self, change, parts, good, tmp_path):
        refused(run(self.flags(tmp_path, good / "save", **change), tmp_path / "log"), *parts)
        assert not (tmp_path / "save").exists()

    def test_none_there(self, tmp_path):
        argv = self.flags(tmp_path, tmp_path / "none", **{"--exit-on-missing-checkpoint": None})
        refused(run(argv, tmp_path / "log"), tmp_path / "none", "holds no checkpoint", "give another folder")

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_altered_byte(self, world_size, good, tmp_path):
        folder = self.copy(good, tmp_path)
        (path,) = folder.glob("*.safetensors")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        result = run(self.flags(tmp_path, folder.parent), tmp_path / "log", world_size)
        refused(result, path, "--ckpt-step 2 loads")
        assert not (tmp_path / "save").exists()
        if world_size == 1:
            good_step = self.flags(tmp_path, folder.parent, **{"--ckpt-step": 2})
            assert run(good_step, tmp_path / "log").codes == [0]  # the advice works

    @pytest.mark.parametrize("name", ["__0_0.safetensors", "metadata.json"])
    @pytest.mark.parametrize("fault", ["missing", "truncated"])
    def test_files(self, name, fault, good, tmp_path):
        path = self.copy(good, tmp_path) / name
        if fault == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:1000])
        refused(run(self.flags(tmp_path, path.parents[1]), tmp_path / "log"), path, "--ckpt-step 2")


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    save = {"--save": tmp_path / "file" / "save", "--save-interval": 5}
    refused(run(flags(MOCK, save), tmp_path / "log"), f"--save {save['--save']} cannot be written", "another folder")
    refused(run(flags(MOCK, {"--tensorboard-dir": tmp_path / "file" / "x"}), tmp_path / "log", 2), "--tensorboard-dir")
