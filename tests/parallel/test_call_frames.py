"""The calls from the training loop down to the model's forward are those that docs/batch.md lists, and no more."""

import re
import sys
from pathlib import Path
from unittest import mock

import pytest

import megatron
from megatron.core.models.gpt import GPTModel
from megatron.training.loop import fit
from tests import pool
from tests.parallel.test_pipeline_checkpoints import LAYOUTS, built

PACKAGE = Path(megatron.__file__).parent
PAGE = PACKAGE.parent / "docs" / "batch.md"
MOST = 6


def listed():
    """(file, call) of each row of the page's table."""
    section = PAGE.read_text(encoding="utf-8").split("## Call frames")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\S+)` \| `(\S+)` \|", section, re.MULTILINE)


def frames_of(rank, size, fields):
    """The different ways in which `fit` comes to GPTModel.forward: (file, function) of each frame of this package."""
    forward, found = GPTModel.forward, set()

    def watched(self, *args, **kwargs):
        frames, frame = [(place(forward.__code__), forward.__qualname__)], sys._getframe(1)
        while frame is not None and frame.f_code is not fit.__code__:
            if PACKAGE in Path(frame.f_code.co_filename).parents:
                frames.append((place(frame.f_code), call(frame)))
            frame = frame.f_back
        found.add((*frames, (place(fit.__code__), fit.__qualname__))[::-1])
        return forward(self, *args, **kwargs)

    trainer = built(size, {**fields, "train_iters": 2})
    with mock.patch.object(GPTModel, "forward", watched):
        fit(trainer, [])
    return found


def call(frame):
    """The function of a frame, with the class that defines it."""
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    for cls in type(owner).__mro__ if owner is not None else ():
        if getattr(vars(cls).get(name), "__code__", None) is frame.f_code:
            return f"{cls.__name__}.{name}"
    return name


def place(code):
    return Path(code.co_filename).relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("layout", ["one process", "pp 2, 1f1b", "pp 2, zb-v"])
def test_calls_from_the_loop_to_the_model(layout):
    world, fields = LAYOUTS[layout]
    rows = tuple(listed())
    assert 0 < len(rows) <= MOST
    for found in pool.run(world, frames_of, fields):
        assert found == {rows}
