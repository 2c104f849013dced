"""Local checkpoints: a run whose processes or hosts are lost goes on from the newest one that still exists, bit for bit.

Each rank is on an emulated host: a folder of its own is the host's disk, which only this rank sees.
"""

import contextlib
import errno
import logging
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from megatron.base.box import Box
from megatron.core.dist_checkpointing import storage
from megatron.core.dist_checkpointing.local_folders import RUN_ID
from megatron.core.dist_checkpointing.tensor_file import TensorFile
from megatron.core.dist_checkpointing.whole import WholeReader
from megatron.planner.memory.plan import plan_memory
from megatron.training.callbacks import Checkpoint
from megatron.training.loop import Callback, fit
from tests import pool
from tests.parallel.test_background_save import NEVER, trainer_from
from tests.same_numbers import LLAMA

STEPS, HOSTS = 6, 3
MODEL = f"{LLAMA} --num-layers 2 --bf16 --use-distributed-optimizer --train-iters {STEPS} --lr-decay-iters {STEPS}"
plain_write = storage.write_tensor_file


class Lost(Exception):
    """All processes of the job are gone."""


class Dies(Callback):
    """The end of the job in the middle of a step's callbacks, when the local checkpoint before is published."""

    def after_step(self, trainer, report):
        if report.iteration == 5:
            save = trainer.background_save.pending
            if save is not None:
                save.finish()
            raise Lost


def session(rank, size, root, dies, further, failure=None):
    """(lines of the log of this rank, the iteration at which the run began, planned bytes of local files)

    failure: of rank 1, when it writes its files or those that it receives.
    """
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megatron")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def write(path, sources):
        if rank == 1 and failure == "write" and "rank_" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if rank == 1 and failure == "receive" and "rank_" in str(path):
            (path.parent / "__0_0.safetensors").touch()
        return plain_write(path, sources)

    storage.write_tensor_file = write
    try:
        line = f"{MODEL} --global-batch-size 6 --save {root}/save --load {root}/save --save-interval 3 {further}"
        trainer = trainer_from(size, line)
        begin = trainer.state.iteration
        with contextlib.suppress(Lost):
            fit(trainer, [*([Dies()] if dies else []), Checkpoint(NEVER, lambda trainer: None)])
    finally:
        storage.write_tensor_file = plain_write
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines, begin, plan_memory(trainer.run, trainer.settings, trainer.target)[0].local_files


def flags(root):
    return (
        "--non-persistent-save-interval 2 --non-persistent-ckpt-type local --replication --replication-jump 1 "
        f"--non-persistent-local-ckpt-dir {root}/disk{{local_rank}}"
    )


def tensors(path):
    reader = WholeReader(path)
    return {
        name: reader.read(name, Box((0,) * len(record.shape), record.shape), record.dtype)
        for name, record in reader.manifest.tensors.items()
    }


def bytes_of(path):
    return {file.name: file.read_bytes() for file in sorted(path.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The checkpoints of a run that nobody disturbs and that keeps no local ones."""
    root = tmp_path_factory.mktemp("uninterrupted")
    pool.run(HOSTS, session, str(root), False, "")
    return root / "save"


@pytest.fixture(scope="module")
def lost_state(tmp_path_factory):
    """(root of a job that was lost in step 5, with a local checkpoint of step 4; a copy of all that it has left)"""
    root = tmp_path_factory.mktemp("lost")
    (lines, *_), *_ = pool.run(HOSTS, session, str(root / "state"), True, flags(root / "state"))
    assert [line for line in lines if "iter_0000002 in" in line and "sent to other ranks" in line], lines
    shutil.copytree(root / "state", root / "copy")
    return root


@pytest.fixture
def lost(lost_state):
    shutil.rmtree(lost_state / "state")
    return Path(shutil.copytree(lost_state / "copy", lost_state / "state"))


def files(root, host):
    return sorted(file.name for file in (root / f"disk{host}").glob("*/*/*/iter_0000004/*.safetensors"))


def resumed(root, size=HOSTS, further=None):
    (lines, begin, _), *_ = pool.run(size, session, str(root), False, further or flags(root))
    return lines, begin


def test_a_lost_job_goes_on_bit_for_bit(lost, uninterrupted):
    """Each host has the files of two ranks. At the end of the run nothing local is left."""
    assert [files(lost, host) for host in range(HOSTS)] == [
        ["__0_0.safetensors", "__2_0.safetensors"],
        ["__0_0.safetensors", "__1_0.safetensors"],
        ["__1_0.safetensors", "__2_0.safetensors"],
    ]
    _, begin = resumed(lost)
    assert begin == 4
    assert bytes_of(lost / "save" / "iter_0000006") == bytes_of(uninterrupted / "iter_0000006")
    assert not list(lost.glob("disk*/*"))


@pytest.mark.parametrize("host", range(HOSTS))
def test_the_loss_of_one_host(lost, uninterrupted, host):
    shutil.rmtree(lost / f"disk{host}")
    _, begin = resumed(lost)
    assert begin == 4
    assert bytes_of(lost / "save" / "iter_0000006") == bytes_of(uninterrupted / "iter_0000006")


def test_the_loss_of_two_hosts(lost, uninterrupted):
    """The checkpoint of step 3 persists."""
    for host in (1, 2):
        shutil.rmtree(lost / f"disk{host}")
    lines, begin = resumed(lost)
    assert begin == 3
    assert "the local checkpoint of iteration 4 is not whole: no host here holds __1_0.safetensors" in lines
    assert bytes_of(lost / "save" / "iter_0000006") == bytes_of(uninterrupted / "iter_0000006")


def test_a_damaged_file_is_noticed(lost, uninterrupted):
    """Its replica is used."""
    (path,) = (lost / "disk1").glob("*/*/*/iter_0000004/__1_0.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    results = pool.run(HOSTS, session, str(lost), False, flags(lost))
    assert [begin for _, begin, _ in results] == [4] * HOSTS
    assert any("__1_0.safetensors is damaged" in line and "a replica" in line for line in results[1][0])
    assert bytes_of(lost / "save" / "iter_0000006") == bytes_of(uninterrupted / "iter_0000006")


def test_fewer_hosts_come_back(lost, uninterrupted):
    """A job of two ranks reads the files of three."""
    shutil.rmtree(lost / "disk2")
    _, begin = resumed(lost, 2, f"{flags(lost)} --train-iters 4")
    assert begin == 4
    assert same_weights(lost / "save" / "iter_0000004", lost)


def same_weights(path, lost):
    """Whether a checkpoint has the tensors of the local one, whose files are put together by hand."""
    gathered = path.parent / "gathered" / "iter_0000004"
    gathered.mkdir(parents=True)
    for host in range(HOSTS):
        for file in (lost.parent / "copy" / f"disk{host}").glob("*/*/*/iter_0000004/*"):
            shutil.copy(file, gathered)
    ours, theirs = tensors(path), tensors(gathered)
    return all(torch.equal(ours[name], theirs[name]) for name in ours if not name.startswith("rng/"))


def test_one_rank(tmp_path):
    pool.run(1, session, str(tmp_path), True, flags(tmp_path))
    lines, begin = resumed(tmp_path, 1)
    assert begin == 4 and not list(tmp_path.glob("disk*/*"))
    assert any("no replicas of local checkpoints: --replication-factor 2 needs 2 ranks" in line for line in lines)


def test_a_damaged_description_is_noticed(lost):
    """The files of that folder do not count; those of the other hosts do."""
    (path,) = (lost / "disk1").glob("*/*/*/iter_0000004/metadata.json")
    path.write_bytes(path.read_bytes()[:-9])
    _, begin = resumed(lost)
    assert begin == 4


def test_another_run_of_the_same_name(lost):
    """Its --save was deleted, or has another number: nothing of it is loaded, and its folders are removed."""
    shutil.rmtree(lost / "save")
    (lines, begin, _), *_ = pool.run(HOSTS, session, str(lost), True, flags(lost))
    assert begin == 0
    assert any("deleting local checkpoints of another run" in line for line in lines)
    run_id = (lost / "save" / RUN_ID).read_text().strip()
    assert {path.name for path in lost.glob("disk*/*/*")} == {run_id}


def test_a_step_back_forgets_local_checkpoints(lost):
    _, begin = resumed(lost, further=f"{flags(lost)} --ckpt-step 3 --train-iters 3")
    assert begin == 3
    _, begin = resumed(lost)
    assert begin == 3


@pytest.mark.parametrize(("failure", "words"), [("write", "ENOSPC: No space"), ("receive", "EEXIST: File exists")])
def test_a_failed_local_save_is_one_line(tmp_path, failure, words):
    """A full disk on one host: the others do not wait, and the run goes on."""
    (lines, *_), *_ = pool.run(HOSTS, session, str(tmp_path), False, flags(tmp_path), failure)
    said = [line for line in lines if "could not save iteration" in line]
    assert len(said) == 2 and f"rank 1: {words}" in said[0] and "the next local save tries again" in said[0]
    assert (tmp_path / "save" / "iter_0000006").is_dir()


def test_the_bytes_of_local_files_are_planned(lost_state):
    """Of the last checkpoint and the one before, with the files of another rank. Headers and random states are not."""
    *_, planned = pool.run(HOSTS, session, str(lost_state / "unused"), True, flags(lost_state / "unused"))[0]
    hosts = [(lost_state / "unused" / f"disk{host}").rglob("*.safetensors") for host in range(HOSTS)]
    assert planned == pytest.approx(max(sum(map(planned_kinds, host)) for host in hosts), rel=0.03)


def planned_kinds(path):
    entries = TensorFile(path).entries
    return sum(math.prod(e.shape) * e.dtype.itemsize for key, e in entries.items() if not key.startswith("rng/"))
