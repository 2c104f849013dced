"""The progress line on a pretended terminal."""

import io
import logging
import re
import sys

import pytest
from rich.console import Console

from megatron.base.log import LOGGER_NAME
from megatron.training.logging import progress as module
from megatron.training.logging.progress import ProgressLine, terminal_console


@pytest.fixture
def screen():
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=20)


@pytest.fixture
def handler(screen):
    """A log handler that writes to the terminal, as setup_logging makes it."""
    logger = logging.getLogger(LOGGER_NAME)
    made = logging.StreamHandler(screen.file)
    level = logger.level
    logger.addHandler(made)
    logger.setLevel(logging.INFO)
    yield made
    logger.removeHandler(made)
    logger.setLevel(level)


def plain(text):
    """Without escape sequences; every redraw of the line on a line of its own."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")


def test_it_draws_the_figures(screen, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_DRAWS", 0.0)
    with ProgressLine(100, 0, screen) as line:
        line.update(7, 2.34567, 12345.6, 3661.0)
    text = plain(screen.file.getvalue())
    assert "iteration 7/100" in text and "loss 2.3457  12,346 tokens/s  ETA 1:01:01" in text


def test_it_is_not_drawn_more_often_than_it_can_be_read(screen):
    with ProgressLine(100, 0, screen) as line:
        for iteration in range(1, 90):
            line.update(iteration, 1.0, 1.0, 1.0)
    text = plain(screen.file.getvalue())
    assert "iteration 1/100" in text and "iteration 2/100" not in text


def test_long_log_lines_print_whole_above_the_line(screen, handler, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_DRAWS", 0.0)
    message = " iteration 1 [bold]not markup[/bold] " + "| lm loss: 1.0 " * 20 + "|"
    with ProgressLine(100, 0, screen) as line:
        line.update(1, 1.0, 1.0, 1.0)
        logging.getLogger(f"{LOGGER_NAME}.training").info(message)
        line.update(2, 1.0, 1.0, 1.0)
    lines = plain(screen.file.getvalue()).split("\n")
    assert message in lines
    assert "iteration 1/100" in " ".join(lines[lines.index(message) + 1 :]), "the line is drawn again below"


def test_the_handlers_get_their_stream_back(screen, handler):
    with ProgressLine(100, 0, screen):
        assert handler.stream is not screen.file
    assert handler.stream is screen.file


def test_without_a_console_nothing_happens(handler):
    stream = handler.stream
    with ProgressLine(100, 0, None) as line:
        line.update(1, 1.0, 1.0, 1.0)
        assert handler.stream is stream
    assert stream.getvalue() == ""


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize(
    ("out", "err", "enabled", "drawn"),
    [(True, True, True, True), (True, False, True, False), (False, True, True, False), (True, True, False, False)],
)
def test_only_on_a_terminal(monkeypatch, out, err, enabled, drawn):
    monkeypatch.setattr(sys, "stdout", Stream(out))
    monkeypatch.setattr(sys, "stderr", Stream(err))
    assert (terminal_console(enabled) is not None) == drawn
