"""Megatron-LM's files that list datasets, read in place of the data paths that they stand for.

- `--data-args-path FILE`: the words of --data-path, divided by white space.
- `--per-split-data-args-path FILE`: a JSON object with lists for "train", "valid" and "test"; null for no dataset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.base.read_file import parse_json, read_regular

_MOST_BYTES = 2**24
_LIST, _SPLITS = "--data-args-path", "--per-split-data-args-path"
_PATHS = {split: f"--{split}-data-path" for split in ("train", "valid", "test")}


def listed_datasets(flags: Mapping[str, Sequence[str]]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Returns the words that each of the two flags stands for, and one line for each file that cannot be used."""
    paths: dict[str, tuple[str, ...]] = {}
    problems = []
    for flag, read, rivals in ((_LIST, _words, (_SPLITS,)), (_SPLITS, _words_of_splits, (_LIST, *_PATHS.values()))):
        words = flags.get(flag, ())
        if len(words) != 1:
            continue
        paths[flag] = ()
        if twice := [other for other in ("--data-path", *rivals) if other in flags]:
            problems.append(f"{flag} {words[0]} and {twice[0]} name the datasets twice; leave one of them out")
            continue
        try:
            paths[flag] = read(Path(words[0]))
        except OSError as error:
            problems.append(f"{flag} {words[0]} cannot be read: {error.strerror}; give the path of a file that exists")
        except ValueError as error:
            problems.append(f"{flag} {words[0]}: {error}")
    return paths, problems


def _words(path: Path) -> tuple[str, ...]:
    return ("--data-path", *_names(_text(path).split(), "the file"))


def _words_of_splits(path: Path) -> tuple[str, ...]:
    splits = parse_json(_text(path))
    form = 'write {"train": ["prefix"], "valid": null, "test": null}'
    if not isinstance(splits, dict):
        raise ValueError(f"it is no JSON object; {form}")
    if unknown := sorted(splits.keys() - _PATHS.keys()):
        raise ValueError(f'"{unknown[0]}" is none of "train", "valid" and "test"; {form}')
    words: tuple[str, ...] = ()
    for split, flag in _PATHS.items():
        names = splits.get(split)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str | int | float) for name in names):
            raise ValueError(f'"{split}" is no list of prefixes, or of weights and prefixes; {form}')
        words += (flag, *_names([str(name) for name in names], f'"{split}"'))
    if not words:
        raise ValueError(f"it names no dataset; {form}")
    return words


def _names(words: list[str], place: str) -> list[str]:
    if not words:
        raise ValueError(f"{place} names no dataset; list prefixes, or weights and prefixes")
    if flags := [word for word in words if word.startswith("--")]:
        raise ValueError(f"{place} holds the flag {flags[0]}; list prefixes, or weights and prefixes, alone")
    return words


def _text(path: Path) -> str:
    return read_regular(path, _MOST_BYTES).decode()
