"""The campaign of layouts with experts in every case, and on up to eight processes.

By hand: `python -m tests.fuzz.experts --seed 1 --cases 300`.
"""

from __future__ import annotations

import dataclasses
import random

import torch

from tests.fuzz.campaign import main
from tests.fuzz.layout_cases import Case, draw
from tests.fuzz.layouts import CAMPAIGN as LAYOUTS


def draw_with_experts(rng: random.Random) -> Case:
    """See layout_cases.draw."""
    return draw(rng, share=1.0, worlds=(1, 2, 2, 4, 4, 4, 8))


CAMPAIGN = dataclasses.replace(LAYOUTS, name="experts", draw=draw_with_experts)

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(CAMPAIGN)
