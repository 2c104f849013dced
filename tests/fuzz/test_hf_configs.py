"""A bounded sample of the campaign over Hugging Face configurations, and that it sees what it is there for."""

import dataclasses

import pytest

from megatron.core.models.hf import families
from tests.fuzz.campaign import case_of, expect_none_fails, outcome
from tests.fuzz.hf_configs import CAMPAIGN


def test_a_sample_of_random_configurations():
    counts = expect_none_fails(CAMPAIGN, seed=1, cases=16)
    assert counts["same"] >= 8 and counts["refused"] >= 3


WRONG = {"rotary_base": 9999.0, "window_size": "3,0", "norm_epsilon": 0.03, "rope_scaling_factor": 2.0}


@pytest.mark.parametrize("field", WRONG)
def test_a_field_that_is_read_wrongly_is_found(monkeypatch, field):
    real = families.parse_config

    def careless(family, values, where):
        return dataclasses.replace(real(family, values, where), **{field: WRONG[field]})

    monkeypatch.setattr(families, "parse_config", careless)
    messages = (outcome(CAMPAIGN, case_of(CAMPAIGN, 1, number))[1] for number in range(40))
    assert any("logits are off" in message for message in messages)
