"""One whole cache entry, whoever builds it and however many do."""

import logging
import multiprocessing
import os
import time

import numpy as np
import pytest

from megatron.base.errors import DataError
from megatron.core.datasets.index_cache import cached_arrays

NAMES = ("a", "b")


def arrays():
    return {"a": np.arange(200_000), "b": np.arange(6).reshape(2, 3)}


def never():
    raise AssertionError("must come from the folder")


def race(folder, barrier, results):
    """One builder. All begin at once, so that each finds no entry and builds its own."""

    def build():
        barrier.wait(timeout=20)
        return arrays()

    found = cached_arrays(folder, "race", NAMES, {"n": 1}, build)
    results.put((os.getpid(), int(found["a"].sum()), found["b"].tolist()))


def test_racing_builders_leave_one_whole_entry(tmp_path):
    builders = 6
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(builders), context.Queue()
    processes = [context.Process(target=race, args=(tmp_path / "cache", barrier, results)) for _ in range(builders)]
    for process in processes:
        process.start()
    found = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(timeout=10)
    # The barrier opens only once all of them are inside `build`: every one took part in the race.
    assert len({pid for pid, _, _ in found}) == builders
    assert {(total, str(b)) for _, total, b in found} == {(int(arrays()["a"].sum()), "[[0, 1, 2], [3, 4, 5]]")}
    (entry,) = (tmp_path / "cache").iterdir()
    assert sorted(path.name for path in entry.iterdir()) == ["a.npy", "b.npy", "description.json"]
    again = cached_arrays(tmp_path / "cache", "race", NAMES, {"n": 1}, never)
    assert np.array_equal(again["a"], arrays()["a"])


def build_slowly(folder):
    # Large enough that the kill comes before or in the middle of writing.
    cached_arrays(folder, "killed", ("a",), {"n": 1}, lambda: {"a": np.zeros(1 << 24)})


@pytest.mark.alone
def test_a_killed_builder_leaves_nothing_that_is_read(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=build_slowly, args=(tmp_path,))
    process.start()
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob(".*/a.npy")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.join()
    assert list(tmp_path.glob(".*")), "the builder was not killed in the middle of writing"
    assert not list(tmp_path.glob("[!.]*"))
    found = cached_arrays(tmp_path, "killed", ("a",), {"n": 1}, lambda: {"a": np.ones(3)})
    assert found["a"].tolist() == [1, 1, 1]
    assert not list(tmp_path.glob(".*")), "the next builder removes what the killed one left"


def test_second_call_reads_the_folder(tmp_path):
    first = cached_arrays(tmp_path, "x", NAMES, {"n": 1}, arrays)
    second = cached_arrays(tmp_path, "x", NAMES, {"n": 1}, never)
    assert all(np.array_equal(first[name], second[name]) for name in NAMES)
    assert isinstance(second["a"].base, np.memmap)
    with pytest.raises(AssertionError, match="must come"):
        cached_arrays(tmp_path, "x", NAMES, {"n": 2}, never)


def test_no_folder_keeps_nothing():
    assert cached_arrays(None, "x", NAMES, {}, arrays)["b"].shape == (2, 3)


def test_folder_that_cannot_be_written(tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        found = cached_arrays(tmp_path / "file" / "cache", "x", NAMES, {"n": 1}, arrays)
    assert np.array_equal(found["a"], arrays()["a"])
    assert "cannot keep the sample index in" in caplog.text and "--data-cache-path" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    assert cached_arrays(tmp_path, "x", NAMES, {"n": 1}, arrays)["b"].shape == (2, 3)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda entry: os.truncate(entry / "a.npy", 1000), r"a\.npy is damaged: it has not its checksum"),
        (lambda entry: os.truncate(entry / "a.npy", 0), r"a\.npy is damaged: it has not its checksum"),
        (lambda entry: flip(entry / "a.npy", 5000), r"a\.npy is damaged: it has not its checksum"),
        (lambda entry: flip(entry / "b.npy", 129), r"b\.npy is damaged: it has not its checksum"),
        (lambda entry: (entry / "b.npy").unlink(), r"b\.npy is damaged: .*No such file"),
        (lambda entry: flip(entry / "description.json", 20), r"description\.json is damaged: "),
        (lambda entry: (entry / "description.json").write_text("[]"), r"description\.json is damaged: "),
        (lambda entry: (entry / "description.json").unlink(), r"description\.json is damaged: .*No such file"),
    ],
)
def test_damaged_entry_is_named(tmp_path, damage, reason):
    cached_arrays(tmp_path, "x", NAMES, {"n": 1}, arrays)
    (entry,) = tmp_path.iterdir()
    damage(entry)
    with pytest.raises(DataError, match=rf"{reason}.*; remove the folder .*-x to build it again"):
        cached_arrays(tmp_path, "x", NAMES, {"n": 1}, arrays)


def test_an_entry_of_other_data_under_this_name_is_refused(tmp_path):
    cached_arrays(tmp_path, "x", NAMES, {"n": 1}, arrays)
    (entry,) = tmp_path.iterdir()
    cached_arrays(tmp_path, "x", NAMES, {"n": 2}, lambda: {"a": np.zeros(3), "b": np.zeros(2)})
    (other,) = set(tmp_path.iterdir()) - {entry}
    entry.rename(tmp_path / "away")
    other.rename(entry)
    with pytest.raises(DataError, match=r"description\.json is damaged: it describes other arrays"):
        cached_arrays(tmp_path, "x", NAMES, {"n": 1}, never)
