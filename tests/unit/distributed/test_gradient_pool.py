import torch

from megatron.core.distributed.gradient_pool import GradientPool

CPU = torch.device("cpu")


def test_blocks_of_a_size_are_used_again():
    pool = GradientPool(3, CPU)
    first = pool.take(100)
    pool.give_back(first)
    assert pool.take(60) is first
    assert len(pool.take(40)) == 40 and pool.nbytes == 4 * 140


def test_a_large_bucket_does_not_make_the_others_large():
    """As in a model: equal layers, then the embedding, again and again."""
    pool, largest = GradientPool(4, CPU), 0
    for _ in range(3):
        lent = []
        for size in [10] * 30 + [1000]:
            if pool.is_exhausted:
                pool.give_back(lent.pop(0))
            lent.append(pool.take(size))
            largest = max(largest, pool.nbytes)
        for block in lent:
            pool.give_back(block)
    assert largest <= 4 * (1000 + 3 * 10)


def test_more_than_the_bound_is_lent_when_none_comes_back_and_then_freed():
    pool = GradientPool(2, CPU)
    lent = [pool.take(8) for _ in range(4)]
    assert pool.is_exhausted and pool.nbytes == 4 * 32
    for block in lent:
        pool.give_back(block)
    assert pool.nbytes == 4 * 16 and not pool.is_exhausted
    pool.clear()
    assert pool.nbytes == 0
