"""Damaged files: what the product reads is refused by name, or read as if it were whole; never anything else in
silence.

    python -m tests.fuzz.corruption --seed 1 --cases 150

A case takes one of the files that the product reads, makes it and those it belongs to, damages it, and reads it by the
entry points of the library. Outcomes: "refused", a UserError of one line that names the file; "same", the values are
those of the whole file; "payload", other values of a kind that no reader of the format could tell from right ones (see
`_holds_payload`). Other values elsewhere, and any other exception, are failures.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron.base.box import Box
from megatron.base.errors import UserError
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.conversion import convert
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.sample import Splits
from megatron.core.datasets.sft import mask_prefix, template_of, template_path
from megatron.core.dist_checkpointing.whole import WholeReader
from megatron.core.models.carried import CarriedTensors
from megatron.core.models.hf.families import write_config
from megatron.core.models.hf.names import table
from megatron.core.models.source import Source
from megatron.tooling.restore import read_hf, read_saved, restore_tokenizer
from megatron.training import export
from tests.fuzz.campaign import Campaign, Failure, main
from tests.unit.datasets.chat import CHATML, tokenizer_folder

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    ffn_hidden_size=24,
    vocab_size=400,
    make_vocab_size_divisible_by=8,
    max_position_embeddings=32,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
# A file of each kind, by the group of files that are made and read together. `*` stands for one name.
FILES = {
    "text": ("text.idx", "text.bin"),
    "cache": ("cache/*-GPTDataset-train/*.npy", "cache/*-GPTDataset-train/description.json"),
    "chat": ("chat.idx", "chat.bin", "chat_mask.idx", "chat_mask.bin", "chat.jinja"),
    "checkpoint": (
        "run/latest_checkpointed_iteration.txt",
        "run/iter_0000000/metadata.json",
        "run/iter_0000000/*.safetensors",
    ),
    "hf": (
        "hf/config.json",
        "hf/model.safetensors.index.json",
        "hf/*.safetensors",
        "hf/tokenizer.json",
        "hf/tokenizer_config.json",
    ),
}
ACTIONS = ("flip", "flip", "flip", "field", "field", "cut", "insert", "delete", "empty", "folder", "remove", "swap")
ODD_NUMBERS = (-1, 0, 1, 3, 255, 2**31 - 1, -(2**31), 2**62)
ODD_VALUES = (-1, 0, 10**30, 0.5, True, None, "", "x", [], {}, [1, -2])


@dataclass(frozen=True)
class Case:
    """The `which`-th file of this pattern is damaged by `action` at the places `at`, fractions of its size.

    amount: a bit, how many bytes, or which odd value.
    """

    group: str
    file: str
    which: int
    action: str
    at: tuple[float, ...]
    amount: int


def draw(rng: random.Random) -> Case:
    """Any file, damaged anywhere; headers, at the beginning, more often than their size says."""
    group = rng.choice(tuple(FILES))
    places = tuple(rng.random() ** rng.choice((1, 4)) for _ in range(rng.choice((1, 1, 1, 3))))
    return Case(group, rng.choice(FILES[group]), rng.randrange(4), rng.choice(ACTIONS), places, rng.randrange(1, 64))


def simpler(case: Case) -> Iterator[Case]:
    """One damaged place, then smaller amounts."""
    if len(case.at) > 1:
        for place in case.at:
            yield dataclasses.replace(case, at=(place,))
    if case.amount > 1:
        yield dataclasses.replace(case, amount=case.amount // 2)
    if case.which:
        yield dataclasses.replace(case, which=0)


def check(case: Case, folder: Path) -> str:
    """Make, damage, read."""
    make, read = GROUPS[case.group]
    make(folder)
    whole = read(folder)
    found = sorted(folder.glob(case.file))
    path = found[case.which % len(found)]
    before = path.read_bytes()
    named = damage(case, path, folder)
    after = path.read_bytes() if path.is_file() else None
    if after == before:
        return "same"
    try:
        values = read(folder)
    except UserError as error:
        message = str(error)
        if "\n" in message or not any(name in message for name in named):
            raise Failure(f"the message does not name {' or '.join(named)} on one line: {message!r}") from error
        return "refused"
    if values == whole:
        return "same"
    if _holds_payload(case, before, after):
        return "payload"
    different = [name for name in whole if values.get(name) != whole[name]]
    raise Failure(f"{path.relative_to(folder)} was read with other values of {', '.join(map(str, different[:5]))}")


def damage(case: Case, path: Path, folder: Path) -> set[str]:
    """Damage the file; names of which a message must hold one."""
    data, named = path.read_bytes(), {path.name}
    if case.action == "folder":
        path.unlink()
        path.mkdir()
    elif case.action == "remove":
        path.unlink()
    elif case.action == "swap":
        others = sorted(other for other in path.parent.iterdir() if other.is_file() and other != path)
        if others:
            other = others[case.amount % len(others)]
            named.add(other.name)
            path.write_bytes(other.read_bytes())
            other.write_bytes(data)
    else:
        path.write_bytes(_changed(case, data))
    if path.name.startswith("tokenizer"):  # the library that reads them does not say which one it was
        named.add("hf cannot be loaded as a tokenizer")
        named.add("the tokenizer in")
    if path.suffix in (".idx", ".bin"):  # a pair is checked together, and so are tokens and mask
        named |= {other.name for other in folder.glob("*.idx")} | {other.name for other in folder.glob("*.bin")}
    return named


def _changed(case: Case, data: bytes) -> bytes:
    if case.action == "empty":
        return b""
    if case.action == "field":
        return _with_odd_field(case, data)
    for place in case.at:
        at = int(place * len(data))
        if case.action == "cut":
            data = data[:at]
        elif case.action == "flip" and data:
            data = data[:at] + bytes([data[at] ^ 1 << case.amount % 8]) + data[at + 1 :]
        elif case.action == "insert":
            data = data[:at] + random.Random(case.amount).randbytes(case.amount) + data[at:]
        elif case.action == "delete":
            data = data[:at] + data[at + case.amount :]
    return data


def _with_odd_field(case: Case, data: bytes) -> bytes:
    """One value of a JSON object, or of a safetensors header, or eight bytes of any other file, made odd."""
    if case.file.endswith(".safetensors"):
        length = int.from_bytes(data[:8], "little")
        header = _odd_json(case, data[8 : 8 + length])
        return len(header).to_bytes(8, "little") + header + data[8 + length :]
    if case.file.endswith(".json"):
        return _odd_json(case, data)
    at = int(case.at[0] * len(data)) // 8 * 8
    value = ODD_NUMBERS[case.amount % len(ODD_NUMBERS)]
    return data[:at] + value.to_bytes(8, "little", signed=True) + data[at + 8 :]


def _odd_json(case: Case, data: bytes) -> bytes:
    content = json.loads(data)
    leaves = list(_leaves(content))
    holder, key = leaves[int(case.at[0] * len(leaves))]
    if case.amount % 5 == 0:
        del holder[key]
    else:
        holder[key] = ODD_VALUES[case.amount % len(ODD_VALUES)]
    return json.dumps(content).encode()


def _leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    """(object or list, key) of every value that holds no others."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if isinstance(inner, dict | list) and inner:
            yield from _leaves(inner)
        else:
            yield value, key


def _holds_payload(case: Case, before: bytes, after: bytes | None) -> bool:
    """Whether the format has nothing by which the difference could be told from what was meant.

    Tokens and masks in .bin files of the right length; elements of Hugging Face's tensors behind an unchanged header,
    or the names by which it calls tensors of one shape; settings, vocabularies and templates, where any value is one. A
    template may be missing, too.
    """
    if after is None:
        return case.file.endswith((".jinja", "tokenizer_config.json"))
    if case.file.endswith(".bin"):
        return len(before) == len(after)
    if case.group == "hf" and case.file.endswith(".safetensors"):
        length = 8 + int.from_bytes(before[:8], "little")
        return before[:length] == after[:length] or (len(before) == len(after) and before[length:] == after[length:])
    return case.file.endswith((".jinja", "/config.json", "tokenizer.json", "tokenizer_config.json"))


class Weights:
    """Numbers that depend on the parameter's name. A Source."""

    def __init__(self) -> None:
        self.path, self.model, self.dtype = Path("weights"), MODEL, torch.float32
        self.carried = CarriedTensors()
        self.shapes = table(write_config(MODEL, None)[0], MODEL).ours

    def read(self, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """See Source. The vocabulary's padding is zero."""
        whole = torch.randn(self.shapes[name], generator=torch.Generator().manual_seed(len(name)), dtype=dtype)
        for dim, (start, length) in enumerate(zip(box.offset, box.shape, strict=True)):
            whole = whole.narrow(dim, start, length)
        return whole


@functools.cache
def _tokenizer() -> TokenizerConfig:
    folder = tokenizer_folder(tempfile.mkdtemp(prefix="fuzz-tokenizer-"), CHATML)
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)


@functools.cache
def _made(group: str) -> Path:
    """A folder with files that may be copied anywhere."""
    folder, source = Path(tempfile.mkdtemp(prefix=f"fuzz-{group}-")), Weights()
    target: Source = source  # type: ignore[assignment]
    if group == "hf":
        with mock.patch.object(export, "SHARD_BYTES", 20_000):
            convert.to_hf(target, folder / "hf", dtype=torch.float32, tokenizer=_tokenizer())
    else:
        none = TokenizerConfig(tokenizer_type="NullTokenizer")
        convert.to_checkpoint(target, folder / "run", dtype=torch.float32, tokenizer=none)
    return folder


def _copy(group: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copytree(_made(group), folder, dirs_exist_ok=True) and None


def make_text(folder: Path) -> None:
    """Documents of several lengths, some of several sequences."""
    numbers = np.random.RandomState(0)
    with IndexedDatasetWriter(folder / "text", "uint16") as writer:
        for count in range(12):
            lengths = [3 + count, 5] if count % 3 == 0 else [3 + count]
            writer.add_document(numbers.randint(0, 400, sum(lengths)), lengths)
        writer.finalize()


def read_text(folder: Path) -> dict[Any, Any]:
    """All sequences and documents, and the samples of a run without a cache."""
    data = IndexedDataset(folder / "text")
    sequences = {number: data.get(number).tolist() for number in range(len(data))}
    return {**sequences, "documents": data.document_indices[[0, -1]].tolist(), "count": len(data)}


def read_samples(folder: Path) -> dict[Any, Any]:
    """The samples of two epochs, through the cache."""
    config = DataConfig(seq_length=7, data_path=(str(folder / "text"),), split="1,0,0")
    dataset = build_datasets(config, Splits(40, None, None), 1, 400).train
    assert dataset is not None
    return {number: dataset[number].tolist() for number in range(len(dataset))}


def make_samples(folder: Path) -> None:
    """A dataset and the cache that a first run leaves."""
    make_text(folder)
    read_samples(folder)


def make_chat(folder: Path) -> None:
    """Conversations with their masks and template."""
    numbers, prefix = np.random.RandomState(0), folder / "chat"
    with (
        IndexedDatasetWriter(prefix, "<i4") as tokens,
        IndexedDatasetWriter(mask_prefix(prefix), "u1") as mask,
    ):
        for length in (4, 9, 6, 6, 3, 12):
            tokens.add_document(numbers.randint(0, 400, length))
            mask.add_document(numbers.randint(0, 2, length))
        tokens.finalize()
        mask.finalize()
    template_path(prefix).write_text(CHATML)


def read_chat(folder: Path) -> dict[Any, Any]:
    """The samples of one epoch, and the template that a run would take."""
    prefix = str(folder / "chat")
    config = DataConfig(seq_length=14, data_path=(prefix,), split="1,0,0", sft=True)
    config = dataclasses.replace(config, data_cache_path=tempfile.mkdtemp(dir=folder))
    dataset = build_datasets(config, Splits(4, None, None), 1, 400).train
    assert dataset is not None
    return {"template": template_of([prefix], None), **{n: dataset[n].tolist() for n in range(len(dataset))}}


def read_checkpoint(folder: Path) -> dict[Any, Any]:
    """Every tensor, the model and the tokenizer of the newest checkpoint."""
    saved = read_saved(str(folder / "run"), None)
    reader = WholeReader(saved.path)
    tensors = {
        name: reader.read(name, Box((0,) * len(record.shape), record.shape), record.dtype).numpy().tobytes()
        for name, record in reader.manifest.tensors.items()
    }
    return {**tensors, "model": saved.model, "tokenizer": saved.tokenizer}


def read_hf_folder(folder: Path) -> dict[Any, Any]:
    """Every parameter, the model, and what the tokenizer makes of a text."""
    saved = read_hf(str(folder / "hf"))
    assert saved.hf is not None
    tensors = {
        name: saved.hf.read(name, Box((0,) * len(shape), shape), torch.float32).numpy().tobytes()
        for name, shape in saved.hf.shapes.items()
    }
    tokenizer = restore_tokenizer(saved)
    ids = tokenizer.encode("the quick brown fox")
    return {**tensors, "model": saved.model, "ids": ids, "text": tokenizer.decode(ids), "eod": tokenizer.eod}


GROUPS: dict[str, tuple[Callable[[Path], None], Callable[[Path], dict[Any, Any]]]] = {
    "text": (make_text, read_text),
    "cache": (make_samples, read_samples),
    "chat": (make_chat, read_chat),
    "checkpoint": (_copy("checkpoint"), read_checkpoint),
    "hf": (_copy("hf"), read_hf_folder),
}


def command(case: Case) -> str:
    """See `tests.fuzz.campaign.Campaign`."""
    return f'python -c "from tests.fuzz.corruption import *; see({case!r})"'


def see(case: Case) -> None:
    """Run one case by hand, with its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        print(check(case, Path(folder)))


CAMPAIGN = Campaign("corruption", draw, check, simpler, command)

if __name__ == "__main__":
    main(CAMPAIGN)
