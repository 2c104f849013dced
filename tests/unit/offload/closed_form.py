"""The memory of 1F1B schedules with activation offload, as formulas."""

from megatron.config.activation_offload import RESIDENT_LAYERS


def share_by_layer(layers: int, ratio: float) -> float:
    """The share of a stage's activations that is on the device after a forward, if its equal layers are offloaded
    singly."""
    return 1.0 - ratio * max(0, layers - RESIDENT_LAYERS) / layers


def peak_chunks(p: int, v: int, rank: int, ratio: float, layers: int) -> float:
    """The most that a rank of 1F1B (v = 1) or interleaved 1F1B holds on the device, in chunks of a microbatch's
    activations.

    p ranks with v chunks of `layers` layers each, and 2p microbatches or more, in groups of p. With d = p - 1 - rank,
    n = d + 1 or (v - 1) p + 2 d + 1 chunks in flight, a = ratio and s = `share_by_layer`:

        v = 1:   d = 0, 1: n s      d = 2: 2 + s                  d > 2: 3 + (n - 3)(1 - a)
        v > 1:   d = 0: 2 + (n - 2)(1 - a)   d = 1: 2 + s + (n - 3)(1 - a)   d > 1: 3 + (n - 3)(1 - a)

    Three are whole where the warm-up ends: one being made, one being copied out, and one that is back for the first
    backward. `validate.chunks_on_device` counts the same for any schedule. Without a pipeline (p = 1) it is s.
    """
    d, stays = p - 1 - rank, share_by_layer(layers, ratio)
    if v == 1:
        n = d + 1
        return n * stays if d < 2 else 2 + stays if d == 2 else 3 + (n - 3) * (1 - ratio)
    n = (v - 1) * p + 2 * d + 1
    if d == 0:
        return 2 + (n - 2) * (1 - ratio)
    return 2 + (stays if d == 1 else 1.0) + (n - 3) * (1 - ratio)
