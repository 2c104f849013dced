"""Fits constants of the time model to measured step times: nonlinear least squares on logarithms, with priors.

Every constant is fitted by its logarithm. A constant departs from its prior only as far as the rows ask for it: the sum
of squares holds one term per constant, its departure in units of its uncertainty, and one term per row, its error in
units of `ROW_ERROR`. Errors beyond `FAR` units count linearly (Huber), so that single rows do not decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.planner.time.constants import Constants, priors

Vector = NDArray[np.float64]
# Constants that move together when a machine is calibrated: its six factors.
MACHINE = {
    "gemm": ("gemm", "gemm_fp8"),
    "attention": ("attention_ampere", "attention_hopper", "attention_blackwell"),
    "memory": ("bandwidth",),
    "host": ("host", "host_unfused"),
    "link": ("link",),
    "network": ("network",),
}
# How far a machine may be from the constants, of the logarithm: the rates of kernels about as far as the blind error of
# the model, those of links further. What a fabric reaches depends on how a cluster is built and set up: over the
# sources without aleph-alpha, the factors that their own rows ask for have a standard deviation of 0.26 on links in a
# node and 0.13 on the network, and those on kernels of less; both kinds of links have the larger one here, rounded.
KERNEL_SPREAD, LINK_SPREAD = 0.08, 0.3
_LINKS = ("link", "network")
ROW_ERROR = 0.05  # of the logarithm of a row's time
FAR = 2.0
_STEP = 0.02  # of a logarithm, for differences
_ROUNDS = 8


def fit(
    seconds: Callable[[Constants], Vector],
    measured: Sequence[float],
    weights: Sequence[float],
    start: Vector,
    directions: Vector,
    spread: Vector,
) -> Vector:
    """Returns the logarithms of all constants.

    seconds: [rows, K] for K constants at once. measured: seconds of each row. weights: of each row. start: the priors.
    directions: [constants, unknowns], how much each unknown moves each logarithm. spread: of each unknown.
    """
    log_measured, factors = np.log(measured), np.asarray(weights)
    unknowns, damping = np.zeros(len(spread)), 1e-2

    def errors(values: Vector) -> Vector:
        """[rows, K] errors for [unknowns, K]."""
        found = np.log(seconds(constants_of(start[:, None] + directions @ values)))
        return (found - log_measured[:, None]) / ROW_ERROR

    def loss(values: Vector, found: Vector) -> float:
        size = np.abs(found)
        huber = np.where(size < FAR, size**2, 2 * FAR * size - FAR**2)
        return float((huber * factors).sum() + ((values / spread) ** 2).sum())

    for _ in range(_ROUNDS):
        columns = np.concatenate([np.zeros((len(spread), 1)), _STEP * np.eye(len(spread))], axis=1)
        found = errors(unknowns[:, None] + columns)
        here = found[:, 0]
        now = before = loss(unknowns, here)
        jacobian = (found[:, 1:] - here[:, None]) / _STEP
        # Weights that make the squares of far errors grow linearly.
        scale = np.sqrt(factors * np.minimum(1.0, FAR / np.maximum(np.abs(here), 1e-9)))
        left = np.concatenate([jacobian * scale[:, None], np.diag(1 / spread)])
        right = np.concatenate([here * scale, unknowns / spread])
        normal, slope = left.T @ left, left.T @ right
        # Several lengths of the step at once.
        dampings = damping * np.array([0.1, 1.0, 10.0, 100.0])
        steps = [np.linalg.solve(normal + each * np.diag(np.diag(normal)), -slope) for each in dampings]
        trials = unknowns[:, None] + np.array(steps).T
        tried = errors(trials)
        losses = [loss(trials[:, number], tried[:, number]) for number in range(len(dampings))]
        best = int(np.argmin(losses))
        if losses[best] < now:
            unknowns, now, damping = trials[:, best], losses[best], float(dampings[best])
        else:
            damping *= 100
        if before - now < 1e-3 * before:
            break
    result: Vector = start + directions @ unknowns
    return result


def fit_all(seconds: Callable[[Constants], Vector], measured: Sequence[float], weights: Sequence[float]) -> Vector:
    """Fits every constant, from its prior."""
    start, spread = priors()
    return fit(seconds, measured, weights, start, np.eye(len(start)), spread)


def fit_machine(seconds: Callable[[Constants], Vector], measured: Sequence[float], start: Vector) -> Vector:
    """Fits the six factors of a machine, from fitted constants."""
    directions = np.array([[float(name in names) for names in MACHINE.values()] for name in Constants.names()])
    spread = np.array([LINK_SPREAD if factor in _LINKS else KERNEL_SPREAD for factor in MACHINE])
    return fit(seconds, measured, [1.0] * len(measured), start, directions, spread)


def constants_of(logarithms: Vector) -> Constants:
    """Returns constants for [constants] or [constants, K] logarithms."""
    return Constants.of(dict(zip(Constants.names(), np.exp(logarithms), strict=True)))
