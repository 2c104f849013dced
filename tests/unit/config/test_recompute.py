"""Which layers and parts the recompute flags mean."""

from megatron.config.recompute import RecomputeConfig


def full(method, number):
    return RecomputeConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=number)


def test_groups_of_layers():
    layers = range(4, 9)
    assert RecomputeConfig(recompute_activations=True).groups(layers) == [(layers, False)]
    assert full("uniform", 1).groups(layers) == [(range(n, n + 1), True) for n in layers]
    assert full("uniform", 2).groups(layers) == [(range(4, 6), True), (range(6, 8), True), (range(8, 9), True)]
    assert full("block", 2).groups(layers) == [((4,), True), ((5,), True), (range(6, 9), False)]
    assert full("block", 9).groups(layers) == [((n,), True) for n in layers]
    assert full("uniform", 9).groups(layers) == [(layers, True)]
    assert full("uniform", 2).groups(range(0)) == []


def test_modules_and_their_other_names():
    assert RecomputeConfig().modules == frozenset()
    assert RecomputeConfig(recompute_activations=True).modules == {"core_attn"}
    chosen = RecomputeConfig(recompute_granularity="selective", recompute_modules=("layernorm", "mlp_act"))
    alias = RecomputeConfig(kaimm_recompute_norm=True, kaimm_recompute_mlp_activation_func=True)
    assert chosen.modules == alias.modules == {"norm", "mlp_act"}
    assert full("block", 1).modules == frozenset()
