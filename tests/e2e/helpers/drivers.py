"""Runs with a fault put in: each takes the program's argv, arranges the fault in its own process, and calls main."""

import hashlib
import math
import os
import resource
import runpy
import signal
import sys
import time

from megatron.base.heartbeat import Heartbeat
from megatron.command_line.entry import run_of
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.expert_parallel.dispatch import AllToAll
from megatron.core.models.hf.export import HFExport
from megatron.training.main import main
from megatron.training.step import TrainStep

NAN_WEIGHT = "decoder.layers.1.self_attention.linear_proj.weight"


def finetune(argv):
    """finetune.py instead of pretrain_gpt.py, with nothing wrong."""
    sys.argv = ["finetune.py", *argv]
    runpy.run_path("finetune.py", run_name="__main__")


def train_rl(argv):
    """train_rl.py instead of pretrain_gpt.py, with nothing wrong."""
    sys.argv = ["train_rl.py", *argv]
    runpy.run_path("train_rl.py", run_name="__main__")


def own_data_path(argv):
    """Rank FAULTY_RANK reads FAULTY_PREFIX instead of the --data-path of the others."""
    if os.environ["RANK"] == os.environ["FAULTY_RANK"]:
        argv = list(argv)
        argv[argv.index("--data-path") + 1] = os.environ["FAULTY_PREFIX"]
    main(run_of(argv, description="test"))


def raises_in_a_step(argv):
    """Rank FAULTY_RANK raises in its third step."""
    before_each_step(_raise_at_third)
    main(run_of(argv, description="test"))


def before_each_step(action):
    """Call action(step object, number of the step from 1) before each training step of this process."""
    original, count = TrainStep.forward_backward, [0]

    def forward_backward(self, *arguments):
        count[0] += 1
        action(self, count[0])
        return original(self, *arguments)

    TrainStep.forward_backward = forward_backward


def _raise_at_third(step, number):
    if number == 3 and os.environ["RANK"] == os.environ["FAULTY_RANK"]:
        raise ZeroDivisionError("a bug in the model")


def dies_in_an_exchange(argv):
    """Rank FAULTY_RANK is killed in its third step, before its experts of layer 1 return their results."""
    combine, calls = AllToAll.combine, [0]

    def die_at_last(self, *arguments, **options):
        calls[0] += 1
        if calls[0] == 2 * 2 + 2 and os.environ["RANK"] == os.environ["FAULTY_RANK"]:  # 2 layers, 1 microbatch
            os.kill(os.getpid(), signal.SIGKILL)
        return combine(self, *arguments, **options)

    AllToAll.combine = die_at_last
    main(run_of(argv, description="test"))


def cannot_write_large_files(argv):
    """Files of rank FAULTY_RANK end at FAULTY_BYTES: a write beyond fails, as on a full disk."""
    if os.environ["RANK"] == os.environ["FAULTY_RANK"]:
        limit = int(os.environ["FAULTY_BYTES"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    main(run_of(argv, description="test"))


def nan_gradient(argv):
    """Rank FAULTY_RANK has one NaN in its own gradient of the third step. Every rank prints a digest of its weights."""
    end_backward, steps = DataParallel.end_backward, [0]

    def end_with_nan(self, *, last):
        steps[0] += last
        if last and steps[0] == 3 and os.environ["RANK"] == os.environ["FAULTY_RANK"]:
            self.buckets[0].grads[0] = math.nan
        end_backward(self, last=last)

    DataParallel.end_backward = end_with_nan
    digests(argv)


def dies_before_an_export(argv):
    """Rank 0 is killed when its checkpoint is saved and its export is to begin."""
    HFExport.begin = lambda self: os.kill(os.getpid(), signal.SIGKILL)
    main(run_of(argv, description="test"))


def nan_weight(argv):
    """One element of a weight, and of its master, is NaN from step FAULTY_STEP on, on the ranks that own it."""

    def spoil(step, number):
        if number == int(os.environ["FAULTY_STEP"]):
            step._data_parallel.synchronize()
            for piece, elements in step._data_parallel.weights():
                if piece.name == NAN_WEIGHT and piece.start == 0:
                    elements[0] = math.nan
            for piece, key, elements in step._optimizer.pieces():
                if key == "master" and piece.name == NAN_WEIGHT and piece.start == 0:
                    elements[0] = math.nan

    before_each_step(spoil)
    main(run_of(argv, description="test"))


def digests(argv):
    """A run of which every rank prints a digest of its weights after each step."""
    original = TrainStep.update

    def update(self, *args):
        result = original(self, *args)
        content = b"".join(parameter.detach().numpy().tobytes() for parameter in self._model.parameters())
        print("digest", hashlib.sha256(content).hexdigest(), flush=True)
        return result

    TrainStep.update = update
    main(run_of(argv, description="test"))


def stops_in_an_action(argv):
    """Rank FAULTY_RANK sends itself FAULTY_SIGNAL in its third step, when it has been in FAULTY_ACTION for two
    beats."""
    move_to, times = Heartbeat.move_to, [0]

    def move_and_stop(self, name):
        move_to(self, name)
        if (
            name == f"forward-backward, {os.environ['FAULTY_ACTION']}"
            and os.environ["RANK"] == os.environ["FAULTY_RANK"]
        ):
            times[0] += 1
            if times[0] == 3:
                time.sleep(2.5)
                os.kill(os.getpid(), signal.Signals[os.environ["FAULTY_SIGNAL"]])

    Heartbeat.move_to = move_and_stop
    main(run_of(argv, description="test"))


def frees_the_disk(argv):
    """Deletes the file FILLER before step FREED_AT."""

    def free(step, number):
        if number + 2 == int(os.environ["FREED_AT"]) and os.environ["RANK"] == "0":
            os.unlink(os.environ["FILLER"])

    before_each_step(free)
    main(run_of(argv, description="test"))
