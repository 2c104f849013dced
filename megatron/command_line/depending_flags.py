"""Flags of other programs whose meaning depends on the values of other flags, and what the flags together stand for.

- `--noop-layers` (MindSpeed): layers of these numbers do nothing, so that every pipeline stage has equally many. Here
  the model has only the others, and a layout of stages.
- `--first-k-dense-replace` (MindSpeed): that many layers before those with experts are dense.
- `--moe-tp-extend-ep` (MindSpeed): the ranks of tp share experts out as those of ep do, and hold whole ones.
- `--train-tokens`, `--lr-decay-tokens`, `--lr-warmup-tokens` (Megatron-DeepSpeed): lengths of training in tokens of
  full sequences; the run ends with the step that reaches the length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megatron.config.layers import layer_pattern

Flags = Mapping[str, Sequence[str]]  # as typed, with their words
Words = tuple[str, ...]
_LENGTHS = {"--train-tokens": "--train", "--lr-decay-tokens": "--lr-decay", "--lr-warmup-tokens": "--lr-warmup"}
_SHORTER = re.compile(r"--(curriculum-learning|data-efficiency-curriculum-learning|random-ltd|rampup-batch-size)")


def meanings(flags: Flags) -> dict[str, Words]:
    """Returns the words of this program that some of the flags stand for; the others keep their own meaning."""
    return {
        **_dense_layers_first(flags),
        **_without_noop_layers(flags),
        **_experts_over_tp(flags),
        **_lengths_in_tokens(flags),
    }


def _number(flags: Flags, flag: str) -> int | None:
    words = flags.get(flag, ())
    return int(words[0]) if len(words) == 1 and words[0].isascii() and words[0].isdecimal() else None


def _without_noop_layers(flags: Flags) -> dict[str, Words]:
    layers = _number(flags, "--num-layers")
    listed = [part for word in flags.get("--noop-layers", ()) for part in word.split(",")]
    if not layers or not listed or not all(part.isascii() and part.isdecimal() for part in listed):
        return {}
    idle = {int(part) for part in listed}
    if max(idle) >= layers or "--pipeline-model-parallel-layout" in flags:
        return {}
    replacements: dict[str, Words] = {"--num-layers": ("--num-layers", str(layers - len(idle)))}
    works = [layer not in idle for layer in range(layers)]
    experts = _layers_with_experts(flags, layers)
    if experts is None:
        return {}
    if not all(experts):
        replacements |= _pattern(flags, [has for has, is_layer in zip(experts, works, strict=True) if is_layer])
    pp, chunk = _number(flags, "--pipeline-model-parallel-size") or 1, "--num-layers-per-virtual-pipeline-stage"
    per_stage = _number(flags, chunk) or layers // pp
    if layers % per_stage or (layers // per_stage) % pp:
        return {}
    if pp == 1:
        return replacements | {"--noop-layers": ()}
    stages = ["t" * sum(works[first : first + per_stage]) for first in range(0, layers, per_stage)]
    replacements["--noop-layers"] = ("--pipeline-model-parallel-layout", f"E{'|'.join(stages)}L")
    return replacements | ({chunk: ()} if chunk in flags else {})


def _layers_with_experts(flags: Flags, layers: int) -> Sequence[bool] | None:
    """Whether each layer has experts, by --moe-layer-freq and --first-k-dense-replace; None if that is unclear."""
    words, dense = flags.get("--moe-layer-freq", ("1",)), _number(flags, "--first-k-dense-replace") or 0
    if list(words) in (["1"], ["-1"]):
        return [layer >= dense for layer in range(layers)]
    try:
        choice = layer_pattern(" ".join(words), layers)
    except ValueError:
        return None
    chosen = [layer % choice == 0 for layer in range(layers)] if isinstance(choice, int) else [bool(c) for c in choice]
    return [has and layer >= dense for layer, has in enumerate(chosen)]


def _pattern(flags: Flags, experts: Sequence[bool]) -> dict[str, Words]:
    words = ("--moe-layer-freq", f"[{','.join(str(int(has)) for has in experts)}]")
    pattern_flags = [flag for flag in ("--moe-layer-freq", "--first-k-dense-replace") if flag in flags]
    return dict.fromkeys(pattern_flags, words)


def _dense_layers_first(flags: Flags) -> dict[str, Words]:
    layers = _number(flags, "--num-layers")
    if not layers or not _number(flags, "--first-k-dense-replace") or "--num-experts" not in flags:
        return {}
    experts = _layers_with_experts(flags, layers)
    return {} if experts is None or all(experts) else _pattern(flags, experts)


def _experts_over_tp(flags: Flags) -> dict[str, Words]:
    if "--moe-tp-extend-ep" not in flags or "--num-experts" not in flags or "--expert-tensor-parallel-size" in flags:
        return {}
    ep, tp = (_number(flags, f"--{axis}-model-parallel-size") or 1 for axis in ("expert", "tensor"))
    size = ("--expert-model-parallel-size", str(ep * tp))
    return {
        **({size[0]: ()} if size[0] in flags else {}),
        "--moe-tp-extend-ep": (*size, "--expert-tensor-parallel-size", "1"),
    }


def _lengths_in_tokens(flags: Flags) -> dict[str, Words]:
    seq, batch = _number(flags, "--seq-length"), _number(flags, "--global-batch-size")
    if not seq or not batch or any(_SHORTER.match(flag) for flag in flags):
        return {}
    unit, tokens_per_unit = ("iters", batch * seq) if "--train-iters" in flags else ("samples", seq)
    replacements: dict[str, Words] = {}
    for flag, name in _LENGTHS.items():
        tokens, other = _number(flags, flag), f"{name}-{unit}"
        if tokens is None:
            continue
        count = tokens // tokens_per_unit
        if flag == "--train-tokens":
            steps = -(-tokens // (batch * seq))
            count = steps if unit == "iters" else steps * batch
            count = min(count, _number(flags, other) or count)
        replacements[flag] = (other, str(count))
        if other in flags:
            replacements[other] = ()
    return replacements
