"""A sample of the campaign, and cases that once ended with a traceback, began to work or were said to have worked."""

import importlib.util

import pytest

from tests.fuzz.bad_input import CAMPAIGN, Case, Change, check
from tests.fuzz.campaign import expect_none_fails
from tests.fuzz.programs import PROGRAMS


def changed(program, line, *pairs):
    """A good command line with flags set."""
    return Case(program, line, tuple(Change("set", flag, tuple(words)) for flag, *words in pairs))


PRETRAIN, ALIGN, CONVERT = "pretrain_gpt.py", "tools/checkpoint/align.py", "tools/checkpoint/convert.py"
GENERATE, MERGE = "tools/generate.py", "tools/merge_datasets.py"
REFUSED = {
    "--load of a file": changed(GENERATE, 0, ("--load", "{file}")),
    "--load of a file, training": changed(PRETRAIN, 2, ("--load", "{file}")),
    "--load of a folder without permission": changed(PRETRAIN, 2, ("--load", "{shut_folder}")),
    "tracker without permission": changed(
        GENERATE, 0, ("--load", "{checkpoint_latest_checkpointed_iteration_txt_shut}")
    ),
    "tracker that is a folder": changed(
        GENERATE, 0, ("--load", "{checkpoint_latest_checkpointed_iteration_txt_folder}")
    ),
    "metadata.json without permission": changed(GENERATE, 0, ("--load", "{checkpoint_metadata_json_shut}")),
    "metadata.json that is a folder": changed(GENERATE, 0, ("--load", "{checkpoint_metadata_json_folder}")),
    ".idx without permission": changed(PRETRAIN, 1, ("--data-path", "{data_datasets_data_idx_shut}")),
    ".bin without permission": changed(PRETRAIN, 1, ("--data-path", "{data_datasets_data_bin_shut}")),
    "a folder of TensorBoard's without permission": changed(PRETRAIN, 0, ("--tensorboard-dir", "{shut_folder}")),
    "datasets in a folder without permission": changed(MERGE, 0, ("--input", "{shut_folder}")),
    "no training data in the split": changed(PRETRAIN, 1, ("--split", "0,0,1")),
    "empty cached index": changed(PRETRAIN, 4, ("--data-cache-path", "{cache_empty}")),
    "align, a file": changed(ALIGN, 0, ("--hf", "{file}")),
    "align, no folder": changed(ALIGN, 0, ("--hf", "{missing}")),
    "align, pickled weights": changed(ALIGN, 0, ("--hf", "{hf_pickled}")),
    "align, weights without permission": changed(ALIGN, 0, ("--hf", "{hf_model_safetensors_shut}")),
    "layout_parity.py without flags": Case(
        "tools/layout_parity.py", 0, tuple(Change("drop", word) for word in PROGRAMS["tools/layout_parity.py"][0])
    ),
    "quickstart.py with a flag": Case("tools/quickstart.py", 0, (Change("add", "--bogus"),)),
    "convert, tp -2": changed(CONVERT, 1, ("--target-tensor-parallel-size", "-2")),
    "convert, tp 0": changed(CONVERT, 1, ("--target-tensor-parallel-size", "0")),
    "convert, weights without permission": changed(CONVERT, 2, ("--load-dir", "{checkpoint___0_0_safetensors_shut}")),
    "999999 workers": changed(PRETRAIN, 1, ("--num-workers", "999999")),
    "999999 workers, preprocessing": changed("tools/preprocess_data.py", 0, ("--workers", "999999")),
    "a vocabulary beyond memory": changed(PRETRAIN, 0, ("--vocab-size", "100000000"), ("--hidden-size", "100000000")),
    "a seed beyond 64 bits": changed(PRETRAIN, 0, ("--seed", "1" + "0" * 40)),
    "layers without end": changed(PRETRAIN, 0, ("--num-layers", "999999")),
    "microbatches without end": changed(PRETRAIN, 0, ("--global-batch-size", "100000000")),
    "a line break in a value": changed(PRETRAIN, 0, ("--normalization", "a\nb")),
    "bytes that are no text": changed(PRETRAIN, 0, ("--save", "\udcff")),
    "bytes that are no text, in a prompt": changed(GENERATE, 0, ("--prompt", "\udcff")),
    "an empty path": changed("tools/evaluate.py", 0, ("--load", "")),
    "a picture beside a trace that cannot be written": changed("tools/plan.py", 0, ("--trace", "{folder}")),
    "scores that cannot be written": changed("tools/evaluate.py", 1, ("--output", "{folder}")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_one_line(name, tmp_path):
    assert check(REFUSED[name], tmp_path) == "refused"


def test_a_good_command_line_works(tmp_path):
    """Of the tool whose runs are replaced by one that trains in its own process."""
    assert check(Case("tools/layout_parity.py", 0, ()), tmp_path) == "works"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_package_that_is_missing_is_noticed_before_anything_is_written(tmp_path):
    assert check(changed(PRETRAIN, 0, ("--wandb-project", "mine")), tmp_path) == "refused"


def test_a_sample():
    counts = expect_none_fails(CAMPAIGN, 1, 12)
    assert counts.total() == 12
