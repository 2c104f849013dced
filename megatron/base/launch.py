"""Reads this process's place in a job from the variables that a launcher sets, without torch."""

from __future__ import annotations

import os

from megatron.base.errors import ConfigError


def launch_environment() -> tuple[int, int, int]:
    """Returns (rank, world size, local rank) as torchrun set them, or those of a single process without a launcher.

    Raises ConfigError if they are not valid numbers.
    """
    given = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0} | {
        name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ
    }
    try:
        rank, world_size, local_rank = (int(value) for value in given.values())
    except ValueError:
        rank = world_size = local_rank = -1
    if not (0 <= rank < world_size and 0 <= local_rank < world_size):
        words = " ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigError(f"the environment says {words}, which no launcher sets; unset them, or start with torchrun")
    return rank, world_size, local_rank
