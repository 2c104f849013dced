"""The picture is read back and its colours looked for."""

import math

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.image import imread

from megatron.training.logging.loss_curve import REFERENCE, TRAIN, VALIDATION, draw_loss_curve, moving_average


def ink(path, colour):
    """Share of pixels of about that colour, and their mean row (0 top, 1 bottom), left of the legend."""
    pixels = imread(path)[..., :3]
    near = np.abs(pixels - np.array(matplotlib.colors.to_rgb(colour))).max(axis=-1) < 0.05
    near[:, int(0.7 * near.shape[1]) :] = False
    rows = np.nonzero(near)[0]
    return near.mean(), rows.mean() / near.shape[0] if len(rows) else math.nan


TRAINING = [(i, 2.0 + 8.0 / i) for i in range(1, 50)]


def test_all_three_are_drawn_where_they_belong(tmp_path):
    path = tmp_path / "new" / "loss.png"
    flat = [(i, 2.0) for i in range(1, 50)]
    draw_loss_curve(path, flat, [(10, 4.0), (20, 4.1), (30, 4.0)], ("unigram entropy", 9.5), "toy")
    assert imread(path).shape[:2] == (900, 1600)
    train, validation, reference = ink(path, TRAIN), ink(path, VALIDATION), ink(path, REFERENCE)
    assert min(train[0], validation[0], reference[0]) > 1e-4
    assert reference[1] < validation[1] < train[1], "the higher the loss, the higher on the picture"


def test_what_is_not_given_is_not_drawn(tmp_path):
    path = tmp_path / "loss.png"
    draw_loss_curve(path, TRAINING)
    assert ink(path, TRAIN)[0] > 1e-4
    assert ink(path, VALIDATION)[0] == 0.0


@pytest.mark.parametrize("training", [[], [(1, 5.0)], [(1, math.nan), (2, math.inf)], [(i, 1.0) for i in range(500)]])
def test_short_empty_and_broken_curves_still_make_a_picture(tmp_path, training):
    path = tmp_path / "loss.png"
    draw_loss_curve(path, training)
    drawn = any(math.isfinite(loss) for _, loss in training)
    assert (ink(path, TRAIN)[0] > 0.0) == drawn


def test_moving_average():
    line = np.arange(40) * 3.0 + 1.0
    assert moving_average(line, 5)[:-2] == pytest.approx(line[:-2])
    assert moving_average(line, 5)[-1] == pytest.approx(line[-3:].mean())
    spike = np.zeros(20)
    spike[[3, 14]] = 3.0
    averaged = moving_average(spike, 3)
    assert averaged[:6] == pytest.approx(spike[:6]), "the beginning is kept as it is"
    assert averaged[12:17] == pytest.approx([0, 1, 1, 1, 0])
