"""Training commands read from launch scripts of the kinds that Megatron's users write."""

import pytest

from megatron.base.errors import ConfigError
from megatron.tooling.launch_script.commands import read_launch, read_path, read_script


def only(text, arguments=(), **options):
    (command,) = read_script(text, arguments, **options)
    return command


def test_an_array_that_nothing_sets_is_empty_unless_a_file_that_is_not_there_may_set_it():
    line = 'torchrun pretrain_gpt.py --num-layers 2 "${EXTRA[@]}" ${MORE[@]} --bf16\n'
    alone, behind = only(line), only(f"source cluster.env\n{line}")
    assert list(alone.argv) == ["--num-layers", "2", "--bf16"]
    assert list(behind.argv) == ["--num-layers", "2", "${EXTRA[@]}", "${MORE[@]}", "--bf16"]


def test_arrays_a_launcher_and_comments():
    command = only("""#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-2}  # how many hosts
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
MODEL_ARGS=(
    --num-layers 4
    # --hidden-size 1
    --hidden-size $((64 * 2))  # per layer
)
FP8=()
if [[ "${DTYPE:-bf16}" == "fp8" ]]; then
    FP8+=("--fp8-format hybrid")
else
    MODEL_ARGS+=("--split '99,1,0'" "--bf16")
fi
if [ ! -f "$SCRIPT" ]; then
    echo "pretrain_gpt.py is not there"
    exit 1
fi
torchrun ${DISTRIBUTED_ARGS[@]} \\
    /opt/pretrain_gpt.py \\
    ${MODEL_ARGS[@]} ${FP8[@]} --data-path $DATA_PATH 2>&1 | tee log.txt
""")
    assert command.program == "/opt/pretrain_gpt.py" and command.world == 16
    assert command.argv == (
        *("--num-layers", "4", "--hidden-size", "128", "--split", "'99,1,0'", "--bf16"),
        *("--data-path", "$DATA_PATH"),
    )
    assert command.unresolved == ("$DATA_PATH",) and command.assumed == ()


POSITIONAL = """
ENV=$1
TP=$3
if [ $2 = 7B ]; then
LAYERS=32
elif [ $2 = 70B ]; then
LAYERS=80
fi
if [ $TP -gt 1 ]; then
    sp_options=" --sequence-parallel"
fi
NAME="run-${2}-tp-${TP}-$(date +%s)"
options=" \\
    --num-layers ${LAYERS} \\
    --tensor-model-parallel-size ${TP} \\
    --save out/${NAME} "
run_cmd="torchrun --nproc-per-node=4 ../llama/pretrain_llama.py
 ${options} ${sp_options}"
echo ${run_cmd}
eval ${run_cmd}
"""


def test_arguments_conditions_and_eval():
    command = only(POSITIONAL, ["dsw", "70B", "2"])
    assert command.argv == (
        *("--num-layers", "80", "--tensor-model-parallel-size", "2"),
        *("--save", "out/run-70B-tp-2-$(date +%s)", "--sequence-parallel"),
    )
    assert (command.world, command.program) == (4, "../llama/pretrain_llama.py")
    assert command.unresolved == ("$(date +%s)",)
    assert only(POSITIONAL, ["dsw", "7B", "1"]).argv[1] == "32"
    assert "--sequence-parallel" not in only(POSITIONAL, ["dsw", "7B", "1"]).argv


def test_without_arguments_the_first_branch_is_taken_and_said():
    command = only(POSITIONAL)
    assert command.argv[:4] == ("--num-layers", "32", "--tensor-model-parallel-size", "$3")
    assert command.assumed == ("[ $2 = 7B ]: taken", "[ $TP -gt 1 ]: taken")
    assert "$3" in command.unresolved


def test_an_unset_variable_is_empty_in_a_condition():
    text = """
if [ "$MOCK" = true ]; then DATA="--mock-data"; else DATA="--data-path d"; fi
if [ -z "$TP" ]; then TP=2; fi
[ -n "$WANDB_PROJECT" ] && DATA="$DATA --wandb-project p"
python pretrain_gpt.py --tensor-model-parallel-size $TP $DATA $EXTRA_ARGS
"""
    assert only(text).argv == ("--tensor-model-parallel-size", "2", "--data-path", "d", "$EXTRA_ARGS")
    given = only(text, environment={"MOCK": "true", "TP": "4", "EXTRA_ARGS": "--bf16 --lr 1"})
    assert given.argv == ("--tensor-model-parallel-size", "4", "--mock-data", "--bf16", "--lr", "1")
    assert given.unresolved == ()


def test_a_chain_of_branches_of_which_none_fits_takes_the_first():
    text = """
if [[ $MODEL = small ]]; then LAYERS=2; elif [[ $MODEL = large ]]; then LAYERS=8; else echo no such model; exit 1; fi
case $KIND in fast) EXTRA=--bf16 ;; *) exit 1 ;; esac
python pretrain_gpt.py --num-layers $LAYERS $EXTRA
"""
    command = only(text)
    assert command.argv == ("--num-layers", "2", "--bf16")
    assert command.assumed == ("[[ $MODEL = small ]]: taken, as no other is", "case $KIND: first pattern taken")
    assert only(text, environment={"MODEL": "large", "KIND": "fast"}).assumed == ()


def test_an_option_that_a_branch_not_taken_sets_is_empty():
    text = """
if [ "$1" = offload ]; then offload_option="--cpu-offloading"; fi
python pretrain_gpt.py --bf16 ${offload_option} --lr 1
"""
    assert only(text, ["none"]).argv == ("--bf16", "--lr", "1")


SLURM = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2    # one for each GPU
#SBATCH --gpus-per-node=gh200:2
CMD="numactl --membind=0 python3 $DIR/pretrain_gpt.py --tensor-model-parallel-size $SLURM_GPUS_PER_NODE --bf16"
srun --cpus-per-task 8 -lu bash -c "RANK=\\$SLURM_PROCID $CMD"
"""


def test_slurm_gives_the_world_and_its_variables():
    command = only(SLURM)
    assert command.world == 8 and command.program == "$DIR/pretrain_gpt.py"
    assert command.argv == ("--tensor-model-parallel-size", "2", "--bf16")


def test_a_launcher_in_variables_inside_single_quotes():
    command = only("""
#SBATCH --nodes=3
export LAUNCHER="python -u -m torch.distributed.launch --nproc_per_node 4 --nnodes $SLURM_NNODES"
export CMD="pretrain_gpt.py --bf16"
clear; srun --jobid $SLURM_JOBID bash -x -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee -a log
""")
    assert (command.world, command.argv) == (12, ("--bf16",))


@pytest.mark.parametrize(
    ("launch", "world"),
    [
        ("python", 1),
        ("torchrun", 1),
        ("torchrun --nproc_per_node=8", 8),
        ("torchrun --nproc-per-node 8 --nnodes=2:2", 16),
        ("torchrun --nproc_per_node 8 --nnodes 1:4", None),
        ("torchrun --nproc_per_node $GPUS", None),
        ("torchrun --nproc_per_node gpu", None),
        ("python3.10 -m torch.distributed.run --nproc_per_node 2", 2),
        ("mpirun --allow-run-as-root -np 16 -x A=b python3", 16),
        ("mpiexec --np 4 python", 4),
        ("srun -N2 --ntasks-per-node=4 python", 8),
        ("srun --ntasks 6 python", 6),
        ("srun -N 2 torchrun --nproc_per_node 4 --nnodes 2", 8),
        ("srun python", None),
        ("deepspeed --num_nodes 2 --num_gpus 8", 16),
        ("deepspeed --hostfile hosts", None),
        ("WORLD_SIZE=4 python", 4),
        ("export WORLD_SIZE=$((2 * 3)); python", 6),
        ("$LAUNCHER python", None),
    ],
)
def test_world(launch, world):
    assert only(f"{launch} pretrain_gpt.py --bf16").world == world


@pytest.mark.parametrize(
    ("launch", "worlds"),
    [
        ("env A=1 torchrun --nproc-per-node 8 --nnodes 2:4", ((2, 16), (3, 24), (4, 32))),
        ("python -m torch.distributed.run --nnodes=1:2", ((1, 1), (2, 2))),
        ("torchrun --nproc-per-node gpu --nnodes 1:4", ()),
        ("torchrun --nproc-per-node 8 --nnodes 4", ()),
        ("srun --nodes 1:4 python", ()),
    ],
)
def test_worlds_of_a_range_of_nodes(launch, worlds):
    assert only(f"{launch} pretrain_gpt.py --bf16").worlds == worlds


def test_several_commands_each_once():
    text = """
for tp in 1 2; do torchrun --nproc_per_node $tp pretrain_gpt.py --tensor-model-parallel-size $tp; done
train() { python finetune.py --load $1; }
train a; train b; train a
python tools/preprocess_data.py --input x; python -m pytest test_pretrain.py; cp pretrain_gpt.py /tmp
"""
    found = read_script(text)
    assert [(each.argv[-1], each.world) for each in found] == [("1", 1), ("2", 2), ("a", 1), ("b", 1)]


def test_a_program_whose_name_is_not_known():
    command = only("torchrun --master_addr $ADDR --nproc_per_node 2 $SCRIPT --num-layers 2 --bf16")
    assert (command.program, command.argv) == ("$SCRIPT", ("--num-layers", "2", "--bf16"))
    assert read_script("torchrun --nproc_per_node 2 -m server --num-layers 2") == []


def test_placeholders_are_words():
    command = only(
        'P="<PATH TO THE DATA>"\npython pretrain_gpt.py --data-path 0.5 $P --tensorboard-dir <LOG DIR> --bf16'
    )
    assert command.argv == ("--data-path", "0.5", "<PATH TO THE DATA>", "--tensorboard-dir", "<LOG DIR>", "--bf16")
    assert command.unresolved == ("<PATH TO THE DATA>", "<LOG DIR>")


def test_scripts_that_a_script_starts_or_sources(tmp_path):
    (tmp_path / "model").write_text("export LAYERS=6\n")
    (tmp_path / "train.sh").write_text("mpirun -np $GPUS python pretrain_gpt.py --num-layers $LAYERS --lr $1\n")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0`")
    (tmp_path / "script").write_text("#!/usr/bin/env perl\nprint `(`")
    (tmp_path / "run.sh").write_text(
        "./binary; ./script\nsource ./model\nexport GPUS=4\nbash train.sh 3e-4\n$(dirname $0)/train.sh 1e-4\n"
    )
    found = read_path(tmp_path / "run.sh")
    assert [(each.world, each.argv) for each in found] == [
        (4, ("--num-layers", "6", "--lr", "3e-4")),
        (4, ("--num-layers", "6", "--lr", "1e-4")),
    ]


def test_loops_and_calls_that_never_end_are_left(tmp_path):
    (tmp_path / "run.sh").write_text("while true; do python pretrain_gpt.py --lr 1; done\nf() { f; }; f\n./run.sh\n")
    assert [each.argv for each in read_path(tmp_path / "run.sh")] == [("--lr", "1")]


@pytest.mark.parametrize("text", ["(" * 5000 + ")" * 5000, "while true; do " * 5 + ":" + "; done" * 5])
def test_a_script_that_is_too_much_to_read(text):
    with pytest.raises(ConfigError, match="too many steps or levels"):
        read_script(text)


def test_what_a_user_may_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node 2 pretrain_gpt.py --lr ${1:-1} --save 'a b'\n")
    expected = ("--lr", "1", "--save", "a b")
    assert read_launch(["run.sh"])[0].argv == expected
    assert read_launch(["bash", "run.sh", "2"])[0].argv == ("--lr", "2", "--save", "a b")
    for words in (
        ["torchrun", "--nproc_per_node", "2", "pretrain_gpt.py", *expected],
        ["torchrun --nproc_per_node 2 pretrain_gpt.py --lr 1 --save 'a b'"],
    ):
        (command,) = read_launch(words)
        assert (command.argv, command.world) == (expected, 2)
    (command,) = read_launch(["pretrain_gpt.py", *expected])
    assert (command.argv, command.world, command.program) == (expected, None, "pretrain_gpt.py")
    (command,) = read_launch(expected)
    assert (command.argv, command.world, command.program) == (expected, None, None)
    (command,) = read_launch(["--lr 1 --save 'a b'"])
    assert (command.argv, command.world, command.program) == (expected, None, None)
    assert read_launch(["ls", "-l"]) == []


@pytest.mark.parametrize(
    "text", ['echo "open', "if true; then x", "case a in b) c", "x=${a", "echo )", "a=(1 2", "$((1"]
)
def test_what_is_no_bash_is_named_by_its_line(text):
    with pytest.raises(ConfigError, match=r"^line \d+ of the script: "):
        read_script("A=1\n" + text)


@pytest.mark.parametrize("launcher", ["torchrun", "bin/torchrun", "python3"])
def test_a_launcher_is_no_script(tmp_path, monkeypatch, launcher):
    """Although it is a file, and in a text format."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / launcher).parent.mkdir(exist_ok=True)
    (tmp_path / launcher).write_text("#!/usr/bin/python\nimport sys\n")
    (command,) = read_launch([launcher, "pretrain_gpt.py", "--bf16"])
    assert command.argv == ("--bf16",) and command.program == "pretrain_gpt.py"
