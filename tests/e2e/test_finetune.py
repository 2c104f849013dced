"""finetune.py as a user runs it: instruction pairs from the standard library, held-out loss, resume, layouts,
mistakes."""

import ast
import json
import shutil
import sysconfig
from pathlib import Path

import pytest

from megatron.core.datasets.sft import Conversations
from megatron.core.datasets.sft_preprocess import SFTOptions, preprocess_sft
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import checkpoint, evaluations, figures, flags, lines
from tests.unit.datasets.chat import CHATML, messages, tokenizer_folder
from tests.unit.datasets.helpers import write_documents

MODULES = ("argparse", "ast", "calendar", "cmd", "configparser", "difflib", "fractions", "heapq", "inspect", "shutil")
MODULES += ("statistics", "tarfile")
TEXTS = ("bdb", "cgi", "code", "csv", "dis", "ftplib", "glob", "gzip", "pdb", "pickle", "random", "threading", "uuid")
PAIRS, VOCAB, SEQ, RELATIVE = 200, 640, 256, 1e-5
SHAPE = {
    "--vocab-size": VOCAB,
    "--hidden-size": 48,
    "--seq-length": SEQ,
    "--micro-batch-size": 2,
    "--global-batch-size": 4,
    "--lr": 1e-2,
}
TRAIN = {"--train-iters": 40, "--save-interval": 20, "--eval-iters": 4, "--eval-interval": 20, "--split": "85,15,0"}
DRIVER = "tests.e2e.helpers.drivers:finetune"


def source_of(module):
    return Path(sysconfig.get_path("stdlib"), f"{module}.py").read_text()


def instruction_pairs():
    """(what a function is asked to do, its source) of the standard library's documented functions."""
    found = []
    for name in MODULES:
        source = source_of(name)
        text = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)):
                body = "\n".join(line.rstrip() for line in text[node.lineno - 1 : node.end_lineno])
                found.append((f"Write {node.name} of {name}: {said.splitlines()[0]}", body))
    return [pair for pair in found if len(pair[1]) < 700][:PAIRS]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the dataset, a checkpoint of pre-training, and the flags of both."""
    folder = tmp_path_factory.mktemp("finetune")
    pairs = instruction_pairs()
    assert len(pairs) == PAIRS
    with open(folder / "pairs.jsonl", "w") as file:
        file.writelines(json.dumps({"messages": messages(*pair)}) + "\n" for pair in pairs)
    tokenizer = tokenizer_folder(
        folder / "tokenizer", CHATML, texts=[" ".join(pair) for pair in pairs], vocabulary=VOCAB
    )
    options = SFTOptions(
        input=(str(folder / "pairs.jsonl"),), output_prefix=str(folder / "chat"), workers=1, seq_length=SEQ
    )
    preprocess_sft(options, HuggingFaceTokenizer(tokenizer))
    write_documents(folder / "text", HuggingFaceTokenizer(tokenizer).encode_batch([source_of(name) for name in TEXTS]))
    pretraining = {"--data-path": (folder / "text",), "--split": "1,0,0", "--save": folder / "base"}
    done = run(flags(SHAPE, pretraining, {"--train-iters": 60, "--save-interval": 60}), folder / "log-base")
    assert done.codes == [0], done.text
    return folder


def tune(made, tmp_path, name, *changes, world_size=1, without=()):
    common = {"--data-path": (made / "chat",), "--data-cache-path": tmp_path / "cache", **TRAIN}
    argv = flags(SHAPE, common, {"--load": made / "base", "--save": tmp_path / name}, *changes, without=without)
    logs = len(list(tmp_path.glob(f"log-{name}-*")))
    return run(argv, tmp_path / f"log-{name}-{logs}", world_size, driver=DRIVER)


@pytest.fixture(scope="module")
def straight(made, tmp_path_factory):
    """(result, folder of checkpoints) of the whole run in one go."""
    folder = tmp_path_factory.mktemp("straight")
    done = tune(made, folder, "save")
    assert done.codes == [0], done.text
    return done, folder / "save"


def test_held_out_loss_falls(made, straight, tmp_path):
    """The weights are those of pre-training, the progress is not."""
    before = tune(made, tmp_path, "none", {"--skip-train": None}, without=("--save", "--save-interval"))
    assert before.codes == [0], before.text
    (first,) = evaluations(before.stdout[0])
    done, _ = straight
    output = done.stdout[0]
    assert "starting at iteration 0 with the weights of" in output and "packing efficiency" in output
    assert [line["iteration"] for line in lines(output)] == list(range(1, 41))
    found = evaluations(output)
    assert [where for where, _ in found] == ["iteration 20", "iteration 40"]
    print("held-out loss before", first[1], "after", found[1][1])
    assert found[0][1] < first[1] and found[1][1] < 0.97 * first[1], (first, found)


def test_the_same_command_goes_on_bit_for_bit(made, straight, tmp_path):
    whole, saved = straight
    first = tune(made, tmp_path, "save", {"--exit-interval": 20})
    second = tune(made, tmp_path, "save")
    assert first.codes == second.codes == [0], first.text + second.text
    assert "going on from this run's own checkpoint" in second.stdout[0]
    assert figures(whole.stdout[0]) == {**figures(first.stdout[0]), **figures(second.stdout[0])}
    assert evaluations(whole.stdout[0]) == evaluations(first.stdout[0]) + evaluations(second.stdout[0])
    ends = [checkpoint(folder / "iter_0000040")[0] for folder in (saved, tmp_path / "save")]
    assert all(tensor.equal(ends[1][name]) for name, tensor in ends[0].items())
    third = tune(made, tmp_path, "save")
    assert third.codes == [0] and "nothing is left to train: iteration 40 of 40 is done" in third.stdout[0]


def test_pretrained_checkpoint(made, straight, tmp_path):
    """Says the same in another way, with or without --load; pre-training knows it, too."""
    whole, _ = straight
    base = {"--pretrained-checkpoint": made / "base"}
    first = tune(made, tmp_path, "save", base, {"--exit-interval": 5}, without=("--load",))
    second = tune(made, tmp_path, "save", base, {"--load": tmp_path / "save", "--exit-interval": 20})
    third = tune(made, tmp_path, "save", base, without=("--load",))
    parts = (first, second, third)
    assert [part.codes for part in parts] == [[0]] * 3, "".join(part.text for part in parts)
    together = {}
    for part in parts:
        together |= figures(part.stdout[0])
    assert together == figures(whole.stdout[0])
    again = {"--data-path": (made / "text",), "--split": "1,0,0", "--train-iters": 4, **base, "--save": tmp_path / "p"}
    two = [run(flags(SHAPE, again, {"--save-interval": 2}, more), tmp_path / f"log-p{number}")
           for number, more in enumerate(({"--exit-interval": 2}, {}))]  # fmt: skip
    assert [done.codes for done in two] == [[0], [0]], two[0].text + two[1].text
    assert [line["iteration"] for done in two for line in lines(done.stdout[0])] == [1, 2, 3, 4]


TP2 = {"--tensor-model-parallel-size": 2, "--sequence-parallel": None}
LAYOUTS = {
    "dp2": {},
    "tp2": TP2,
    "overlapped": {"--overlapped-distributed-optimizer": None},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_the_same_under_other_layouts(made, straight, tmp_path, layout):
    done = tune(made, tmp_path, "save", {"--exit-interval": 6}, LAYOUTS[layout], world_size=2)
    assert done.codes == [0, 0], done.text
    expected = [line["lm loss"] for line in lines(straight[0].stdout[0])][:6]
    assert [line["lm loss"] for line in lines(done.stdout[0])] == pytest.approx(expected, rel=RELATIVE)


def test_one_conversation_a_sample(made, tmp_path):
    changes = {"--no-sft-packing": None, "--train-iters": 3, "--calculate-per-token-loss": None}
    done = tune(made, tmp_path, "save", changes)
    assert done.codes == [0], done.text
    count = len(Conversations(str(made / "chat")))
    assert (
        f"{round(0.85 * count)} conversations" in done.stdout[0]
        and f"in {round(0.85 * count)} samples" in done.stdout[0]
    )


def refused(result, *parts):
    text = "".join(result.stderr)
    assert result.codes == [2] and text.startswith("error: ") and text.count("\n") == 1, result.text
    assert [part for part in parts if str(part) not in text] == [], text


@pytest.mark.parametrize(
    ("changes", "without", "says"),
    [
        ({"--mock-data": None}, ("--data-path", "--split"), "--mock-data makes up documents"),
        ({"--seq-length": 8}, (), "fits in --seq-length 8"),
        ({"--finetune": None, "--pretrained-checkpoint": "x"}, (), "remove --finetune"),
        ({"--pretrained-checkpoint": "x"}, ("--load",), "--pretrained-checkpoint x holds no checkpoint"),
    ],
    ids=["mock", "length", "finetune", "none there"],
)
def test_mistakes(made, tmp_path, changes, without, says):
    refused(tune(made, tmp_path, "save", changes, without=without), says)


def test_a_dataset_of_documents(made, tmp_path):
    done = tune(made, tmp_path, "save", {"--data-path": (made / "text",)})
    refused(done, made / "text", "is not an instruction dataset", "tools/preprocess_sft.py")


def test_saving_among_the_checkpoints_of_pretraining(made, tmp_path):
    shutil.copytree(made / "base", tmp_path / "base")
    before = sorted(path.name for path in (tmp_path / "base").iterdir())
    done = tune(made, tmp_path, "base", {"--load": tmp_path / "base"})
    refused(done, "is a checkpoint of pre-training", "give --save")
    assert sorted(path.name for path in (tmp_path / "base").iterdir()) == before


def test_no_packing_is_a_flag_of_fine_tuning(made, tmp_path):
    argv = flags(SHAPE, {"--data-path": (made / "text",), "--no-sft-packing": None})
    refused(run(argv, tmp_path / "log"), "--no-sft-packing has no effect", "use finetune.py")
