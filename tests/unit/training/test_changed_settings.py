"""What a continued run says about data and losses other than those of the checkpoint."""

import json
import logging
from pathlib import Path

import pytest

from megatron.training.changed_settings import name_changed_settings
from tests.unit.config.runs import make_run

DATA = {"mock_data": False, "data_path": ("0.3", "/a/one", "0.7", "/a/two"), "num_experts": 4}


def logged(caplog, monkeypatch, **changes):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    saved = json.loads(json.dumps(make_run(**DATA).to_dict()))
    caplog.clear()
    name_changed_settings(Path("run/iter_0000005"), saved, make_run(**{**DATA, **changes}).to_dict())
    return "\n".join(dict.fromkeys(caplog.messages))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"data_path": ("/a/three",)}, "--data-path 3/10 one 7/10 two there and three here"),
        ({"data_path": ("1", "/a/one", "1", "/a/two")}, "--data-path 3/10 one 7/10 two there and 1/2 one 1/2 two here"),
        ({"split": "90,10,0"}, "--split 0.969,0.03,0.001 there and 0.9,0.1,0 here"),
        ({"valid_data_path": ("/a/three",)}, "--valid-data-path None there and three here"),
        ({"mock_data": True}, "--mock-data False there and True here"),
        ({"reset_position_ids": True}, "--reset-position-ids False there and True here"),
        ({"reset_attention_mask": True}, "--reset-attention-mask False there and True here"),
        ({"eod_mask_loss": True}, "--eod-mask-loss False there and True here"),
        ({"seed": 5}, "--seed 1234 there and 5 here"),
        ({"seq_length": 64}, "--seq-length 32 there and 64 here"),
        ({"tokenizer_type": "TikTokenizer"}, "--tokenizer-type NullTokenizer there and TikTokenizer here"),
        ({"tokenizer_model": "/t/b.model"}, "--tokenizer-model None there and b.model here"),
        ({"null_tokenizer_eod_id": 7}, "--null-tokenizer-eod-id None there and 7 here"),
        ({"calculate_per_token_loss": True}, "--calculate-per-token-loss False there and True here"),
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor None there and 1.0 here"),
        ({"moe_aux_loss_coeff": (0.1,)}, "--moe-aux-loss-coeff 0.0 there and 0.1 here"),
    ],
)
def test_a_change_is_named(caplog, monkeypatch, changes, line):
    assert (
        logged(caplog, monkeypatch, **changes)
        == f"this run does not train as the one that saved run/iter_0000005: {line}"
    )


def test_what_changes_no_sample_and_no_loss_is_not_named(caplog, monkeypatch):
    assert not logged(caplog, monkeypatch)
    assert not logged(caplog, monkeypatch, data_path=("3", "/b/one", "7", "/b/two"), split="96.9,3,0.1")
    assert not logged(caplog, monkeypatch, num_workers=0, data_cache_path="/c", train_iters=99, lr=1.0)
    assert not logged(caplog, monkeypatch, global_batch_size=8, moe_token_dispatcher_type="allgather")
