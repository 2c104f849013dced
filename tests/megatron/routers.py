"""Routers of Megatron-LM and ours on the same logits: the same experts, weights, and counts of the balance losses.

By hand, with an interpreter that has what Megatron-LM imports (see on_cpu.py): `python tests/megatron/routers.py
MEGATRON [SEED]`. It draws 80 routers with groups, 80 without and 80 with Sinkhorn's choice: score functions, biases,
scaling, numbers of experts and groups. Exit code 1 if a token goes to other experts. It is a script and no module: our
package of the same name is read by a process of its own.
"""

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).parents[2]
TOKENS = 200


def draw(rng, *, grouped):
    """The arguments of a router, under Megatron-LM's names."""
    groups = rng.choice([2, 4, 8]) if grouped else None
    group_topk = rng.randint(1, groups) if groups else None
    experts = (groups or 1) * rng.choice([4, 8, 16])
    topk = (group_topk or 1) * rng.randint(1, 2) if groups else rng.randint(1, 8 if experts > 8 else 4)
    sigmoid = rng.random() < 0.5
    return {
        "topk": min(topk, experts),
        "experts": experts,
        "use_pre_softmax": not sigmoid and (rng.random() < 0.5 or topk == 1),
        "num_groups": groups,
        "group_topk": group_topk,
        "scaling_factor": rng.choice([None, 2.5]),
        "score_function": "sigmoid" if sigmoid else "softmax",
        "bias": sigmoid and rng.random() < 0.7,
        "seed": rng.randrange(1 << 30),
        "sinkhorn": False,
    }


def draw_sinkhorn(rng):
    """The arguments of a router whose choice is balanced by Sinkhorn's algorithm."""
    topk = rng.choice([1, 1, 2, 4])
    sigmoid = topk == 1
    plain = draw(rng, grouped=False) | {"scaling_factor": None, "bias": False, "sinkhorn": True, "topk": topk}
    return plain | {"score_function": "sigmoid" if sigmoid else "softmax", "use_pre_softmax": not sigmoid}


def inputs(case):
    """logits [T, E] and the bias [E] of a case, or None."""
    generator = torch.Generator().manual_seed(case["seed"])
    logits = torch.randn(TOKENS, case["experts"], generator=generator) * 3
    return logits, torch.randn(case["experts"], generator=generator) * 0.2 if case["bias"] else None


def ours(cases):
    """(experts, weights, the k highest scores) of each case, sorted by expert."""
    from megatron.kernels.ops import routing  # noqa: PLC0415
    from megatron.spec.moe import RouterSpec  # noqa: PLC0415

    found = []
    for case in cases:
        logits, bias = inputs(case)
        softmax, pre = case["score_function"] == "softmax", case["use_pre_softmax"]
        rule = RouterSpec(
            1,
            case["experts"],
            case["topk"],
            case["score_function"],
            normalized=not pre if softmax else case["topk"] > 1,
            scaling=case["scaling_factor"] or 1.0,
            groups=case["num_groups"] or 1,
            group_topk=case["group_topk"] or 1,
            by_logits=softmax and not pre and (case["num_groups"] or 1) > 1,
            has_bias=case["bias"],
        )
        balanced = routing.sinkhorn_choice(logits, None, case["topk"]) if case["sinkhorn"] else None
        routed = routing.route(logits, bias, rule, balanced)
        highest = routing.highest(routed.scores, case["topk"])
        order = routed.chosen.argsort(1)
        found.append([x.tolist() for x in (routed.chosen.gather(1, order), routed.weights.gather(1, order))])
        found[-1].append(highest.sort(1).values.tolist())
    return found


def theirs(cases):
    """The same from Megatron-LM."""
    from megatron.core.transformer.moe import moe_utils  # noqa: PLC0415
    from megatron.core.transformer.moe.router import TopKRouter  # noqa: PLC0415

    found = []
    for case in cases:
        logits, bias = inputs(case)
        names = ("topk", "use_pre_softmax", "num_groups", "group_topk", "scaling_factor", "score_function")
        if case["sinkhorn"]:
            config = SimpleNamespace(moe_aux_loss_coeff=0)
            router = SimpleNamespace(topk=case["topk"], config=config, training=True)
            probs, routing_map = TopKRouter.sinkhorn_load_balancing(router, logits)
        else:
            probs, routing_map = moe_utils.topk_routing_with_score_function(
                logits, expert_bias=bias, **{name: case[name] for name in names}
            )
        counted, _ = moe_utils.compute_routing_scores_for_aux_loss(logits, case["topk"], case["score_function"])
        experts = [row.nonzero().flatten().tolist() for row in routing_map]
        weights = [row[row_map].tolist() for row, row_map in zip(probs, routing_map, strict=True)]
        found.append([experts, weights, [row.nonzero().flatten().tolist() for row in counted]])
    return found


def main():
    """Compares the two, each in a process of its own."""
    megatron, seed = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    rng = random.Random(seed)
    wrong = 0
    for kind in ("with groups", "without", "sinkhorn"):
        cases = [
            draw_sinkhorn(rng) if kind == "sinkhorn" else draw(rng, grouped=kind == "with groups") for _ in range(80)
        ]
        both = []
        for side, path in (("ours", ROOT), ("theirs", megatron)):
            words = [sys.executable, __file__, side]
            environment = {"PYTHONPATH": str(path), "PATH": "/usr/bin:/bin", "TORCHDYNAMO_DISABLE": "1"}
            done = subprocess.run(words, input=json.dumps(cases), capture_output=True, text=True, env=environment)
            assert done.returncode == 0, done.stderr
            both.append(json.loads(done.stdout.splitlines()[-1]))
        experts = sum(a[0] != b[0] for a, b in zip(*both, strict=True))
        counts = sum(a[2] != b[2] for a, b in zip(*both, strict=True))
        weights = max(
            (torch.tensor(a[1]) - torch.tensor(b[1])).abs().max().item()
            for a, b in zip(*both, strict=True)
            if a[0] == b[0]
        )
        print(f"{kind}: {experts} of 80 choose other experts, {counts} count others; weights differ by {weights:.1e}")
        wrong += experts + counts + (weights > 1e-6)
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1] in ("ours", "theirs"):
        print(json.dumps({"ours": ours, "theirs": theirs}[sys.argv[1]](json.load(sys.stdin))))
    else:
        sys.exit(main())
