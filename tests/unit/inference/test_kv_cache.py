import pytest
import torch

from megatron.core.inference.kv_cache import LayerCache, allocate_caches
from tests import pool
from tests.unit.inference.small import LLAMA, small_model


def new_cache(capacity=6):
    return LayerCache(capacity, 2, 3, 4, dtype=torch.float64, device=torch.device("cpu"))


def test_what_was_appended_comes_back_in_order():
    full = torch.randn(2, 6, 2, 3, 4, dtype=torch.float64)
    cache, end = new_cache(), 0
    for s in (3, 1, 2):
        k, v = cache.append(*full[:, end : end + s])
        end += s
        assert torch.equal(k, full[0, :end]) and torch.equal(v, full[1, :end])


def test_nothing_is_allocated_or_moved_after_the_beginning():
    cache, new = new_cache(), torch.zeros(1, 2, 3, 4, dtype=torch.float64)
    places = {tuple(x.data_ptr() for x in cache.append(new, new)) for _ in range(6)}
    assert len(places) == 1


def test_more_than_the_capacity_is_refused():
    cache, new = new_cache(capacity=2), torch.zeros(3, 2, 3, 4, dtype=torch.float64)
    with pytest.raises(AssertionError, match="3 positions do not fit a cache of 2"):
        cache.append(new, new)


def test_a_model_has_a_cache_a_layer_of_its_key_value_heads_and_dtype():
    _, build = small_model(pool.groups(), **LLAMA, bf16=True)
    caches = allocate_caches(build, [layer.attention for layer in build.spec.layers], batch_size=5, capacity=7)
    new = torch.ones(7, 5, 2, 8, dtype=torch.bfloat16)
    assert len(caches) == 2
    for cache in caches:
        k, v = cache.append(new, 2 * new)
        assert torch.equal(k, new) and torch.equal(v, 2 * new) and k.dtype == v.dtype == torch.bfloat16
