"""A decoder whose layers have rotary embeddings of several kinds: each layer rotates by its own tables."""

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch

from megatron.core.inference.engine.slots import SlotDecoder
from megatron.kernels.ops.rope import rotary_frequencies
from megatron.spec import decoder
from tests import pool
from tests.unit.inference.small import LLAMA, small_model

CPU = torch.device("cpu")


@contextlib.contextmanager
def base_of_windowed_layers(base):
    """Layers with a sliding window have this rotary base, as those of Gemma 3 have one of their own."""
    layer = decoder._layer

    def windowed(model, window, *kinds):
        spec = layer(model, window, *kinds)
        if window is None:
            return spec
        rotary = dataclasses.replace(spec.attention.rotary, base=base)
        return dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, rotary=rotary))

    decoder.decoder_spec.cache_clear()
    try:
        with mock.patch.object(decoder, "_layer", windowed):
            yield
    finally:
        decoder.decoder_spec.cache_clear()


MIXED = {
    **LLAMA,
    "window_size": "64,0",
    "window_attn_skip_freq": "2",
}  # wider than the sequences: windows change nothing


def logits(ids, **fields):
    model, build = small_model(pool.groups(), **{**MIXED, **fields})
    with torch.inference_mode():
        return model(ids, torch.arange(ids.shape[1]).unsqueeze(0)), model, build


@pytest.fixture
def ids():
    return torch.randint(0, 99, (2, 9), generator=torch.Generator().manual_seed(3))


def test_each_layer_has_the_tables_of_its_kind(ids):
    """With equal bases the model is that of one kind; with another base its windowed layers rotate otherwise."""
    one, model, _ = logits(ids)
    assert len(model._rotaries) == 1
    with base_of_windowed_layers(10000.0 * 3):
        two, model, build = logits(ids)
        rotaries = build.spec.rotaries
    assert len(rotaries) == len(model._rotaries) == 2 and not two.equal(one)
    kinds = [layer.attention.rotary for layer in build.spec.layers]
    for kind, rotary in zip(rotaries, model._rotaries, strict=True):
        assert rotary.frequencies(9).equal(rotary_frequencies(kind, CPU)[0])
    assert [rotaries.index(kind) for kind in kinds] == [
        layer.self_attention._rotary for layer in model.decoder.layers.values()
    ]


def test_generation_has_them_too(ids):
    with base_of_windowed_layers(500.0):
        expected, model, build = logits(ids)
        decoder_of_slots = SlotDecoder(model, build, slots=2, capacity=12)
        with torch.inference_mode():
            found = decoder_of_slots.read([row[:-1].tolist() for row in ids])
            torch.testing.assert_close(found, expected[-2], rtol=0, atol=1e-5)
            found = decoder_of_slots.step(ids[:, -1].tolist())
    torch.testing.assert_close(found, expected[-1], rtol=0, atol=1e-5)
