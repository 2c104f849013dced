"""Qwen3-Next and Qwen3.5: gated delta nets and attention with an output gate, against transformers."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from megatron.base.errors import CheckpointError
from megatron.core.models.hf.families import read_config
from tests.unit.models.builds import assert_gradients, losses, make_ids
from tests.unit.models.hf_models import DELTA_NETS, edit_json, save_hf_model
from tests.unit.models.test_hf_conversion import in_our_names, load, logits_of


@pytest.mark.parametrize("name", DELTA_NETS)
@pytest.mark.parametrize(("samples", "length"), [(1, 7), (3, 65), (2, 131)])
def test_logits_and_gradients(tmp_path, name, samples, length):
    """Lengths around the chunks of 64 tokens in which both compute the delta rule."""
    theirs = save_hf_model(name, tmp_path)
    ours, source = load(tmp_path)
    ids = make_ids(samples, length)
    tokens, labels = ids[:, :-1], ids[:, 1:]
    with torch.no_grad():
        logits = logits_of(ours, tokens, theirs.config.vocab_size)
    expected = theirs(tokens).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    losses(ours, ids).mean().backward()
    F.cross_entropy(expected.transpose(1, 2), labels).backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    assert_gradients({key: p.grad for key, p in ours.named_parameters()}, in_our_names(source, gradients))
