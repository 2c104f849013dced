"""The objectives of megatron/rl and those of TRL's trainers on the same log-probabilities: values and gradients.

By hand, with an interpreter that has torch and TRL: `python -m tests.oracles.trl_losses`. Each row of the table that it
prints is the largest difference on 20 random batches, of values above 1 relative to the value; exit code 1 if one is
above 1e-6. The trainers' loss functions
run as they are, on a stand-in for the trainer, with a model that returns the log-probabilities of the batch. Ours come
packed into rows in a random order, TRL's as one padded row per sequence.
"""

import sys
from collections import defaultdict
from importlib.metadata import version
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import pad_sequence
from trl import DPOTrainer, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

from megatron.rl.advantages import overlong_penalty
from megatron.rl.aggregation import aggregation_weights, local_counts
from megatron.rl.correction import icepop, truncate
from megatron.rl.divergence import KL_ESTIMATORS
from megatron.rl.objectives import POLICY_LOSSES, ClipRange, as_token_weights, policy_objective
from megatron.rl.preferences import PREFERENCE_LOSSES, PreferencePairs, preference_objective
from tests.unit.rl.batches import NAMES, SEEDS, draw, lay_out

WIDTH, LONGEST, TOLERANCE = 14, 9, 1e-6
# TRL's loss types with the aggregation here. "bnpo" divides by the tokens of a microbatch, here the batch.
AGGREGATIONS = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant", "cispo": "token"}
ACCELERATOR = SimpleNamespace(
    num_processes=1,
    device="cpu",
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
)


def sequences_of(seed):
    """Random sequences of which each has a token to train on: TRL counts those without one in its denominators."""
    sequences = draw(seed, sequences=8, longest=LONGEST)
    for sequence in sequences:
        sequence["mask"][0] = 1.0
    return sequences


def padded(sequences):
    """name -> [sequences, tokens], filled with zeros."""
    return {name: pad_sequence([sequence[name] for sequence in sequences], batch_first=True) for name in NAMES}


def largest_difference(ours, theirs, sequences, places):
    """The largest difference of token weights [b, s] and TRL's gradient [sequences, tokens], whose signs differ."""
    differences = []
    for number, (row, column) in places.items():
        length = len(sequences[number]["old"])
        differences.append((ours[row, column : column + length] + theirs[number, :length]).abs().max().item())
    return max(differences)


def relative(value, expected):
    """The difference of two values, divided by the expected one if that is above 1: TRL computes in fp32."""
    return abs(value - expected) / max(1.0, abs(expected))


def trl_grpo(sequences, loss_type, level, clip, beta, correction):
    """(value, gradient [sequences, tokens]) of TRL's GRPO trainer. correction [sequences, 1 or tokens], or None."""
    values = padded(sequences)
    leaf = values["log_probs"].requires_grad_()
    trainer = SimpleNamespace(
        accelerator=ACCELERATOR,
        args=SimpleNamespace(delta=clip.dual, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=clip.low,
        epsilon_high=1.0 + clip.high if loss_type == "cispo" else clip.high,
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(leaf), None),
    )
    mask = values["mask"]
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros_like(mask, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": values["advantages"][:, 0],
        "old_per_token_logps": values["old"],
        "ref_per_token_logps": values["reference"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": correction,
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss.item(), torch.autograd.grad(loss, leaf)[0]


def trl_correction(sequences, mode):
    """TRL's weights for a mode of --vllm_importance_sampling_mode, with the bounds of `our_correction`."""
    values = padded(sequences)
    difference = (values["old"] - values["sampler"]) * values["mask"]
    ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(max=1.3)
    return ratio.masked_fill((ratio < 0.7) | (ratio > 1.4), 0.0)


def our_correction(experience, mode):
    level, kind = mode.split("_")
    return (truncate(experience, level, 1.3) if kind == "truncate" else icepop(experience, level, 0.7, 1.4)).weights


def compare_grpo(loss_type, level, clip, beta, mode):
    """The largest differences (value, gradient) on all batches."""
    name = "cispo" if loss_type == "cispo" else {"token": "ppo", "sequence": "gspo"}[level]
    worst = (0.0, 0.0)
    for seed in SEEDS:
        sequences = sequences_of(seed)
        log_probs, experience, places = lay_out(sequences, WIDTH, seed)
        # TRL leaves masked tokens in the denominators, so the weights are compared with the counts of all tokens.
        weights = aggregation_weights(experience, AGGREGATIONS[loss_type], local_counts(experience), LONGEST)
        value, token_weights = as_token_weights(
            lambda leaf, experience=experience, weights=weights: policy_objective(
                leaf,
                experience,
                POLICY_LOSSES[name],
                clip,
                weights,
                correction=our_correction(experience, mode) if mode else None,
                divergence=KL_ESTIMATORS["k3"] if beta else None,
                divergence_coefficient=beta,
            ),
            log_probs,
        )
        correction = trl_correction(sequences, mode) if mode else None
        theirs, gradient = trl_grpo(sequences, loss_type, level, clip, beta, correction)
        difference = largest_difference(token_weights, gradient, sequences, places)
        worst = largest([worst, (relative(value.item(), theirs), difference)])
    return worst


def trl_dpo(sequences, loss_types, loss_weights, beta):
    """(value, gradient [sequences, tokens]) of TRL's DPO trainer; the first half of the sequences is chosen."""
    values = padded(sequences)
    mask = values["mask"]
    leaf = (values["log_probs"] * mask).requires_grad_()
    zeros = torch.zeros_like(mask)
    outputs = SimpleNamespace(log_probs=leaf, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    reference = (values["reference"] * mask).sum(1)
    trainer = SimpleNamespace(
        accelerator=ACCELERATOR,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=loss_types,
        loss_weights=loss_weights,
        beta=beta,
        label_smoothing=0.0,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    # The first column is a prompt's token, which nothing predicts.
    shifted = torch.cat([torch.zeros(len(mask), 1), mask], dim=1)
    chosen, rejected = reference.chunk(2)
    inputs = {
        "input_ids": torch.zeros_like(shifted, dtype=torch.int64),
        "attention_mask": torch.ones_like(shifted),
        "completion_mask": shifted,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return loss.item(), torch.autograd.grad(loss, leaf)[0] * mask


def compare_dpo(name, beta, sft):
    """The largest differences (value, gradient) on all batches.

    With an SFT term TRL gets a batch per pair: it takes the mean over all tokens of a batch, and ours is the paper's,
    in which pairs count alike.
    """
    worst = (0.0, 0.0)
    for seed in SEEDS:
        sequences = sequences_of(seed)
        half = len(sequences) // 2
        log_probs, experience, places = lay_out(sequences, WIDTH, seed)
        fields = (experience.reference, experience.mask, experience.sequences, experience.count)
        pairs = PreferencePairs(*fields, torch.arange(half), torch.arange(half, 2 * half))
        value, token_weights = as_token_weights(
            lambda leaf, pairs=pairs, half=half: preference_objective(
                leaf, pairs, PREFERENCE_LOSSES[name], half, beta=beta, sft_coefficient=sft
            ),
            log_probs,
        )
        if sft:
            theirs, gradient = 0.0, torch.zeros_like(padded(sequences)["mask"])
            for pair in range(half):
                members = [sequences[pair], sequences[pair + half]]
                loss, slopes = trl_dpo(members, [name, "sft"], [1.0, sft], beta)
                theirs += loss / half
                gradient[[pair, pair + half], : slopes.shape[1]] = slopes / half
        else:
            theirs, gradient = trl_dpo(sequences, [name], [1.0], beta)
        difference = largest_difference(token_weights, gradient, sequences, places)
        worst = largest([worst, (relative(value.item(), theirs), difference)])
    return worst


def compare_overlong():
    lengths = list(range(1, 140))
    theirs = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)([[0] * n for n in lengths])
    return (overlong_penalty(torch.tensor(lengths), 100, 20) - torch.tensor(theirs)).abs().max().item()


def largest(differences):
    """The largest values and the largest gradients of some comparisons."""
    values, gradients = zip(*differences, strict=True)
    return max(values), max(gradients)


def rows():
    """(objective, settings, value, gradient) of all comparisons."""
    for name in PREFERENCE_LOSSES:
        yield f"DPO, `{name}`", "beta 0.1, 0.5", *largest(compare_dpo(name, beta, 0.0) for beta in (0.1, 0.5))
        yield f"DPO, `{name}` and 0.7 x `sft`", "beta 0.1", *compare_dpo(name, 0.1, 0.7)
    for loss_type, level in [*((kind, "token") for kind in AGGREGATIONS), ("grpo", "sequence"), ("dapo", "sequence")]:
        title, low = f"GRPO, `{loss_type}`, {level} ratio", 1.0 if loss_type == "cispo" else 0.2
        clips = [ClipRange(low, 0.2), ClipRange(low, 0.28)]
        note = "epsilon_high 0.2, 0.28; beta 0, 0.04"
        if loss_type != "cispo":
            clips.append(ClipRange(low, 0.28, dual=1.5))
            note += "; delta None, 1.5"
        differences = [compare_grpo(loss_type, level, clip, beta, None) for clip in clips for beta in (0.0, 0.04)]
        yield title, note, *largest(differences)
        # A correction of tokens in a loss of sequences is another objective: TRL's factor of a sequence's gradient is
        # the mean over its tokens, and in the token form of GSPO each token has its own.
        sizes = ("token", "sequence") if level == "token" else ("sequence",)
        modes = [f"{size}_{kind}" for size in sizes for kind in ("truncate", "mask")]
        differences = [compare_grpo(loss_type, level, ClipRange(low, 0.28), 0.04, mode) for mode in modes]
        yield title, f"epsilon_high 0.28, beta 0.04; {', '.join(modes)}", *largest(differences)


def main():
    """Prints the table; returns whether a difference is too large."""
    print(f"TRL {version('trl')}, transformers {version('transformers')}, torch {version('torch')}\n")
    print("| objective of TRL | settings | value | gradient |\n|---|---|---|---|")
    overlong = compare_overlong()
    print(f"| `get_soft_overlong_punishment` | lengths 1 to 139, limit 100, cache 20 | {overlong:.0e} | |")
    worst = overlong
    for objective, settings, value, gradient in rows():
        print(f"| {objective} | {settings} | {value:.0e} | {gradient:.0e} |")
        worst = max(worst, value, gradient)
    return worst > TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
