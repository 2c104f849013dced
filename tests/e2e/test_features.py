"""What flags of logging, saving, evaluation and batches make a whole run do."""

import json
import math
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.helpers.launch import run, start
from tests.e2e.helpers.runs import MOCK, SEQ, checkpoint, evaluations, figures, flags, lines, write_dataset
from tests.unit.training.log_parsers import ITERATION, OTHERS, flagscale_losses, read

TIMER = OTHERS["timer"]
# Rows of the embedding that no token of a batch names have no gradient.
WIDE = {"--vocab-size": 256, "--untie-embeddings-and-output-weights": None}
TP2 = {"--tensor-model-parallel-size": 2, "--sequence-parallel": None}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One run on two processes with everything that writes or prints something."""
    folder = tmp_path_factory.mktemp("trained")
    options = {
        **{"--save": folder / "save", "--save-interval": 2, "--save-retain": 2, "--log-progress": None},
        **{"--eval-interval": 5, "--eval-iters": 2, "--loss-curve": folder / "pictures" / "loss.png"},
        **{"--tensorboard-dir": folder / "events", "--timing-log-level": 2, "--log-interval": 2},
        **{"--log-params-norm": None, "--log-num-zeros-in-grad": None, "--log-throughput": None, "--print-flags": None},
    }
    result = run(flags(MOCK, WIDE, TP2, options), folder / "log", 2)
    assert result.codes == [0, 0] and result.stderr == ["", ""], result.text
    return folder, result


class TestOneRun:
    def test_only_the_newest_checkpoints_stay(self, trained):
        folder, _ = trained
        left = sorted(path.name for path in (folder / "save").glob("iter_*"))
        assert left == ["iter_0000008", "iter_0000010"]
        assert (folder / "save" / "latest_checkpointed_iteration.txt").read_text() == "10\n"

    def test_progress_file(self, trained):
        folder, _ = trained
        text = (folder / "save" / "progress.txt").read_text().splitlines()
        assert ["Starting job" in line for line in text] == [True] + [False] * 5
        saved = [re.search(r"Saved checkpoint\tIteration: (\d+)", line) for line in text[1:]]
        assert [int(match[1]) for match in saved] == [2, 4, 6, 8, 10]
        assert all("# GPUs: 2" in line for line in text)

    def test_parameters_norm_is_that_of_the_whole_model(self, trained):
        """Replicated weights count once, sharded ones in full."""
        folder, result = trained
        tensors, _ = checkpoint(folder / "save" / "iter_0000010")
        squares = [tensor.double().square().sum() for name, tensor in tensors.items() if name.startswith("model/")]
        last = lines(result.stdout[0])[-1]
        assert last["params norm"] == pytest.approx(float(torch.stack(squares).sum().sqrt()), abs=2e-3)

    def test_zeros_in_the_gradient(self, trained):
        """Whole rows of the embedding, 32 wide, each counted once though tp cuts the matrix."""
        _, result = trained
        for line in lines(result.stdout[0]):
            assert 0 < line["num zeros"] < 32 * 256 and line["num zeros"] % 32 == 0

    def test_timers(self, trained):
        _, result = trained
        blocks = result.stdout[0].split("(min, max) time across ranks (ms):")[1:]
        blocks = [block for block in blocks if block.startswith("\n    forward-backward") or "batch-generator" in block]
        assert len(blocks) == 5
        for name in ("forward-backward", "all-grads-sync", "optimizer", "batch-generator", "forward-compute"):
            times = [re.search(rf"^    {name} \.+: \(([\d.]+), ([\d.]+)\)$", block, re.MULTILINE) for block in blocks]
            assert all(0 <= float(match[1]) <= float(match[2]) for match in times), name

    def test_tensorboard(self, trained):
        folder, result = trained
        events = EventAccumulator(str(folder / "events"))
        events.Reload()
        tags = set(events.Tags()["scalars"])
        assert {"lm loss", "lm loss vs samples", "grad-norm", "learning-rate", "params-norm", "num-zeros"} <= tags
        assert {"batch-size", "lm loss validation", "forward-backward-time", "throughput"} <= tags
        losses = {event.step: event.value for event in events.Scalars("lm loss")}
        assert list(losses) == list(range(1, 11))
        printed = [line["lm loss"] for line in lines(result.stdout[0])]
        assert [(losses[n - 1] + losses[n]) / 2 for n in (2, 4, 6, 8, 10)] == pytest.approx(printed, rel=1e-6)
        assert {event.value for event in events.Scalars("world-size")} == {2.0}
        # As Megatron-LM: with each log line, seconds per step of the slowest rank.
        slowest = [
            found["most"] / 1000 for found in read(TIMER, result.stdout[0]) if found["name"] == "forward-backward"
        ]
        times = [(event.step, event.value) for event in events.Scalars("forward-backward-time")]
        assert [step for step, _ in times] == [2, 4, 6, 8, 10]
        assert [value for _, value in times] == pytest.approx(slowest, abs=1e-5)
        validation = [(event.step, event.value) for event in events.Scalars("lm loss validation")]
        assert [step for step, _ in validation] == [5, 10]

    def test_public_parsers_of_megatron_logs(self, trained):
        """Each finds the same numbers as our own reader, once for each line."""
        folder, result = trained
        text = result.stdout[0]
        own = lines(text)
        names = {
            "iteration": "iteration",
            "ms": "elapsed time per iteration (ms)",
            "loss": "lm loss",
            "norm": "grad norm",
        }
        for parser, pattern in ITERATION.items():
            found = read(pattern, text)
            assert [entry["iteration"] for entry in found if "iteration" in entry] in ([], [2, 4, 6, 8, 10]), parser
            for name, field in names.items():
                values = [entry[name] for entry in found if name in entry]
                assert values in ([], [line[field] for line in own]), (parser, name)
        assert flagscale_losses(text) == [line["lm loss"] for line in own]
        saves = [2, 4, 6, 8, 10]
        found = {kind: read(pattern, text) for kind, pattern in OTHERS.items()}
        assert [entry["iteration"] for entry in found["saving"]] == saves
        assert [(entry["iteration"], entry["path"]) for entry in found["saved"]] == [
            (n, str(folder / "save")) for n in saves
        ]
        assert [entry["iteration"] for entry in found["validation"]] == [5, 10]
        assert [(entry["rank"], entry["iteration"]) for entry in found["memory"]] == [(0, 2), (1, 2)]
        assert len(found["parameters"]) == len(found["footprint"]) == 1 and found["argument"] == [{"length": 32}]
        timed = [entry["name"] for entry in found["timer"]]
        assert timed.count("save-checkpoint") == 5 and timed.count("forward-backward") == 5

    def test_loss_curve(self, trained):
        folder, _ = trained
        assert (folder / "pictures" / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    def test_evaluations_and_the_final_test(self, trained):
        _, result = trained
        found = evaluations(result.stdout[0])
        assert [where for where, _ in found] == ["iteration 5", "iteration 10", "iteration 10 on test set"]
        assert all(0 < loss < math.log(256) + 0.5 for _, loss in found)

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_evaluation_alone(self, world_size, trained, tmp_path):
        """Under any layout the same losses; no length, learning rate or optimizer is needed, and nothing is saved."""
        folder, result = trained
        load = {"--load": folder / "save", "--skip-train": None, "--eval-iters": 2}
        argv = flags(MOCK, WIDE, load, TP2 if world_size == 2 else {}, without=("--train-iters", "--lr"))
        alone = run(argv, tmp_path / "log", world_size)
        assert alone.codes == [0] * world_size and not lines(alone.stdout[0]), alone.text
        (where, valid), (test_where, test) = evaluations(alone.stdout[0])
        assert (where, test_where) == ("iteration 10 on validation set", "iteration 10 on test set")
        assert test == pytest.approx(evaluations(result.stdout[0])[-1][1], rel=1e-5)
        assert valid == pytest.approx(_evaluated_once(trained, tmp_path), rel=1e-5)


def _evaluated_once(trained, tmp_path):
    """Validation loss of the same checkpoint on the first validation samples, by a run that begins there."""
    folder, _ = trained
    options = {"--load": folder / "save", "--finetune": None, "--train-iters": 1, "--lr": 0, "--eval-iters": 2}
    result = run(flags(MOCK, WIDE, options), tmp_path / "log-once")
    assert result.codes == [0], result.text
    return evaluations(result.stdout[0])[0][1]


@pytest.mark.parametrize("own", [False, True])
def test_heartbeat_files(own, tmp_path):
    folder = tmp_path / "beats" if own else tmp_path / "save" / "heartbeat"
    where = {"--heartbeat-dir": folder} if own else {"--save": tmp_path / "save", "--save-interval": 100000}
    job = start(flags(MOCK, where, {"--train-iters": 100000, "--lr-decay-style": "constant"}), tmp_path / "log", 2)
    job.wait_for("iteration       40/")
    beats = [json.loads((folder / f"rank_0000{rank}.json").read_text()) for rank in range(2)]
    job.kill()
    assert [beat["rank"] for beat in beats] == [0, 1] and [beat["pid"] for beat in beats] == job.pids
    phases = {"set-up", "train", "batch-generator", "forward-backward", "all-grads-sync", "optimizer", "read-step"}
    assert {beat["phase"].split(",")[0] for beat in beats} <= phases  # behind it: the action
    assert all(beat["sequences"]["world"] > 0 for beat in beats)
    assert (tmp_path / "save").exists() != own


def test_samples_and_a_batch_that_ramps_up(tmp_path):
    """4 steps of 4 samples, then 8 a step, to 52 samples: the last 4 do not fill a step. A stop on the way is no seam,
    and neither is a schedule that says the same in tokens."""
    ramp = {
        "--train-samples": 52,
        "--rampup-batch-size": (4, 4, 16),
        "--save": tmp_path / "save",
        "--save-interval": 50,
    }
    plain = flags(MOCK, ramp, without=("--train-iters",))
    straight = run(plain, tmp_path / "log")
    assert straight.codes == [0], straight.text
    found = lines(straight.stdout[0])
    assert [line["global batch size"] for line in found] == [4] * 4 + [8] * 4
    assert [line["consumed samples"] for line in found] == [4, 8, 12, 16, 24, 32, 40, 48]
    assert all(math.isfinite(line["lm loss"]) for line in found)
    parts = {}
    stops = (
        {"--exit-interval": 3},
        {"--exit-interval": 6, "--load": tmp_path / "other"},
        {"--load": tmp_path / "other"},
    )
    steps = {"--step-batch-size-schedule": f"0:4 {16 * SEQ}:8"}
    for stop, sizes in zip(stops, (ramp, ramp | steps, ramp | steps), strict=True):
        instead = ("--rampup-batch-size", "--global-batch-size") if sizes is not ramp else ()
        argv = flags(MOCK, sizes, {"--save": tmp_path / "other"}, stop, without=("--train-iters", *instead))
        part = run(argv, tmp_path / "log2")
        assert part.codes == [0], part.text
        parts |= figures(part.stdout[0])
    assert parts == figures(straight.stdout[0])


def test_samples_when_the_batch_grows_on_resume(tmp_path):
    """24 samples in steps of 4, then steps of 8: three more fit into 50."""
    length = {"--train-samples": 50, "--save": tmp_path / "save", "--save-interval": 6}
    first = {"--global-batch-size": 4, "--exit-interval": 6}
    assert run(flags(MOCK, length, first, without=("--train-iters",)), tmp_path / "log").codes == [0]
    resumed = run(flags(MOCK, length, {"--load": tmp_path / "save"}, without=("--train-iters",)), tmp_path / "log2")
    assert resumed.codes == [0], resumed.text
    found = lines(resumed.stdout[0])
    assert [(line["iteration"], line["consumed samples"]) for line in found] == [(7, 32), (8, 40), (9, 48)]
    assert {line["train iterations"] for line in found} == {9}


def test_loss_per_token_and_masked_ends_of_documents(tmp_path):
    """The two ways to weigh differ where samples have different numbers of tokens; each is the same on 1 and 2
    ranks."""
    data = {"--data-path": (write_dataset(tmp_path / "data", 3),), "--split": "1,0,0", "--train-iters": 4}
    data |= {"--eod-mask-loss": None, "--reset-position-ids": None, "--reset-attention-mask": None}
    found = {}
    for name, per_token in (("sample", {}), ("token", {"--calculate-per-token-loss": None})):
        for world_size in (1, 2):
            result = run(flags(data, per_token), tmp_path / "log", world_size)
            assert result.codes == [0] * world_size, result.text
            found[name, world_size] = [line["lm loss"] for line in lines(result.stdout[0])]
    for name in ("sample", "token"):
        assert found[name, 2] == pytest.approx(found[name, 1], rel=1e-5)
    assert found["sample", 1] != pytest.approx(found["token", 1], rel=1e-5)
