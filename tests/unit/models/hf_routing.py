"""The experts and the logits of a Hugging Face model, of ours, and the positions where rounding decides no choice."""

import torch

from megatron.core.transformer.moe.router import Router


@torch.no_grad()
def of_theirs(model, tokens):
    """(logits [b, s, vocabulary], experts of each layer [b, s, k], clear [b, s]).

    clear: no choice of experts, there or before in the sample, is a matter of rounding. Their routers round their
    logits to bf16, and ours do not; a margin of 0.02 standard deviations is about two roundings.
    """
    clear, chosen = [], []

    def on_router(gate, args, out):
        logits = out[0].float()
        best = logits.topk(gate.top_k + 1).values
        clear.append((best[:, -2] - best[:, -1] > 0.02 * logits.std()).view(tokens.shape))
        chosen.append(out[2].sort(1).values.view(*tokens.shape, -1))

    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(on_router) for router in routers]
    logits = model(tokens).logits
    for hook in hooks:
        hook.remove()
    return logits, chosen, torch.stack(clear).all(0).long().cummin(1).values.bool()


@torch.no_grad()
def of_ours(model, tokens, vocab):
    """(logits [b, s, vocabulary], experts of each layer [b, s, k])"""
    chosen = []

    def on_router(router, args, out):
        chosen.append(out[0].sort(1).values.view(*tokens.t().shape, -1).transpose(0, 1))

    hooks = [module.register_forward_hook(on_router) for module in model.modules() if isinstance(module, Router)]
    logits = model(tokens, torch.arange(tokens.shape[1]).unsqueeze(0))[..., :vocab].transpose(0, 1)
    for hook in hooks:
        hook.remove()
    return logits, chosen
