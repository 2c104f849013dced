"""examples/pai_compat.sh: the 25 positional arguments of Pai-Megatron-Patch's run_mcore_llama3_1.sh in our flags, the
26 of its scripts for Qwen2 and Mistral, and the 27 of its run_mcore_qwen3.sh."""

import pytest

from tests.e2e.helpers.examples import ROOT, command_of, flag, make_models_and_data, start, steps
from tests.e2e.helpers.launch import run

# In the order and with the names of run_mcore_llama3_1.sh.
PAI = {
    "ENV": "dsw", "MODEL_SIZE": "8B", "BATCH_SIZE": "1", "GLOBAL_BATCH_SIZE": "4", "LR": "1e-5", "MIN_LR": "1e-6",
    "SEQ_LEN": "64", "PAD_LEN": "64", "PR": "bf16", "TP": "2", "PP": "1", "CP": "1", "SP": "true", "DO": "true",
    "FL": "true", "SFT": "false", "AC": "none", "OPTIMIZER_OFFLOAD": "false", "SAVE_INTERVAL": "2",
    "DATASET_PATH": "text", "VALID_DATASET_PATH": "text", "PRETRAIN_CHECKPOINT_PATH": "llama", "TRAIN": "512",
    "WARMUP": "256", "OUTPUT_BASEPATH": "out",
}  # fmt: skip
CPU = ["--", "--device", "cpu", "--num-workers", 0, "--eval-iters", 1]
NAME = "8B-lr-1e-5-minlr-1e-6-bs-1-gbs-4-seqlen-64-pr-bf16"
FIXED = (
    "--lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 1 "
    "--log-throughput --eval-interval 10000 --eval-iters 10 --num-workers 8"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pai")
    make_models_and_data(folder)
    return folder


def pai(folder, changes=None, options=("--dry-run",), further=(), **environment):
    arguments = {**PAI, **(changes or {})}
    return start("examples/pai_compat.sh", folder, *options, *arguments.values(), *further, **environment)


def test_pai_pretraining(made):
    """512 tokens are two steps of 4 x 64, and 256 are one."""
    done = pai(made)
    assert done.returncode == 0, done.stderr
    launcher, program, flags = command_of(done.stdout)
    assert (
        launcher == ["--standalone", "--nproc-per-node", "auto", "--max-restarts", "3"] and program == "pretrain_gpt.py"
    )
    name = f"pretrain-{NAME}-ti-2-wi-1"
    assert " ".join(flags) == (
        "--micro-batch-size 1 --global-batch-size 4 --lr 1e-5 --min-lr 1e-6 --seq-length 64 --bf16 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --save-interval 2 --data-path text "
        "--split 99,1,0 --load-hf llama --train-iters 2 --lr-decay-iters 2 --lr-warmup-iters 1 "
        f"--save out/checkpoint/{name} --load out/checkpoint/{name} --tensorboard-dir out/tensorboard/{name} {FIXED}"
    )
    rows = [line.split()[:3] for line in done.stdout.splitlines()[:25]]
    assert rows == [[str(number), *pair] for number, pair in enumerate(PAI.items(), start=1)]
    assert "8 PAD_LEN                  64         no flag: samples are filled up" in done.stdout


@pytest.mark.parametrize(
    ("changes", "expected", "missing"),
    [
        ({"SFT": "true", "TRAIN": "90", "WARMUP": "10"},
         "--calculate-per-token-loss --no-sft-packing ; --train-iters 90 --lr-decay-iters 80 --lr-warmup-iters 10", ""),
        ({"TP": "1"}, "", "--sequence-parallel"),
        ({"SP": "false", "DO": "false"}, "--overlap-grad-reduce --save", "--sequence-parallel --overlap-param-gather"),
        ({"PP": "2", "CP": "4"}, "--pipeline-model-parallel-size 2 --context-parallel-size 4", ""),
        ({"PR": "fp16"}, "--fp16", "--bf16"),
    ],
    ids=["sft", "tp 1", "without sp and do", "pp and cp", "fp16"],
)  # fmt: skip
def test_pai_values(changes, expected, missing, made):
    done = pai(made, changes)
    assert done.returncode == 0, done.stderr
    _, program, flags = command_of(done.stdout)
    assert program == ("finetune.py" if changes.get("SFT") else "pretrain_gpt.py")
    assert all(part.strip() in " ".join(flags) for part in expected.split(";"))
    assert not set(missing.split()) & set(flags)


def with_experts(**changes):
    """The 27 arguments of run_mcore_qwen3.sh: ETP and EP stand behind CP."""
    both = {}
    for name, value in PAI.items():
        both[name] = value
        if name == "CP":
            both |= {"ETP": "1", "EP": "8"}
    return {**both, "MODEL_SIZE": "A3B", **changes}


def test_pai_experts(made):
    options = ("--dry-run", *with_experts().values())
    done = start("examples/pai_compat.sh", made, *options)
    assert done.returncode == 0, done.stderr
    _, _, flags = command_of(done.stdout)
    assert (
        "--context-parallel-size 1 --expert-tensor-parallel-size 1 --expert-model-parallel-size 8 --sequence-parallel"
        in " ".join(flags)
    )
    assert " ".join(flags).endswith(
        f"{FIXED.replace('0.1 ', '0.01 ')} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001"
    )
    rows = [line.split()[:3] for line in done.stdout.splitlines()[:27]]
    assert rows == [[str(number), *pair] for number, pair in enumerate(with_experts().items(), start=1)]


@pytest.mark.parametrize(
    ("changes", "expected", "missing"),
    [
        ({"MODEL_SIZE": "8B"}, "--load-hf llama", "--expert-model-parallel-size --moe-aux-loss-coeff"),
        ({"OPTIMIZER_OFFLOAD": "0.5"}, "--optimizer-cpu-offload --optimizer-offload-fraction 0.5", "static"),
        ({"MODEL_SIZE": "A22B", "PRETRAIN_CHECKPOINT_PATH": "none"}, "--preset qwen3-235b-a22b", "--load-hf"),
    ],
    ids=["dense", "offload", "preset"],
)
def test_pai_values_of_27(changes, expected, missing, made):
    words = [*with_experts(**changes).values(), "--", "--tokenizer-type", "NullTokenizer"]
    done = start("examples/pai_compat.sh", made, "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    _, _, flags = command_of(done.stdout)
    assert expected in " ".join(flags) and not set(missing.split()) & set(flags)


def with_ep(**changes):
    """The arguments of run_mcore_qwen.sh and run_mcore_mistral.sh: EP behind CP."""
    arguments = {**PAI, **changes}
    return {
        key: value for name in arguments for key, value in ((name, arguments[name]), *([("EP", "2")] * (name == "CP")))
    }


@pytest.mark.parametrize(
    ("size", "expected", "missing"),
    [
        ("8x7B", "--expert-model-parallel-size 2 ", "--expert-tensor-parallel-size"),
        ("8x7B", "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01", "--preset"),
        ("A14B", "--expert-model-parallel-size 2 ", "--moe-aux-loss-coeff"),
        ("7B", "--load-hf llama", "--expert-model-parallel-size"),
    ],
)
def test_pai_values_of_26(made, size, expected, missing):
    done = start("examples/pai_compat.sh", made, "--dry-run", *with_ep(MODEL_SIZE=size).values())
    assert done.returncode == 0, done.stderr
    _, _, flags = command_of(done.stdout)
    assert expected in " ".join(flags) and missing not in flags and flag(flags, "--weight-decay") == "0.1"
    rows = [line.split()[:3] for line in done.stdout.splitlines()[:26]]
    assert rows == [[str(n), *pair] for n, pair in enumerate(with_ep(MODEL_SIZE=size).items(), start=1)]


def test_pai_26_arguments_of_moonlight(made):
    """They have ETP and EP and no FL."""
    arguments = with_experts(MODEL_SIZE="A3B", OPTIMIZER_OFFLOAD="0.5")
    del arguments["FL"]
    done = start("examples/pai_compat.sh", made, "--dry-run", *arguments.values())
    assert done.returncode == 0, done.stderr
    rows = [line.split()[:3] for line in done.stdout.splitlines()[:26]]
    assert rows == [[str(number), *pair] for number, pair in enumerate(arguments.items(), start=1)]
    _, _, flags = command_of(done.stdout)
    assert flag(flags, "--expert-model-parallel-size") == arguments["EP"] and "--moe-aux-loss-coeff" not in flags
    assert flag(flags, "--weight-decay") == "0.1" and flag(flags, "--optimizer-offload-fraction") == "0.5"


def test_pai_26_arguments_of_no_script(made):
    """Sizes of several families do not say which is meant."""
    words = list(with_ep().values())
    words[13] = "some"
    done = start("examples/pai_compat.sh", made, "--dry-run", *words)
    assert done.returncode == 2 and "argument 14 is 'some', and is SP, true or false" in done.stderr
    words = [*with_ep(PRETRAIN_CHECKPOINT_PATH="none").values(), "--", "--tokenizer-type", "NullTokenizer"]
    done = start("examples/pai_compat.sh", made, "--dry-run", *words)
    assert done.returncode == 2 and "give a model's folder" in done.stderr


@pytest.mark.parametrize(
    ("kind", "size", "preset", "expected"),
    [
        ("v2", "A2.4B", "deepseek-v2-lite", "--weight-decay 0.1"),
        ("v2", "A21B", "deepseek-v2", "--expert-model-parallel-size 2"),
        ("v3", "A37B", "deepseek-v3", "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001"),
        ("v3", "A37B", "deepseek-v3", "--weight-decay 0.1"),
        ("moonlight", "A3B", "moonlight-16b-a3b", "--expert-tensor-parallel-size"),
    ],
)
def test_pai_shapes_of_deepseek(made, kind, size, preset, expected):
    changes = {"MODEL_SIZE": size, "PRETRAIN_CHECKPOINT_PATH": "none"}
    arguments = with_ep(**changes) if kind == "v2" else with_experts(**changes)
    if kind == "moonlight":
        del arguments["FL"]
    words = [*arguments.values(), "--", "--tokenizer-type", "NullTokenizer"]
    done = start("examples/pai_compat.sh", made, "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    _, _, flags = command_of(done.stdout)
    assert flag(flags, "--preset") == preset and expected in " ".join(flags)


def test_pai_starts(made, tmp_path):
    tokenizer = ["--", "--tokenizer-type", "NullTokenizer"]
    preset = pai(made, {"PRETRAIN_CHECKPOINT_PATH": "none", "MODEL_SIZE": "70B"}, further=tokenizer)
    _, _, flags = command_of(preset.stdout)
    assert flags[:2] == ["--preset", "llama3.1-70b"] and flags[-2:] == tokenizer[1:] and "--load-hf" not in flags
    assert flag(flags, "--init-method-std") == "0.008"
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "latest_checkpointed_iteration.txt").write_text("0")
    _, _, flags = command_of(pai(made, {"PRETRAIN_CHECKPOINT_PATH": str(ours)}).stdout)
    assert flag(flags, "--pretrained-checkpoint") == str(ours) and "--use-checkpoint-args" in flags
    cluster = {"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}
    done = pai(made, {"ENV": "dlc"}, **cluster, KUBERNETES_CONTAINER_RESOURCE_GPU="8")
    launcher, _, _ = command_of(done.stdout)
    expected = "--nnodes 4 --node-rank 1 --master-addr host --master-port 1234 --nproc-per-node 8 --max-restarts 3"
    assert " ".join(launcher) == expected
    packed = pai(made, {"SFT": "true"}, MP_SFT_PACKING="true")
    assert "--no-sft-packing" not in packed.stdout


def known(name):
    return f"`{name}`" in (ROOT / "docs/flags.md").read_text()


@pytest.mark.parametrize(
    ("changes", "environment", "flags"),
    [
        ({"AC": "sel"}, {}, "--recompute-granularity selective"),
        ({"AC": "full"}, {"MP_AC_LAYERS": "2"},
         "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"),
        ({"AC": "offload"}, {}, "--cpu-offloading --cpu-offloading-num-layers 1"),
        ({"OPTIMIZER_OFFLOAD": "static"}, {},
         "--optimizer-cpu-offload --optimizer-offload-policy static --optimizer-offload-fraction 1.0"),
        ({"OPTIMIZER_OFFLOAD": "auto"}, {}, "--optimizer-cpu-offload --optimizer-offload-policy auto"),
        ({"PR": "fp8"}, {},
         "--fp8-format hybrid --fp8-amax-compute-algo max --fp8-amax-history-len 1024 --bf16"),
        ({}, {"MP_VP": "2"}, "--num-layers-per-virtual-pipeline-stage 2"),
        ({}, {"MP_PP0_LAYERS": "3"}, "--decoder-first-pipeline-num-layers 3"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)  # fmt: skip
def test_pai_stops_at_what_is_not_there_yet(changes, environment, flags, made):
    """By the table of flags: what it lists is passed on, and nothing is left out in silence."""
    done = pai(made, changes, **environment)
    first = flags.split()[0]
    if known(first):
        assert done.returncode == 0 and flags in " ".join(command_of(done.stdout)[2])
    else:
        assert done.returncode == 2 and f"means {flags}, but {first} is not available yet" in done.stderr


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ENV": "k8s"}, "ENV is 'k8s' and must be one of: dsw dlc"),
        ({"ENV": "dlc"}, "ENV dlc needs the environment variable WORLD_SIZE"),
        ({"SP": "yes"}, "SP is 'yes' and must be one of: true false"),
        ({"TP": "two"}, "TP must be a whole number, not 'two'"),
        ({"TRAIN": "255"}, "TRAIN is 255 tokens, and one step is 256"),
        ({"PRETRAIN_CHECKPOINT_PATH": "nowhere"}, "PRETRAIN_CHECKPOINT_PATH is 'nowhere', which holds no model"),
        ({"PRETRAIN_CHECKPOINT_PATH": "none", "MODEL_SIZE": "7B"}, "MODEL_SIZE is '7B' and must be one of: 8B 70B 405B"),
        ({"PRETRAIN_CHECKPOINT_PATH": "none"}, "PRETRAIN_CHECKPOINT_PATH none brings no tokenizer"),
        ({"PRETRAIN_CHECKPOINT_PATH": "mcore"}, "mcore is in Megatron-LM's format; first run: python tools/checkpoint/"),
        ({"26": "26"}, "SFT is 'none' and must be one of: true false"),
        ({"26": "26", "27": "27", "28": "28"}, "takes 25, 26 or 27 arguments, not 28: ENV MODEL_SIZE"),
    ],
)  # fmt: skip
def test_pai_mistakes(changes, says, made):
    (made / "mcore").mkdir(exist_ok=True)
    (made / "mcore/latest_checkpointed_iteration.txt").write_text("release\n")
    done = pai(made, changes)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"pai_compat.sh: {says}") and done.stderr.count("\n") == 1


def test_pai_run(made, tmp_path):
    """Two steps on two processes. The script starts the first torchrun of the PATH, here one that prints its
    words; test_examples.py starts a real one."""
    (tmp_path / "torchrun").write_text('#!/usr/bin/env bash\necho "given: $*"\n')
    (tmp_path / "torchrun").chmod(0o755)
    paths = {"DATASET_PATH": made / "text", "PRETRAIN_CHECKPOINT_PATH": made / "llama", "OUTPUT_BASEPATH": tmp_path}
    done = pai(tmp_path, paths, options=["--gpus", 2], further=CPU)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    launcher, program, flags = command_of(done.stdout)
    assert launcher[:3] == ["--standalone", "--nproc-per-node", "2"] and program == "pretrain_gpt.py"
    assert f"given: {' '.join([*launcher, str(ROOT / program), *flags])}" in done.stdout.splitlines()
    result = run(flags, tmp_path / "log", world_size=2)
    assert result.codes == [0, 0], result.text
    assert steps(result.stdout[0], 2) == [1, 2]
    save = tmp_path / "checkpoint" / f"pretrain-{NAME}-ti-2-wi-1"
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert list((tmp_path / "tensorboard").rglob("events.*"))


def test_pai_fine_tuning_runs(made, tmp_path):
    """By the command that it prints: conversations one a sample."""
    paths = {"DATASET_PATH": made / "chat", "PRETRAIN_CHECKPOINT_PATH": made / "qwen", "OUTPUT_BASEPATH": tmp_path}
    done = pai(tmp_path, {**paths, "SFT": "true", "TRAIN": "3", "WARMUP": "1", "PR": "bf16"}, further=CPU)
    _, program, flags = command_of(done.stdout)
    assert program == "finetune.py"
    result = run(flags, tmp_path / "log", world_size=2, driver="tests.e2e.helpers.drivers:finetune")
    assert result.codes == [0, 0], result.text
    assert steps(result.stdout[0], 3) == [1, 2, 3] and "198 conversations" in result.stdout[0]
