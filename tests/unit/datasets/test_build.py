"""From flags to datasets: splits, blends, per-split paths, mock data, and the mistakes in them."""

import logging

import numpy as np
import pytest

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import DataConfig
from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.mock import FACTOR, NOISE, STEP, MockDataset
from megatron.core.datasets.sample import Splits
from tests.unit.datasets.helpers import write_documents

SIZES = Splits(20, 10, 5)


def build(sizes=SIZES, vocab_size=60000, seed=1, **flags):
    return build_datasets(DataConfig(seq_length=8, **flags), sizes, seed, vocab_size)


def tagged(tmp_path, name, tag, documents=100):
    """A dataset whose every token is `tag` + the number of its document."""
    return write_documents(tmp_path / name, [[tag + i] * 20 for i in range(documents)])


def tokens_of(dataset):
    return {token for i in range(len(dataset)) for token in dataset[i].tolist()}


def test_split_gives_ranges_of_documents(tmp_path):
    built = build(data_path=(tagged(tmp_path, "a", 0),), split="80,15,5", sizes=Splits(400, 60, 20))
    assert [len(dataset) for _, dataset in built.items()] == [400, 60, 20]
    assert tokens_of(built.train) == set(range(80))
    assert tokens_of(built.valid) == set(range(80, 95))
    assert tokens_of(built.test) == set(range(95, 100))


def test_default_split(tmp_path):
    built = build(data_path=(tagged(tmp_path, "a", 0, 1000),))
    assert built.train is not None and built.valid is not None and built.test is not None
    assert max(tokens_of(built.train)) < 969 <= min(tokens_of(built.valid)) and tokens_of(built.test) == {999}


def test_splits_that_are_not_asked_for_or_have_no_data(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, logger="megatron")
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    path = tagged(tmp_path, "a", 0, 10)
    built = build(data_path=(path,), split="1,0,0")
    assert built.train is not None and built.valid is None and built.test is None and not caplog.text
    built = build(data_path=(path,), sizes=Splits(20, None, 0))
    assert built.valid is None and built.test is None and not caplog.text
    built = build(data_path=(path,))
    assert built.valid is None and "the valid split gets documents 10 to 10 of the 10 of" in caplog.text
    with pytest.raises(DataError, match="the train split gets documents 0 to 0 of the 10"):
        build(data_path=(path,), split="1,99,900")


def test_blend_by_weight(tmp_path):
    paths = (tagged(tmp_path, "a", 0), tagged(tmp_path, "b", 1000))
    built = build(data_path=("0.25", paths[0], "0.75", paths[1]), sizes=Splits(1000, 100, None))
    assert isinstance(built.train, BlendedDataset)
    for dataset in (built.train, built.valid):
        taken = [dataset[i][0] < 1000 for i in range(len(dataset))]
        assert sum(taken) == len(dataset) // 4
        assert all(abs(sum(taken[:n]) - n / 4) < 1 for n in range(len(dataset)))
    assert tokens_of(built.train) == {*range(97), *range(1000, 1097)}


def test_blend_by_size(tmp_path):
    paths = (tagged(tmp_path, "a", 0, 300), tagged(tmp_path, "b", 1000, 100))
    built = build(data_path=paths, split="1", sizes=Splits(400, None, None))
    assert sum(built.train[i][0] < 1000 for i in range(400)) == 300


def test_small_dataset_is_left_out_of_a_validation_blend(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    paths = (tagged(tmp_path, "a", 0, 100), tagged(tmp_path, "b", 1000, 4))
    built = build(data_path=paths, split="90,10")
    assert isinstance(built.valid, GPTDataset) and tokens_of(built.valid) <= set(range(90, 100))
    assert "documents 4 to 4 of the 4 of" in caplog.text and "skipped" in caplog.text


def test_paths_for_each_split(tmp_path):
    built = build(train_data_path=(tagged(tmp_path, "a", 0),), test_data_path=(tagged(tmp_path, "b", 1000),))
    assert built.valid is None
    assert tokens_of(built.train) <= set(range(100)) and tokens_of(built.test) <= set(range(1000, 1100))


def test_cache_folders(tmp_path):
    path = tagged(tmp_path, "a", 0)
    build(data_path=(path,), split="1,1,1")
    assert len(list((tmp_path / "cache").iterdir())) == 3
    build(data_path=(path,), split="1,1,1", data_cache_path=str(tmp_path / "elsewhere"))
    names = {folder.name for folder in (tmp_path / "elsewhere").iterdir()}
    assert names == {folder.name for folder in (tmp_path / "cache").iterdir()}


def test_dataloader_type_reaches_the_dataset(tmp_path):
    path = tagged(tmp_path, "a", 0, 4)
    single = build(data_path=(path,), split="1").train
    cyclic = build(data_path=(path,), split="1", dataloader_type="cyclic").train
    assert (cyclic[9] == cyclic[0]).all() and any((single[9 + i] != single[i]).any() for i in range(9))


@pytest.mark.parametrize(
    "flags, message",
    [
        ({}, "no data is given; give --data-path"),
        ({"data_path": ("a",), "mock_data": True}, "--mock-data and --data-path are given together"),
        ({"data_path": ()}, "--data-path has no value"),
    ],
)
def test_flags_that_do_not_fit(flags, message):
    with pytest.raises(ConfigError, match=message):
        build(**flags)
    with pytest.raises(ConfigError, match="--seq-length is None"):
        build_datasets(DataConfig(mock_data=True), SIZES, 1, 100)


def test_missing_dataset_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.idx does not exist"):
        build(data_path=(str(tmp_path / "nowhere"),))


def test_wrong_vocabulary_is_named(tmp_path):
    built = build(data_path=(tagged(tmp_path, "a", 500),), vocab_size=500)
    with pytest.raises(DataError, match="outside the vocabulary of 500"):
        built.train[0]


def test_mock_data_depends_on_seed_split_and_number_alone():
    built, again = build(mock_data=True, vocab_size=50), build(mock_data=True, vocab_size=50, sizes=Splits(99, 9, None))
    assert isinstance(built.train, MockDataset) and again.test is None
    assert all((built.train[i] == again.train[i]).all() for i in range(20))
    assert any((built.train[i] != built.valid[i]).any() for i in range(10))
    other = build(mock_data=True, vocab_size=50, seed=2)
    assert any((built.train[i] != other.train[i]).any() for i in range(10))


def test_mock_data_can_be_learnt():
    dataset = MockDataset(50, 200, 1000, seed=3)
    tokens = np.stack([dataset[i] for i in range(50)])
    assert tokens.dtype == np.int64 and tokens.shape == (50, 201) and tokens.min() >= 0 and tokens.max() < 1000
    follows = tokens[:, 1:] == (tokens[:, :-1] * FACTOR + STEP) % 1000
    assert abs(follows.mean() - (1 - NOISE)) < 0.02
    assert len(np.unique(tokens)) > 900
