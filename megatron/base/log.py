"""Rank-aware logging. The package has one logger; `setup_logging` decides which ranks print."""

import contextlib
import logging
import sys
from collections.abc import Iterator

LOGGER_NAME = "megatron"


def get_logger(name: str) -> logging.Logger:
    """Returns a child of the package's logger; pass `__name__`."""
    return logging.getLogger(name if name.startswith(LOGGER_NAME) else f"{LOGGER_NAME}.{name}")


def setup_logging(rank: int, level: int = logging.INFO) -> None:
    """Configures logging to stdout: rank 0 prints `level` and above as plain lines, other ranks warnings with their
    rank.
    """
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers.clear()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level if rank == 0 else max(level, logging.WARNING))
    logger.propagate = False


@contextlib.contextmanager
def muted(quiet: bool = True) -> Iterator[None]:
    """In the body the package prints only warnings, if `quiet`."""
    logger = logging.getLogger(LOGGER_NAME)
    before = logger.level
    if quiet:
        logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(before)
