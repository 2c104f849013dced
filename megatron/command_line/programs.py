"""What a training program of Megatron-LM or a fork trains, as its name says it. No torch.

Flags do not tell it: pretrain_bert.py and pretrain_gpt.py take the same ones. So a command is taken over only if the
name of its program says a decoder that is a model here.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Collection

_VERBS = {"pretrain", "posttrain", "finetune", "train"}
_DECODERS = {"gpt", "llm", "llama", "qwen", "mistral", "mixtral", "baichuan", "gemma", "granite", "olmo", "phi", "yi"}
_OTHER_WORDS = {"megatron", "mcore", "moe", "withga"}
_VERSION = re.compile(r"\d+(\.\d+)?b?")  # llama2, baichuan13b, mcore070
# Flags of Megatron-LLM (EPFL), whose finetune.py trains on documents unless they say otherwise.
_OF_MEGATRON_LLM = {"--model-name", "--data-type"}


def refusal(program: str | None) -> str | None:
    """Returns the reason why a program is not available here; None for one that is, flags alone and an unknown name."""
    if program is None or not program.endswith(".py") or _name(program) in ("finetune", "train_rl"):
        return None
    words = set(_VERSION.sub("", _name(program)).split("_")) - {""}
    if words & _DECODERS and words <= _VERBS | _DECODERS | _OTHER_WORDS:
        return None
    return (
        f"{os.path.basename(program)} is not available here (by its name it trains something else than a GPT on "
        "documents or answers); if its model is a GPT all the same, give its flags alone"
    )


def flags_of_program(program: str | None, flags: Collection[str]) -> list[str]:
    """Returns the flags that a program adds to those of a command line."""
    if trains_on_answers(program, flags):
        return ["--sft"]
    return ["--perform-rl-step"] if program is not None and _name(program) == "train_rl" else []


def trains_on_answers(program: str | None, flags: Collection[str]) -> bool:
    """Returns whether a program is finetune.py, or one of a fork that does the same, on a command line with `flags`."""
    return (
        program is not None
        and _name(program).split("_")[0] in ("finetune", "posttrain")
        and _OF_MEGATRON_LLM.isdisjoint(flags)
    )


def _name(program: str) -> str:
    return os.path.basename(program).removesuffix(".py").lower()
