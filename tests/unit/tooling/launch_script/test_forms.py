"""Launch scripts in many forms of shell and launcher: the training command is the one that bash itself starts.

Each script is run by bash with launchers that only record their words, or start the rest of their own command.
"""

import json
import shutil
import subprocess
import sys

import pytest

from megatron.base.errors import ConfigError
from megatron.command_line.flag_check import check_command
from megatron.tooling.launch_script.commands import read_launch

FLAGS = "--num-layers 4 --hidden-size 64 --micro-batch-size 1"
# name -> (script, processes); every command ends with pretrain_gpt.py and its flags.
FORMS = {
    "plain": ("torchrun --nproc_per_node 8 pretrain_gpt.py {f}", 8),
    "python alone": ("python pretrain_gpt.py {f}", 1),
    "continued lines": ("torchrun \\\n  --nproc_per_node=4 \\\n  pretrain_gpt.py \\\n  {f}  # the model", 4),
    "string of options": ('OPT="--nproc_per_node 2 --nnodes 2"\nARGS="{f}"\ntorchrun $OPT pretrain_gpt.py $ARGS', 4),
    "array of options": ('ARGS=(\n  # model\n  {f}\n)\ntorchrun --nproc_per_node 2 pretrain_gpt.py "${{ARGS[@]}}"', 2),
    "several arrays": (
        "A=({f})\nB=(--bf16 --lr 1e-4)\ntorchrun --nproc_per_node 2 pretrain_gpt.py ${{A[@]}} ${{B[@]}}",
        2,
    ),
    "array that grows": (
        'A=({f})\n[ "$FP" ] || A+=(--bf16)\ntorchrun --nproc_per_node 2 pretrain_gpt.py "${{A[@]}}"',
        2,
    ),
    "array of an array": ('A=({f}); B=("${{A[@]}}" --bf16); python pretrain_gpt.py "${{B[@]}}"', 1),
    "named array": ("declare -A N=([small]=4 [big]=80)\npython pretrain_gpt.py --num-layers ${{N[small]}} --bf16", 1),
    "array that nothing sets": ('python pretrain_gpt.py {f} ${{EXTRA[@]}} "${{MORE[@]}}"', 1),
    "function": ('run() {{ torchrun --nproc_per_node $1 pretrain_gpt.py {f} "${{@:2}}"; }}\nrun 4 --bf16', 4),
    "function that sets": ("size() {{ LAYERS=4; }}\nsize\npython pretrain_gpt.py --num-layers $LAYERS --bf16", 1),
    "local names": ("LR=1\nf() {{ local LR=2; }}\nf\npython pretrain_gpt.py {f} --lr $LR", 1),
    "case": (
        "SIZE=8B\ncase $SIZE in\n 7B|8B) L=4 ;;\n *) L=9 ;;\nesac\npython pretrain_gpt.py --num-layers $L --bf16",
        1,
    ),
    "if and else": (
        'TP=2\nif [ $TP -gt 1 ]; then SP="--sequence-parallel"; else SP=""; fi\npython pretrain_gpt.py {f} $SP',
        1,
    ),
    "double brackets": (
        "M=llama3\nif [[ $M == llama* && -z $X ]]; then A=--swiglu; fi\npython pretrain_gpt.py {f} $A",
        1,
    ),
    "and, or": ("[ 1 = 1 ] && A=--bf16 || A=--fp16\npython pretrain_gpt.py {f} $A", 1),
    "arithmetic": (
        "G=8; N=2\ntorchrun --nproc_per_node $G --nnodes $N pretrain_gpt.py {f} --global-batch-size $((G * N * 4))",
        16,
    ),
    "let": ("let N=2*2\ntorchrun --nproc_per_node $N pretrain_gpt.py {f}", 4),
    "double parentheses": ("N=2; (( N *= 2 )); torchrun --nproc_per_node $N pretrain_gpt.py {f}", 4),
    "defaults": ("torchrun --nproc_per_node ${{GPUS:-8}} pretrain_gpt.py {f} --lr ${{LR:=3e-4}} ${{BF:+--fp16}}", 8),
    "replacement": ("N=a_b; python pretrain_gpt.py {f} --wandb-exp-name ${{N//_/-}}", 1),
    "set --": ('set -- --bf16 --lr 1e-4\npython pretrain_gpt.py {f} "$@"', 1),
    "getopts": (
        'set -- -l 4 -b\nwhile getopts "l:b" o; do case $o in l) L=$OPTARG ;; b) B=--bf16 ;; esac; done\n'
        "python pretrain_gpt.py --num-layers $L $B",
        1,
    ),
    "loop over arguments": (
        "set -- --tp 2\nwhile [[ $# -gt 0 ]]; do case $1 in --tp) TP=$2; shift 2 ;; *) shift ;; esac; done\n"
        "python pretrain_gpt.py {f} --tensor-model-parallel-size $TP",
        1,
    ),
    "for": ('A=; for LR in 1e-4 2e-4; do A="$A --lr $LR"; done\npython pretrain_gpt.py {f} $A', 1),
    "eval": ('CMD="torchrun --nproc_per_node 2 pretrain_gpt.py {f}"\necho $CMD\neval $CMD', 2),
    "command in a variable": ('CMD="torchrun --nproc_per_node 2 pretrain_gpt.py {f}"\n$CMD', 2),
    "here-document": (
        "cat <<EOF > /dev/null\npython pretrain_gpt.py --num-layers 9\nEOF\npython pretrain_gpt.py {f}",
        1,
    ),
    "here-document to bash": ("bash <<'EOF'\npython pretrain_gpt.py {f}\nEOF", 1),
    "pipe": ("python pretrain_gpt.py {f} 2>&1 | tee log.txt", 1),
    "background": ("nohup torchrun --nproc_per_node 2 pretrain_gpt.py {f} > log 2>&1 &\nwait", 2),
    "subshell": ("(cd / && python pretrain_gpt.py {f})", 1),
    "guards": ("set -euxo pipefail\ntrap 'echo end' EXIT\npython pretrain_gpt.py {f} || exit 1", 1),
    "exec": ("exec torchrun --nproc_per_node 2 pretrain_gpt.py {f}", 2),
    "time": ("time python pretrain_gpt.py {f}", 1),
    "environment in front": (
        "OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node 2 pretrain_gpt.py {f}",
        2,
    ),
    "env": ("env A=1 B=2 torchrun --nproc_per_node 2 pretrain_gpt.py {f}", 2),
    "bash -c": ('bash -c "torchrun --nproc_per_node 2 pretrain_gpt.py {f}"', 2),
    "srun bash -c": ("srun --ntasks-per-node 1 bash -c 'torchrun --nproc_per_node 2 pretrain_gpt.py {f}'", 2),
    "srun": ("srun --nodes 2 --ntasks-per-node 4 python -u pretrain_gpt.py {f}", 8),
    "srun, container": (
        'srun -N 2 --ntasks-per-node=8 --container-image=a.sqsh --container-mounts="/a:/a" python pretrain_gpt.py {f}',
        16,
    ),
    "docker": ("docker run --gpus all -v /a:/a image torchrun --nproc_per_node 2 pretrain_gpt.py {f}", 2),
    "docker bash -c": ('docker exec -it box bash -c "cd / && torchrun --nproc_per_node 2 pretrain_gpt.py {f}"', 2),
    "singularity": ("singularity exec --nv image.sif torchrun --nproc_per_node 2 pretrain_gpt.py {f}", 2),
    "apptainer": ("apptainer exec --nv image.sif bash -c 'torchrun --nproc_per_node 2 pretrain_gpt.py {f}'", 2),
    "mpirun": ("mpirun -np 16 --hostfile h -x PATH python pretrain_gpt.py {f}", 16),
    "accelerate": ("accelerate launch --num_processes 16 --num_machines 2 pretrain_gpt.py {f}", 16),
    "deepspeed": ("deepspeed --num_nodes 2 --num_gpus 4 pretrain_gpt.py {f}", 8),
    "accelerate, hyphens": ("accelerate launch --num-processes=8 pretrain_gpt.py {f}", 8),
    "horovodrun": ("horovodrun -np 4 python pretrain_gpt.py {f}", 4),
    "launch module": ("python -m torch.distributed.launch --nproc_per_node 4 --nnodes 2 pretrain_gpt.py {f}", 8),
    "run module": ("python3 -m torch.distributed.run --nproc-per-node=4 pretrain_gpt.py {f}", 4),
    "program in a variable": ("SCRIPT=/code/pretrain_gpt.py\ntorchrun --nproc_per_node 2 $SCRIPT {f}", 2),
    "path by the script": ('cd "$(dirname "$0")"\npython ../pretrain_gpt.py {f}', 1),
    "awk": ("G=$(awk 'BEGIN {{ print 2 * 4 }}')\npython pretrain_gpt.py {f} --global-batch-size $G", 1),
    "awk with quotes": (
        """G=$(awk 'BEGIN {{ printf "%d", 2 * 4 }}')\npython pretrain_gpt.py {f} --global-batch-size "$G\"""",
        1,
    ),
    "awk in double quotes": (
        """G="$(awk "BEGIN {{ print \\"8\\" }}")"\npython pretrain_gpt.py {f} --global-batch-size $G""",
        1,
    ),
    "awk in arithmetic": (
        """G=$(( $(awk 'BEGIN {{ print ")" ? 4 : 1 }}') * 2 ))\npython pretrain_gpt.py {f} --global-batch-size $G""",
        1,
    ),
    "python in a command": (
        """G=$(python3 -c 'print("8".strip())')\npython pretrain_gpt.py {f} --global-batch-size $G""",
        1,
    ),
    "home": ("HOME=/home; python pretrain_gpt.py {f} --load ~/llama --save a~/b --data-path '~/c' ~/", 1),
    "subshell that sets": ("A=--bf16; (A=--fp16); A=--fp16 & python pretrain_gpt.py {f} $A", 1),
    "counting loop": (
        'A=; for ((i = 1; i < 3; i++)); do A+=" data-$i"; done; python pretrain_gpt.py {f} --data-path $A',
        1,
    ),
    "braces": ("python pretrain_gpt.py {f} --data-path data-{{1..3}} x{{a,b}}", 1),
    "list with commas": ('L=a,b; IFS=,; for d in $L; do A+=("$d"); done; python pretrain_gpt.py {f} "${{A[@]}}"', 1),
    "exit before another command": ("python pretrain_gpt.py {f}; exit 0; python pretrain_gpt.py --bf16", 1),
    "backquotes": ("G=`expr 2 \\* 4`\npython pretrain_gpt.py {f} --global-batch-size $G", 1),
    "xargs": ("echo {f} | xargs python pretrain_gpt.py", 1),
}
REFUSED = {
    "here-document to bash": None,  # no command is seen, and the tool says so
    "xargs": "xargs reads words of the training command from its input",
}
# Words that stand for values that only a run could know.
UNKNOWN = ("awk", "awk with quotes", "awk in double quotes", "awk in arithmetic", "python in a command")
RECORD = """#!{python}
import json, os, sys
words = sys.argv[1:]
if "-c" in words or os.path.basename(sys.argv[0]).startswith("python") and not any(w.endswith(".py") for w in words):
    os.execv({python!r}, [{python!r}, *words])
with open(os.environ["RECORD"], "a") as file:
    at = next(n for n, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
    file.write(json.dumps(words[at + 1:]) + "\\n")
"""
# Starts the rest of its command, from the first word that starts one.
START = """#!/bin/bash
while [ $# -gt 0 ]; do case $1 in bash|torchrun|python) exec "$@" ;; *) shift ;; esac; done
"""


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """A script's text -> the words after pretrain_gpt.py of the command that bash starts."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("torchrun", "python", "python3", "accelerate", "deepspeed"):
        (folder / name).write_text(RECORD.format(python=sys.executable))
    for name in ("srun", "docker", "singularity", "apptainer", "mpirun", "horovodrun"):
        (folder / name).write_text(START)
    for file in folder.iterdir():
        file.chmod(0o755)
    record = folder / "record"

    def run(text):
        record.unlink(missing_ok=True)
        environment = {"PATH": f"{folder}:/usr/bin:/bin", "RECORD": str(record), "HOME": str(folder)}
        subprocess.run([shutil.which("bash"), "-c", text, "script"], env=environment, cwd=folder, timeout=20)
        return [json.loads(line) for line in record.read_text().splitlines()]

    return run


@pytest.mark.parametrize("name", FORMS)
def test_the_command_is_the_one_that_bash_starts(bash, name, tmp_path):
    form, world = FORMS[name]
    text = form.format(f=FLAGS)
    script = tmp_path / "train.sh"
    script.write_text(text)
    if name in REFUSED:
        if REFUSED[name] is None:
            assert read_launch(["bash", str(script)]) == []
        else:
            with pytest.raises(ConfigError, match=REFUSED[name]):
                read_launch(["bash", str(script)])
        return
    (expected,) = bash(text)
    (found,) = read_launch(["bash", str(script)])
    assert found.world == world
    if name in UNKNOWN:
        assert list(found.argv[:-1]) == expected[:-1] and found.unresolved and expected[-1] == "8"
    else:
        assert list(found.argv) == expected and not found.unresolved


CHILD = "python pretrain_gpt.py --num-layers 4 --context-parallel-size $CP"


@pytest.mark.parametrize(
    "call",
    [
        "CP=2 bash {child}",
        "env CP=2 bash {child}",
        "export CP=2\nbash {child}",
        "export CP=2; source {child}",
        "CP=2\n. {child}",
        "CP=2 OTHER=3 bash {child} more",
        "env -u X CP=2 bash {child}",
        "CP=1; env -i PATH=$PATH RECORD=$RECORD CP=2 bash {child}",
        "set -a; CP=2; bash {child}",
        "declare -x CP=2; bash {child}",
        "cd /; CP=2 bash {child}",
    ],
)
def test_variables_in_front_of_a_script(bash, tmp_path, call):
    child = tmp_path / "train.sh"
    child.write_text(CHILD)
    text = call.format(child=child)
    (expected,) = bash(text)
    (found,) = read_launch([text])
    assert list(found.argv) == expected == ["--num-layers", "4", "--context-parallel-size", "2"]
    outer = tmp_path / "outer.sh"
    outer.write_text(text)
    assert read_launch(["bash", str(outer)]) == [found]


@pytest.mark.parametrize("call", ["CP=2\nbash {child}", "export CP=2\nenv -u CP bash {child}"])
def test_started_scripts_see_exported_variables_only(bash, tmp_path, call):
    child, outer = tmp_path / "train.sh", tmp_path / "outer.sh"
    child.write_text(CHILD)
    outer.write_text(call.format(child=child))
    (expected,) = bash(outer.read_text())
    (command,) = read_launch(["bash", str(outer)])
    assert list(command.argv) == expected == ["--num-layers", "4", "--context-parallel-size"]


@pytest.mark.parametrize(
    ("options", "cp", "nodes"),
    [
        ("--export=ALL,CP=2", "2", "3"),
        ("--export ALL,CP=2 --nodes 4", "2", "4"),
        ("--export=CP=2 -N 4", "2", "4"),
        ("", "1", "3"),
    ],
)
def test_variables_of_a_submitted_script(tmp_path, options, cp, nodes):
    """As sbatch sets them; its own options win over the lines of the script."""
    (tmp_path / "train.sh").write_text(f"#!/bin/bash\n#SBATCH --nodes=3\n{CHILD} --seq-length $SLURM_NNODES")
    (tmp_path / "submit.sh").write_text(f"export CP=1\nsbatch {options} train.sh")
    (command,) = read_launch(["bash", str(tmp_path / "submit.sh")])
    assert command.argv[2:] == ("--context-parallel-size", cp, "--seq-length", nodes)
    if options:
        (command,) = read_launch(["sbatch", *options.split(), str(tmp_path / "train.sh")])
        assert command.argv[2:] == ("--context-parallel-size", cp, "--seq-length", nodes)


def test_a_submitted_script_without_the_callers_variables(tmp_path):
    (tmp_path / "train.sh").write_text(CHILD)
    (tmp_path / "submit.sh").write_text("export CP=1\nsbatch --export=NONE train.sh")
    (command,) = read_launch(["bash", str(tmp_path / "submit.sh")])
    assert command.argv == ("--num-layers", "4", "--context-parallel-size")


@pytest.mark.parametrize(
    ("script", "cp"),
    [
        ("source env.sh", "1"),
        ("source ./env.sh", "1"),
        ('source "$(dirname "$0")/env.sh"', "2"),
        ('HERE=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")"); source $HERE/env.sh', "2"),
        ('cd "$(dirname "$0")"; source ./env.sh', "2"),
        ('cd "$(dirname "$0")"; cd inner; source ./env.sh', "3"),
        ("(cd scripts); source ./env.sh", "1"),
        ("cd scripts/inner && . ./env.sh", "3"),
        ('source "$(dirname "$0")/inner/source.sh"', "3"),
        ('bash "$(dirname "$0")/inner/start.sh"; exit', "3"),
    ],
)
def test_files_of_one_name_in_several_folders(bash, tmp_path, monkeypatch, script, cp):
    """The one that bash reads from the folder where it is started."""
    inner = tmp_path / "scripts" / "inner"
    inner.mkdir(parents=True)
    for number, folder in enumerate((tmp_path, inner.parent, inner), 1):
        (folder / "env.sh").write_text(f"CP={number}")
    (inner / "source.sh").write_text('source "$(dirname "${BASH_SOURCE[0]}")/env.sh"')
    (inner / "start.sh").write_text(f'source "$(dirname "$0")/env.sh"\n{CHILD}')
    (inner.parent / "train.sh").write_text(f"{script}\n{CHILD}")
    monkeypatch.chdir(tmp_path)
    (expected,) = bash(f"cd {tmp_path} && bash scripts/train.sh")
    (command,) = read_launch(["bash", "scripts/train.sh"])
    assert list(command.argv) == expected and expected[-1] == cp


@pytest.mark.parametrize("where", ["cwd", "beside", "above"])
def test_scripts_are_looked_for_where_one_may_submit(tmp_path, monkeypatch, where):
    root, folder = tmp_path / "repo", tmp_path / "repo" / "examples" / "llama"
    folder.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    name = {"cwd": "env.sh", "beside": "env.sh", "above": "examples/llama/env.sh"}[where]
    ((elsewhere if where == "cwd" else folder) / "env.sh").write_text("CP=2")
    (folder / "train.sh").write_text(f"source {name}\n{CHILD}")
    (found,) = read_launch(["bash", str(folder / "train.sh")])
    assert found.argv[-1] == "2" and root.is_dir()


def test_numbers_that_only_a_run_knows_are_listed_and_not_refused():
    words = [*FLAGS.split(), "--num-attention-heads", "4", "--seq-length", "8", "--max-position-embeddings", "8"]
    words += [
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "99",
        "--train-iters",
        "$(awk '{print}')",
    ]
    verdict = check_command([*words, "--lr", "$LR", "--save", "$DIR", "--save-interval", "5"], 1)
    assert verdict.accepted, verdict.problems
    assert verdict.unknown == ("--train-iters $(awk '{print}')", "--lr $LR")
    text = " ".join(verdict.words)
    assert "--train-iters $(awk '{print}')" in text and "--lr $LR" in text and "--save $DIR" in text
    wrong = check_command([*words, "--lr", "$LR", "--min-lr", "low"], 1)
    assert [problem for problem, _ in wrong.problems] == ["--min-lr: needs a number, got 'low'"]
