"""The example scripts, as a user starts them, at toy size on two CPU processes."""

import re
import time
from pathlib import Path

import pytest

from megatron.command_line.read import parse
from megatron.config.rules.check import check
from tests.e2e.helpers.examples import MODELS, ROOT, command_of, flag, make_models_and_data, script, start, steps
from tests.e2e.helpers.launch import run
from tests.pool import free_port

EXPERTS = "examples/moe/pretrain_moe.sh"
SCRIPTS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*/*_*.sh"))
PRETRAIN, FINETUNE = "examples/llama/pretrain_llama.sh", "examples/llama/finetune_llama.sh"
SFT = "tests.e2e.helpers.drivers:finetune"
TOY = ["--seq-length", 64, "--global-batch-size", 4, "--precision", "fp32", "--gpus", 2]
CPU = ["--", "--device", "cpu", "--num-workers", 0, "--eval-iters", 0, "--log-interval", 1]
# What the scripts use of Slurm: a list of host names, and one copy of a command a node with the variables of its step.
SCONTROL = "#!/usr/bin/env bash\necho localhost\necho localhost\n"
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST SLURM_STEP_TASKS_PER_NODE="1(x2)"
for node in 0 1; do SLURM_NODEID=$node "$@" & done
wait -n && wait -n
"""
EXECUTABLES = {"scontrol": SCONTROL, "srun": SRUN}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    make_models_and_data(folder)
    return folder


def test_every_family_has_both():
    both = {f"examples/{family}/{what}_{family}.sh" for family in MODELS for what in ("pretrain", "finetune")}
    assert set(SCRIPTS) == both - {"examples/moe/finetune_moe.sh"}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if re.search("llama|moe|qwen/finetune", path) else [pytest.mark.slow])
        for path in SCRIPTS
    ],
)
def test_every_script(path, made, tmp_path):
    """Two steps from a Hugging Face folder, by the command that the script prints, without torchrun's start-up.

    Qwen's with adapters, Llama's under tensor parallelism, experts under expert parallelism.
    """
    family, fine_tunes = Path(path).parent.name, "finetune" in path
    more = {"qwen": ["--lora-rank", 4], "llama": ["--tp", 2], "moe": ["--ep", 2]}.get(family, [])
    words = ["--model", made / family, "--data", made / ("chat" if fine_tunes else "text"), "--save", tmp_path / "run"]
    words += [*more, "--save-interval", 2, "--train-iters", 2]
    launcher, program, flags = command_of(script(path, tmp_path, *words, *TOY, "--dry-run", *CPU))
    assert launcher == ["--nproc-per-node", "2", "--max-restarts", "3", "--standalone"]
    assert program == ("finetune.py" if fine_tunes else "pretrain_gpt.py")
    done = run(flags, tmp_path / "log", world_size=2, driver=SFT if fine_tunes else None)
    assert done.codes == [0, 0], done.text
    output = done.stdout[0]
    assert steps(output, 2) == [1, 2] and "stored as float32, as float32" in output
    assert ("packing efficiency" in output) == fine_tunes
    assert ("adapters of" in output) == (family == "qwen")
    assert bool(re.search(r"token dispatcher +alltoall +alltoall over 2 ranks", output)) == (family == "moe")
    assert bool(re.search(r"expert balance +aux_loss 0.001", output)) == (family == "moe")
    assert bool(re.search(r"sequence parallelism +on +on", output)) == (family == "llama")
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text().strip() == "2"


@pytest.fixture(scope="module")
def first_run(made, tmp_path_factory):
    """Two steps of a run of four under a real torchrun: (folder, options, output)."""
    folder = tmp_path_factory.mktemp("torchrun")
    options = ["--model", made / "llama", "--data", "0.5", made / "text", "0.5", made / "text", *TOY]
    options += ["--save", folder / "run", "--save-interval", 2, "--train-iters", 4]
    return folder, options, script(PRETRAIN, folder, *options, "--tp", 2, *CPU, "--exit-interval", 2)


def test_pretrain_under_torchrun(first_run):
    folder, _, output = first_run
    assert steps(output, 4) == [1, 2]
    assert (folder / "run/latest_checkpointed_iteration.txt").read_text().strip() == "2"


@pytest.mark.slow
def test_slurm_on_two_nodes_goes_on_under_another_layout(first_run):
    folder, options, _ = first_run
    for name, text in EXECUTABLES.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_JOB_END_TIME": str(int(time.time()) + 3600),
        "MASTER_PORT": str(free_port()),
    }
    output = script("examples/slurm/launch.sbatch", folder, PRETRAIN, *options, "--gpus", 1, *CPU, **slurm)
    assert steps(output, 4) == [3, 4]
    assert re.search(r"--exit-duration-in-mins (49|50) ", output)
    assert "--nnodes 2" in output and "--rdzv-id 17" in output and "--nproc-per-node 1 " in output


@pytest.mark.parametrize(
    ("minutes", "given"),
    [(600, (589, 590)), (25, (14, 15)), (20, (9, 10)), (10, (4, 5)), (5, (2,)), (1, (1,)), (0, (1,))],
)
def test_a_job_of_slurm_ends_before_its_time(tmp_path, minutes, given):
    """Whatever its length, at a time above 0, which the script of a family would refuse otherwise."""
    for name, text in {"scontrol": SCONTROL, "srun": '#!/usr/bin/env bash\necho "$@"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    slurm |= {"SLURM_CPUS_ON_NODE": "2", "SLURM_JOB_END_TIME": str(int(time.time()) + 60 * minutes + 5)}
    output = script("examples/slurm/launch.sbatch", tmp_path, PRETRAIN, **slurm)
    assert int(re.search(r"--exit-duration-in-mins (-?\d+)", output)[1]) in given


def test_fine_tuning_of_a_checkpoint(first_run, made, tmp_path):
    """Its shape and weights, by the command that the script prints."""
    folder, _, _ = first_run
    words = ["--checkpoint", folder / "run", "--tokenizer", made / "llama", "--data", made / "chat", "--train-iters", 1]
    _, _, flags = command_of(script(FINETUNE, tmp_path, *words, "--save", tmp_path / "run", *TOY, "--dry-run", *CPU))
    done = run(flags, tmp_path / "log", world_size=2, driver=SFT)
    assert done.codes == [0, 0], done.text
    assert "starting at iteration 0 with the weights of" in done.stdout[0] and steps(done.stdout[0], 1) == [1]


def test_defaults_and_what_wins(made, tmp_path):
    words = ["--model", made / "llama", "--data", "x", "--train-iters", 9, "--dry-run"]
    _, _, plain = command_of(script(FINETUNE, tmp_path, *words))
    assert flag(plain, "--lr") == "2e-5" and flag(plain, "--seq-length") == "4096" and "--bf16" in plain
    assert (
        flag(plain, "--lr-warmup-fraction") == "0.03" and "--save" not in plain and "--sequence-parallel" not in plain
    )
    _, _, adapters = command_of(script(FINETUNE, tmp_path, *words, "--lora-rank", 8))
    assert flag(adapters, "--lr") == "2e-4"
    own = ["--lora-rank", 8, "--lr", "3e-4", "--precision", "fp16", "--", "--seq-length", 128, "--lr-warmup-iters", 2]
    _, _, chosen = command_of(script(FINETUNE, tmp_path, *words, *own))
    assert flag(chosen, "--lr") == "3e-4" and "--fp16" in chosen and "--bf16" not in chosen
    assert flag(chosen, "--seq-length") == "128" and "--lr-warmup-fraction" not in chosen


def test_other_starts(tmp_path):
    words = ["--train-iters", 9, "--dry-run"]
    start = ["--checkpoint", "run", "--tokenizer", "folder", "--data", "x"]
    _, _, flags = command_of(script(FINETUNE, tmp_path, *start, *words))
    assert " ".join(flags).startswith(
        "--pretrained-checkpoint run --use-checkpoint-args --tokenizer-type HuggingFaceTokenizer "
        "--tokenizer-model folder --data-path x "
    )
    start = ["--preset", "llama3-8b", "--lr", "3e-4", "--data", "mock"]
    output = script(PRETRAIN, tmp_path, *start, *words, "--nodes", 2, "--master", "host:1234")
    launcher, _, flags = command_of(output)
    assert "\nenv TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun " in f"\n{output}"
    assert " ".join(flags).startswith("--preset llama3-8b --tokenizer-type NullTokenizer --mock-data ")
    assert " ".join(launcher).startswith(
        "--nproc-per-node 8 --max-restarts 0 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:1234 --rdzv-id "
    )


def test_experts(tmp_path):
    """The flags that the script of a model with experts adds; the program accepts all of them."""
    words = ["--preset", "qwen3-30b-a3b", "--lr", "3e-4", "--data", "mock", "--train-iters", 9, "--tp", 2, "--ep", 8]
    launcher, _, flags = command_of(script(EXPERTS, tmp_path, *words, "--etp", 1, "--dry-run"))
    assert " ".join(flags).endswith(
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 "
        "--expert-tensor-parallel-size 1 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3"
    )
    assert launcher[:2] == ["--nproc-per-node", "8"]
    check(parse(flags, description=""), 8)
    _, _, plain = command_of(script(EXPERTS, tmp_path, *words[:8], "--dry-run", "--", "--moe-aux-loss-coeff", "0.01"))
    assert "--expert-model-parallel-size" not in plain and flag(plain, "--moe-aux-loss-coeff") == "0.01"


@pytest.mark.parametrize("path", [*SCRIPTS, "examples/pai_compat.sh"])
def test_help(path, tmp_path):
    output = script(path, tmp_path, "--help")
    assert f"  {path} " in output and "--dry-run" in output and "set -e" not in output


MODEL = ["--model", "MODEL", "--data", "x", "--train-iters", "9"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*MODEL, "--batch", "4"], "--batch is no option; see --help; flags of finetune.py follow --"),
        ([*MODEL, "8"], "'8' belongs to no option"),
        ([*MODEL, "--tp"], "--tp needs a value"),
        ([*MODEL, "--tp", "--gpus", "2"], "--tp needs a value"),
        ([*MODEL, "--gpus", "all"], "--gpus must be a whole number above 0, not 'all'"),
        ([*MODEL, "--precision", "fp8"], "--precision must be bf16, fp16 or fp32, not 'fp8'"),
        ([*MODEL, "--preset", "llama3-8b"], "give one of --model, --checkpoint and --preset"),
        ([*MODEL, "--nodes", "2"], "--nodes 2 needs --master HOST:PORT"),
        (MODEL[2:], "give one of --model, --checkpoint and --preset"),
        (["--model", "nowhere", *MODEL[2:]], "--model nowhere holds no config.json"),
        ([*MODEL[:2], *MODEL[4:]], "--data is missing"),
        ([*MODEL, "--data", "mock"], "--data mock makes up documents"),
        (MODEL[:4], "--train-iters is missing"),
        (["--checkpoint", "run", *MODEL[2:]], "--tokenizer is missing"),
        (["--preset", "llama3-8b", "--tokenizer", "x", *MODEL[2:]], "--preset needs --lr"),
    ],
)
def test_mistakes(words, says, made, tmp_path):
    done = start(FINETUNE, tmp_path, *[made / "llama" if word == "MODEL" else word for word in words])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"finetune_llama.sh: {says}") and done.stderr.count("\n") == 1
