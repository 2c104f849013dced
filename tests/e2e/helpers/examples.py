"""Scripts of examples/, run as a user starts them; and small models and datasets to run them on."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from megatron.core.datasets.sft_preprocess import SFTOptions, preprocess_sft
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from tests.e2e.helpers import launch
from tests.unit.datasets.chat import CORPUS, PLAIN, messages, tokenizer_folder
from tests.unit.datasets.helpers import write_documents
from tests.unit.models.hf_models import save_published

ROOT = Path(__file__).parents[3]
MODELS = {
    "llama": "Llama 3.1",
    "mistral": "Mistral 7B v0.1",
    "qwen": "Qwen3 0.6B",
    "baichuan": "Baichuan 7B",
    "moe": "Mixtral 8x7B",
}


# By which examples/platform.sh would recognise the platform that the tests run on.
PLATFORM = re.compile("(PET|OMPI|SKYPILOT|SLURM|MASTER)_|WORLD_SIZE$|RANK$|LOCAL_RANK$")


def start(path, folder, *words, **environment):
    """The finished script, in `folder` and with it first on the PATH."""
    inherited = {name: value for name, value in os.environ.items() if not PLATFORM.match(name)}
    own = {"PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / path), *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env={**inherited, **own, **environment}, capture_output=True, text=True, timeout=100
    )


def script(path, folder, *words, **environment):
    """What the script prints when all goes well."""
    done = start(path, folder, *words, **environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def command_of(output):
    """(torchrun's words, the program, its flags) of the command that a script printed."""
    lines = (re.match(r"(?:env \w+=1 )?(torchrun .*)", line) for line in output.splitlines())
    words = shlex.split(next(line[1] for line in lines if line))
    at = next(number for number, word in enumerate(words) if word.startswith(str(ROOT)))
    return words[1:at], Path(words[at]).name, words[at + 1 :]


def flag(flags, name):
    """The value that counts: the last one."""
    return flags[len(flags) - flags[::-1].index(name)]


def steps(output, total):
    """Iterations of a run of `total` that have a log line."""
    return [int(step) for step in re.findall(rf"iteration +(\d+)/ +{total} \|", output)]


def make_models_and_data(folder):
    """In `folder` a model of each family, its tokenizer beside it; `text` and `chat`: datasets for all of them."""
    for module in (launch.HF_TOKENIZER, "transformers.modeling_utils"):
        launch.warm(module)
    tokenizer_folder(folder / "tokenizer", PLAIN, metaspace=True, vocabulary=90)
    tokenizer = HuggingFaceTokenizer(str(folder / "tokenizer"))
    for family, name in MODELS.items():
        save_published(name, folder / family, torch.float32)
        shutil.copytree(folder / "tokenizer", folder / family, dirs_exist_ok=True)
    write_documents(folder / "text", [[*tokenizer.encode(text), tokenizer.eod] for text in CORPUS * 10])
    with open(folder / "chat.jsonl", "w") as file:
        file.writelines(json.dumps({"messages": messages(*CORPUS[:2])}) + "\n" for _ in range(200))
    options = SFTOptions(input=(str(folder / "chat.jsonl"),), output_prefix=str(folder / "chat"), workers=1)
    preprocess_sft(options, tokenizer)
