"""Predictions of further tokens against the formula of DeepSeek-V3 (arXiv 2412.19437, section 2.2), written out here."""

import dataclasses
from datetime import datetime

import pytest
import torch
import torch.nn.functional as F

from megatron.config.data import DataConfig
from megatron.core.parameter import local_parameters
from megatron.core.transformer.context import Positions
from megatron.training.batch import make_batch, make_sft_batch
from megatron.training.logging.line import LogWindow, format_line, parse_line
from megatron.training.logging.writers import step_scalars
from megatron.training.microbatches import one_token_later
from megatron.training.setup import build
from megatron.training.state import StepReport
from megatron.training.step import token_weights
from tests import pool
from tests.unit.config.runs import SHORT_RUN, make_run
from tests.unit.models.builds import CPU, LATENT, LLAMA, SHAPE, make_ids, make_model

TIED = {**LLAMA, "untie_embeddings_and_output_weights": False}
ROPE = {"position_embedding_type": "rope", "add_bias_linear": False}


def normed(module, x):
    return F.rms_norm(x, x.shape[-1:], module.weight, 1e-5)


def by_hand(model, ids, depths):
    """Losses [depths + 1, b, s] of tokens ids[:, :s], from the weights; the last `depths` of depth 1, 2, .. count not."""
    s = ids.shape[1] - 1 - depths
    tokens, positions = ids[:, :s], torch.arange(s).unsqueeze(0)
    hidden = model.hidden(tokens, positions)
    where = Positions(model._tables(positions, s), None)
    words = model.embedding.word_embeddings.weight
    losses = []
    for depth in range(depths + 1):
        if depth:
            layer = model.mtp.layers[depth - 1]
            known = F.embedding(ids[:, depth : s + depth].t(), words)
            both = torch.cat([normed(layer.enorm, known), normed(layer.hnorm, hidden)], dim=-1)
            x = layer.transformer_layer(both @ layer.eh_proj.weight.t(), where)
            hidden = normed(layer.final_layernorm, x)
        logits = (hidden @ model.output_layer.weight.t()).permute(1, 2, 0)[:, : SHAPE["vocab_size"]]
        losses.append(F.cross_entropy(logits, ids[:, depth + 1 : s + depth + 1], reduction="none"))
    return torch.stack(losses)


@pytest.mark.parametrize("fields", [LLAMA, TIED, LATENT], ids=["untied", "tied", "latent"])
def test_losses_and_gradients_of_two_depths(fields):
    depths, s = 2, 12
    model = make_model({**fields, "mtp_num_layers": depths}, pool.groups(), spread=0.1)
    ids = make_ids(3, s + depths)
    rows = [ids[:, depth + 1 : s + depth + 1] for depth in range(depths + 1)]
    losses = torch.stack(model(ids[:, :s], torch.arange(s).unsqueeze(0), labels=rows[0], further_labels=rows[1:]))
    expected = by_hand(model, ids, depths)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    weights = torch.tensor([1.0, 0.3, 0.2]).view(3, 1, 1)
    parameters = list(local_parameters(model).values())
    found, wanted = (torch.autograd.grad((of * weights).mean(), parameters) for of in (losses, expected))
    for name, a, b in zip(local_parameters(model), found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)
        assert a.abs().max() > 0, name


def test_evaluation_and_generation_predict_one_token():
    model = make_model({**LLAMA, "mtp_num_layers": 1}, pool.groups())
    plain = make_model(LLAMA, pool.groups())
    ids, positions = make_ids(2, 8), torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        for labels in (None, ids[:, 1:]):
            assert model(ids[:, :-1], positions, labels=labels).equal(plain(ids[:, :-1], positions, labels=labels))


def test_labels_one_token_later_stay_in_their_document():
    eod = 9
    ids = torch.tensor([[1, 2, eod, 3, 4, 5, 6, eod]])
    data = DataConfig(seq_length=7, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)
    batch = make_batch(ids, eod, data)
    assert batch.labels.tolist() == [[2, 9, 3, 4, 5, 6, 9]] and batch.loss_mask.tolist() == [[1, 1, 0, 1, 1, 1, 1]]
    later = one_token_later(batch)
    # From 1: 9 counts. From 2: 3 is of the next document. From 9: masked before. The last token has no later label.
    assert later.labels.tolist() == [[9, 3, 4, 5, 6, 9, 0]] and later.loss_mask.tolist() == [[1, 0, 0, 1, 1, 1, 0]]
    again = one_token_later(later)
    assert again.labels.tolist() == [[3, 4, 5, 6, 9, 0, 0]] and again.loss_mask.tolist() == [[0, 0, 0, 1, 1, 0, 0]]
    crossing = one_token_later(make_batch(ids, eod, dataclasses.replace(data, reset_attention_mask=False)))
    assert crossing.loss_mask.tolist() == [[1, 0, 1, 1, 1, 1, 0]]


def test_labels_of_conversations_stay_in_them():
    # Two conversations and padding: tokens, marks (1: trained), numbers of conversations.
    rows = torch.tensor([[[1, 2, 3, 4, 5, 6], [0, 1, 1, 0, 1, 2], [0, 0, 0, 1, 1, 2]]])
    batch = make_sft_batch(rows)
    trained = [bool(x) for x in batch.loss_mask[0]]
    assert trained[:2] == [True, True] and trained[3]
    later = one_token_later(batch)
    assert later.loss_mask.tolist() == [[True, False, False, False, False, False]] and later.labels[0, 0] == 3


@pytest.mark.parametrize("per_token", [False, True])
def test_each_depth_has_the_weight_of_its_own_tokens(per_token):
    flags = {**SHORT_RUN, **ROPE, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}
    trainer = build(make_run(**flags, calculate_per_token_loss=per_token), pool.groups(), CPU)
    batches = trainer.readers.train.read(2)
    microbatches = trainer.step._microbatches(batches)
    totals = [sum(float(of[depth].weights.sum()) for of in microbatches.targets) for depth in range(3)]
    assert totals == pytest.approx([1.0, 0.25, 0.25], rel=1e-6)
    (plain, _), later = token_weights(batches, pool.groups(), per_token), one_token_later(one_token_later(batches[0]))
    assert microbatches.targets[0][0].weights.equal(plain)
    assert microbatches.targets[0][2].mask.equal(later.loss_mask)
    objective = trainer.step.forward_backward(batches)
    main, *further = objective.means(objective.numbers.tolist())
    assert objective.read() == pytest.approx(main + 0.25 * sum(further), rel=1e-5)


def test_the_log_shows_the_loss_of_each_depth():
    def report(iteration, loss):
        return StepReport(iteration, loss, 1.0, 1.0, 1e-3, 4, 256, 1.0, further_losses=(loss + 1, loss + 2))

    window = LogWindow(1.0, 1, None)
    for iteration, loss in ((1, 3.0), (2, 5.0)):
        window.add(report(iteration, loss))
    line = window.close(consumed_samples=8, train_iters=2, remaining_samples=0, peak_memory=0)
    text = format_line(line, datetime(2026, 1, 1))
    assert "| lm loss: 4.000000E+00 | mtp_1 loss: 5.000000E+00 | mtp_2 loss: 6.000000E+00 | loss scale" in text
    assert parse_line(text)["mtp_2 loss"] == 6.0
    assert step_scalars(report(1, 3.0))["mtp_1 loss"] == 4.0
