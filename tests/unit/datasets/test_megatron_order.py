"""--data-order megatron: the samples of Megatron-LM, in its order, beside a plain re-computation and its own
numbers."""

import json
import logging
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.base.errors import DataError
from megatron.config.data import DataConfig
from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.indexed import IndexedDatasetWriter
from megatron.core.datasets.megatron_blend import SHORTEST_SEGMENT, FurthestBehind, furthest_behind
from megatron.core.datasets.megatron_index import MegatronEpochs, build_megatron_index
from megatron.core.datasets.megatron_sampler import CyclicSampler
from megatron.core.datasets.sample import Splits
from tests.unit.datasets.megatron_reference import blended, expected_rows, split_bounds

SEED = 1234
COMPARED = 10_000
GOLDEN = json.loads((Path(__file__).parent / "megatron_order.json").read_text())


def lengths_of(documents, longest, salt, empty_every=0):
    """Made-up lengths of documents, the same wherever this is written down: 1 to `longest`, and some without tokens."""
    return [
        0 if empty_every and i % empty_every == 3 else 1 + (i * i * 7919 + i * 104729 + salt) % longest
        for i in range(documents)
    ]


def write(tmp_path, sets):
    """Datasets of documents of these lengths; token t of the file is t mod 60000."""
    prefixes = []
    for number, lengths in enumerate(sets):
        with IndexedDatasetWriter(tmp_path / f"set{number}", "uint16") as writer:
            tokens = np.arange(sum(lengths)) % 60000
            writer.add_document(tokens, lengths)
            writer.finalize()
        prefixes.append(str(tmp_path / f"set{number}"))
    return prefixes


def words(prefixes, weights):
    return tuple(prefixes if weights is None else [w for pair in zip(map(str, weights), prefixes) for w in pair])


def build(prefixes, weights=None, sizes=(COMPARED, 600, 60), seq_length=8, split="969,30,1", seed=SEED, **flags):
    paths = {} if "train_data_path" in flags else {"data_path": words(prefixes, weights), "split": split}
    config = DataConfig(seq_length=seq_length, data_order="megatron", **paths, **flags)
    return build_datasets(config, Splits(*sizes), seed, 60000)


def rows_of(dataset, count):
    """As megatron_reference: (dataset, its sample, cut, position and offset of its first and of its last token)."""
    rows = []
    for number in range(min(count, len(dataset))):
        member, sample = dataset.blend.locate(number) if isinstance(dataset, BlendedDataset) else (0, number)
        index = members_of(dataset)[member].index
        cut = int(index.shuffle[0, sample])
        rows.append((member, sample, cut, *index.bounds[0, cut : cut + 2].ravel().tolist()))
    return rows


def members_of(dataset):
    return dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]


SHORT, LONG, TINY = lengths_of(9000, 17, 1), lengths_of(40, 5000, 2), lengths_of(300, 9, 3)
MIXED = lengths_of(2000, 90, 4, empty_every=11)
# datasets, weights, and what else differs
SETTINGS = {
    "one dataset, part of an epoch": ([lengths_of(9000, 40, 1)], None, {}),
    "one dataset, many epochs": ([TINY], None, {"split": "90,5,5"}),
    "last epoch nearly whole, so not apart": ([SHORT], None, {"sizes": (19_000, 800, 60)}),
    "last epoch begun, so apart": ([SHORT], None, {"sizes": (10_000, 350, 60)}),
    "long documents": ([LONG], None, {"split": "90,8,2", "sizes": (COMPARED, 2000, 500)}),
    "documents without tokens": ([MIXED], None, {"split": "99,1,0", "sizes": (COMPARED, 20, None)}),
    "one dataset with a weight": ([SHORT], [0.5], {}),
    "weights": ([SHORT, LONG, TINY], [0.3, 0.6, 0.1], {"split": "90,5,5"}),
    "weights that do not sum to 1 and repeat a dataset": ([SHORT, TINY, SHORT], [70, 1.5, 28], {"split": "80,10,10"}),
    "by size": ([SHORT, LONG, MIXED], None, {"split": "8,1,1", "sizes": (COMPARED, 100, 100)}),
    "by size, more than there is": (
        [SHORT, MIXED, SHORT],
        None,
        {"seq_length": 16, "split": "0.97,0.02,0.01", "sizes": (20_000, 600, 60)},
    ),
    "a dozen datasets of equal weight": (
        [lengths_of(200 + 50 * i, 60, i) for i in range(12)],
        [1] * 12,
        {"split": "90,5,5", "seed": 0},
    ),
}


def test_there_are_twelve_settings():
    assert len(SETTINGS) == 12


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_every_sample_is_that_of_a_plain_recomputation(tmp_path, setting):
    sets, weights, changes = setting
    options = {"sizes": (COMPARED, 600, 60), "seq_length": 8, "split": "969,30,1", "seed": SEED, **changes}
    built = build(write(tmp_path, sets), weights, **options)
    ranges = [split_bounds(options["split"], len(lengths)) for lengths in sets]
    compared = 0
    for number, (name, dataset) in enumerate(built.items()):
        size = options["sizes"][number]
        if not size or ranges[0][number] is None:
            assert dataset is None
            continue
        of_split = [bounds[number] for bounds in ranges]
        direct = len(sets) == 1 and weights is None
        members, expected = expected_rows(sets, weights, of_split, size, options["seq_length"], options["seed"], direct)
        assert len(dataset) == len(expected), name
        assert rows_of(dataset, COMPARED) == expected[:COMPARED], name
        assert [m.index.documents[0].tolist() for m in members_of(dataset)] == [m.documents for m in members], name
        compared += min(COMPARED, len(expected))
    assert compared >= COMPARED


def test_a_sample_is_the_tokens_between_its_bounds(tmp_path):
    lengths = lengths_of(50, 30, 5, empty_every=7)
    dataset = build(write(tmp_path, [lengths]), split="1", sizes=(250, None, None)).train
    starts = np.cumsum([0, *lengths])
    text = np.concatenate([np.arange(starts[d], starts[d + 1]) for d in dataset.index.documents[0]])
    for number in range(len(dataset)):
        cut = int(dataset.index.shuffle[0, number])
        assert dataset[number].tolist() == text[8 * cut : 8 * cut + 9].tolist()


def test_each_split_may_have_its_own_datasets(tmp_path):
    """A single dataset with a weight is then read as if it had none, unlike that of --data-path."""
    prefixes = write(tmp_path, [SHORT, TINY])
    built = build(prefixes, train_data_path=words(prefixes, [0.8, 0.2]), valid_data_path=("3", prefixes[1]))
    whole = [(0, len(SHORT)), (0, len(TINY))]
    assert built.test is None
    for dataset, sets, weights, bounds, size, direct in (
        (built.train, [SHORT, TINY], [0.8, 0.2], whole, COMPARED, False),
        (built.valid, [TINY], None, whole[1:], 600, True),
    ):
        _, expected = expected_rows(sets, weights, bounds, size, 8, SEED, direct)
        assert rows_of(dataset, COMPARED) == expected[:COMPARED]


@pytest.mark.parametrize("golden", GOLDEN["datasets"], ids=lambda golden: golden["name"])
def test_samples_are_those_that_megatron_gave(tmp_path, golden):
    """Numbers printed by Megatron-LM's own classes, of datasets of these lengths."""
    sets = [lengths_of(*arguments) for arguments in golden["sets"]]
    options = {name: golden[name] for name in ("weights", "sizes", "seq_length", "split", "seed")}
    built = build(write(tmp_path, sets), **options)
    for name, dataset in built.items():
        expected = golden["splits"][name]
        rows = rows_of(dataset, COMPARED)
        assert [list(row) for row in rows[:5]] == expected["first"], name
        assert len(dataset) == expected["samples"], name
        assert zlib.crc32(np.array(rows, "<i8").tobytes()) == expected["crc32"], name


def test_the_order_changes_with_the_length_of_the_run(tmp_path):
    """Which is why it is not the default, and why a changed length is said (training/data_order.py)."""
    prefixes = write(tmp_path, [TINY])
    short, long = (build(prefixes, split="1", sizes=(size, None, None)).train for size in (300, 3000))
    assert rows_of(short, 100) != rows_of(long, 100)


@pytest.mark.parametrize("members", [1, 2, 7, 40])
@pytest.mark.parametrize("kind", ["drawn", "equal", "few that dominate"])
def test_places_side_by_side_are_those_one_after_another(members, kind):
    """Over many segments and with rare datasets, whose counts are guessed wrong at first."""
    random = np.random.RandomState(members)
    weights = {
        "drawn": random.rand(members),
        "equal": np.ones(members),
        "few that dominate": 10.0 ** -random.rand(members),
    }
    shares = weights[kind] / np.sum(weights[kind])
    count = 3 * SHORTEST_SEGMENT + 17
    made = furthest_behind(shares.tolist(), count)
    blend = FurthestBehind(members, **made)
    expected = blended(shares.tolist(), count)
    assert [blend.locate(place) for place in range(count)] == expected
    assert blend.counts(count) == np.bincount([member for member, _ in expected], minlength=members).tolist()


def test_a_blend_that_asks_a_dataset_for_more_than_it_was_built_for(tmp_path):
    """Thirty datasets of nearly no weight make the blend thirty samples longer; Megatron-LM ends with an IndexError."""
    prefixes = write(tmp_path, [[102 * 8 + 1], TINY])
    weights = [1, *[1e-6] * 30]
    with pytest.raises(DataError, match=r"reads 129 samples of .*set0 for the train split, which is built for 102"):
        build([prefixes[0], *[prefixes[1]] * 30], weights, split="1", sizes=(100, None, None))


def test_a_blend_by_size_that_is_too_small_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    dataset = build(write(tmp_path, [TINY, TINY]), split="1").train
    assert len(dataset) == 2 * ((sum(TINY) - 1) // 8)
    assert f"the train split has {len(dataset)} samples and the run asks for {COMPARED}" in caplog.text


@pytest.mark.parametrize("tokens, asked", [(8, None), (0, 5), (0, None)])
def test_too_few_tokens_for_a_sample(tokens, asked):
    with pytest.raises(DataError, match=rf"{tokens} tokens hold no sample of --seq-length 8 \+ 1"):
        MegatronEpochs.measure(tokens, 8, asked)


@pytest.mark.parametrize(
    "asked, epochs, joint",
    [
        (12, 1, 12),
        (13, 2, 12),  # one of the second epoch's 12 samples
        (20, 2, 12),  # 8 of them, fewer than int(0.8 x 12)
        (21, 2, 25),  # 9: not apart
        (25, 2, 25),
        (26, 3, 25),
    ],
)
def test_epochs(asked, epochs, joint):
    """Of 101 tokens: 12 samples of 8 in one epoch, 25 in two and 37 in three, for what is left over goes on."""
    assert MegatronEpochs.measure(101, 8, asked) == MegatronEpochs(epochs, (101 * epochs - 1) // 8, joint)


def test_an_order_is_kept_in_the_cache(tmp_path):
    prefixes = write(tmp_path, [TINY, SHORT])
    first, again = (build(prefixes, [1, 2], sizes=(500, None, None)).train for _ in range(2))
    assert rows_of(first, 500) == rows_of(again, 500)
    names = sorted(folder.name.split("-", 1)[1] for folder in (tmp_path / "cache").iterdir())
    assert names == ["Blend-megatron-train", "GPTDataset-megatron-train", "GPTDataset-megatron-train"]
    build(prefixes, [1, 3], sizes=(500, None, None))  # as many epochs of both datasets, in another blend
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_a_billion_tokens_take_seconds():
    """100 million tokens read ten times."""
    lengths = np.random.RandomState(0).randint(1, 1000, 200_000).astype(np.int32)
    tokens = int(lengths.sum())
    start = time.process_time()
    plan = MegatronEpochs.measure(tokens, 2048, 10 * tokens // 2048 - 1)
    index = build_megatron_index(lengths, 0, len(lengths), 2048, plan, SEED)
    furthest_behind([0.5, 0.3, 0.2], plan.samples)
    assert time.process_time() - start < 10
    assert plan.epochs == 10 and index.documents.shape == (1, 2_000_000) and index.bounds.dtype == np.int32


def cyclic_epochs(num_samples, rank, dp, micro, sharding, epochs):
    """What one rank reads in each epoch, sample by sample."""
    for epoch in range(epochs):
        random = torch.Generator()
        random.manual_seed(epoch)
        if sharding:
            each = num_samples // (micro * dp) * micro
            read = [rank * each + x for x in torch.randperm(each, generator=random).tolist()]
        else:
            every = torch.randperm(num_samples // micro * micro, generator=random).tolist()
            read = [sample for place, sample in enumerate(every) if place % dp == rank]
        yield from (read[first : first + micro] for first in range(0, len(read) - micro + 1, micro))


@pytest.mark.parametrize("sharding", [True, False])
@pytest.mark.parametrize("num_samples, dp, micro", [(40, 1, 4), (43, 2, 4), (50, 3, 2)])
def test_cyclic_data(num_samples, dp, micro, sharding):
    unit = dp * micro
    for rank in range(dp):
        place = {"micro_batch_size": micro, "dp_rank": rank, "dp_size": dp, "sharding": sharding}
        expected = list(cyclic_epochs(num_samples, rank, dp, micro, sharding, 3))
        whole = [batch for batch, _ in zip(CyclicSampler(num_samples, consumed_samples=0, **place), expected)]
        assert whole == expected
        # A run that goes on in the second epoch reads what it would have read.
        begun = num_samples // unit + 2
        resumed = CyclicSampler(num_samples, consumed_samples=begun * unit, **place)
        assert [batch for batch, _ in zip(resumed, expected[begun:])] == expected[begun:]


@pytest.mark.parametrize("golden", GOLDEN["samplers"], ids=lambda golden: str(golden["arguments"]))
def test_cyclic_data_is_that_which_megatron_gave(golden):
    sampler = CyclicSampler(**golden["arguments"])
    assert [batch for batch, _ in zip(sampler, golden["batches"])] == golden["batches"]


@pytest.mark.parametrize(
    "num_samples, consumed, message",
    [(5, 0, "has 5 samples, fewer than --micro-batch-size 3 x 2 replicas"), (50, 51, "and 51 samples were consumed")],
)
def test_cyclic_data_that_cannot_be_read(num_samples, consumed, message):
    with pytest.raises(DataError, match=message):
        CyclicSampler(num_samples, consumed_samples=consumed, micro_batch_size=3, dp_rank=0, dp_size=2, sharding=True)
