"""Which ranks print, and how."""

import logging

import pytest

from megatron.base.log import LOGGER_NAME, get_logger, setup_logging


@pytest.fixture(autouse=True)
def as_it_was():
    logger = logging.getLogger(LOGGER_NAME)
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


def everything(logger):
    logger.debug("a")
    logger.info("b")
    logger.warning("c %d", 3)


@pytest.mark.parametrize(
    ("rank", "level", "printed"),
    [
        (0, logging.INFO, "b\nc 3\n"),
        (0, logging.DEBUG, "a\nb\nc 3\n"),
        (0, logging.ERROR, ""),
        (5, logging.INFO, "[rank 5] c 3\n"),
        (5, logging.DEBUG, "[rank 5] c 3\n"),
        (5, logging.ERROR, ""),
    ],
)
def test_who_prints_what(capsys, rank, level, printed):
    setup_logging(rank, level)
    everything(get_logger("megatron.training.loop"))
    assert capsys.readouterr() == (printed, "")


def test_twice_prints_once(capsys):
    setup_logging(0)
    setup_logging(0)
    get_logger("megatron").info("x")
    assert capsys.readouterr().out == "x\n"


def test_names():
    assert get_logger("megatron.core.groups").name == "megatron.core.groups"
    assert get_logger("__main__").name == "megatron.__main__", "a script's messages are the package's, too"
