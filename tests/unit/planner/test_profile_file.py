"""The file of a profile: it comes back as it was written, and any other content is one line that says what is wrong."""

import dataclasses
import json
import random

import pytest

from megatron.base.errors import ConfigError
from megatron.planner.time.profile_file import read_profile, write_profile
from tests.unit.planner.profiles import MODEL, profile_of


@pytest.fixture
def written(tmp_path):
    """The path of a profile, and its content."""
    path = tmp_path / "machine.json"
    write_profile(profile_of(), str(path))
    return path, json.loads(path.read_text(encoding="utf-8"))


def error_of(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_profile(str(path))
    (line,) = str(caught.value).splitlines()
    assert str(path) in line
    return line


def test_a_profile_comes_back_as_it_was_written(written):
    assert read_profile(str(written[0])) == profile_of()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda words: words.pop("torch"), "has no torch"),
        (lambda words: words["layers"][1].pop("tp"), "has no layers[1].tp"),
        (lambda words: words.update(speed=1), "has an unknown key 'speed'"),
        (lambda words: words["messages"][0].update(colour=1), "has an unknown key 'messages[0].colour'"),
        (lambda words: words.update(world_size="4"), "has '4' for world_size, which must be a whole number"),
        (lambda words: words.update(world_size=4.5), "has 4.5 for world_size, which must be a whole number"),
        (lambda words: words.update(world_size=True), "has True for world_size, which must be a whole number"),
        (lambda words: words.update(device=7), "has 7 for device, which must be a text"),
        (lambda words: words["products"][2].update(seconds=0), "has 0 for products[2].seconds, which must be above 0"),
        (lambda words: words.update(step_seconds=9e29), "has 9e+29 for step_seconds, which must be at most 1000000"),
        (lambda words: words.update(bytes_per_second=1e-9), "has 1e-09 for bytes_per_second, which must be 1 or more"),
        (lambda words: words["products"][2].update(seconds=-1), "has -1 for products[2].seconds"),
        (lambda words: words["layers"][0].update(spread=-0.1), "layers[0].spread, which must be 0 or more"),
        (lambda words: words["layers"][0]["again_seconds"].update(norm=-1e-9), "layers[0].again_seconds.norm"),
        (lambda words: words.update(layers={}), "has {} for layers, which must be a list"),
        (lambda words: words.update(layers=[]), "has no layers"),
        (lambda words: words.update(messages=[]), "has no messages"),
        (lambda words: words.update(format="a" * 3000), "aaa..., and this version"),
        (lambda words: words.update({"a" * 3000: 1}), "aaa...; take"),
        (lambda words: words.update(format=2), "has format 2, and this version reads 1"),
        (lambda words: words.update(devices_per_node=8), "has 8 devices_per_node and a world_size of 4"),
    ],
)
def test_a_wrong_value_is_named(written, change, message):
    path, words = written
    change(words)
    assert message in error_of(path, words)


def test_numbers_that_are_none_are_refused(written):
    path, words = written
    text = json.dumps(words)
    assert "NaN is no number" in error_of(path, text.replace(str(words["step_seconds"]), "NaN", 1))
    assert "which must be a number" in error_of(path, text.replace(str(words["step_seconds"]), "1e999", 1))


def test_any_damage_is_one_line(written):
    """Fuzz: values of another kind in any place but the flags of the model, and text that is cut."""
    path, words = written
    whole, draw = json.dumps(words), random.Random(0)
    for _ in range(30):
        changed = json.loads(whole)
        place, key = changed, draw.choice([key for key in changed if key != "shape"])
        while isinstance(place[key], dict | list) and place[key] and draw.random() < 0.8:
            place = place[key]
            key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
        place[key] = draw.choice([None, {"a": 1}, [1, "b"], [None], -1.5, [[]]])
        error_of(path, changed)
        error_of(path, whole[: draw.randrange(len(whole))])


def test_a_profile_of_other_layers_is_refused_with_both():
    profile = profile_of()
    profile.check_model(MODEL, "p.json")
    profile.check_model(dataclasses.replace(MODEL, num_layers=80), "p.json")  # as many layers as one likes
    with pytest.raises(ConfigError, match=r"p\.json was taken with hidden_size 256 and not 512"):
        profile.check_model(dataclasses.replace(MODEL, hidden_size=512), "p.json")
    with pytest.raises(ConfigError, match="padded_vocab_size 1024 and not 32000"):
        profile.check_model(dataclasses.replace(MODEL, vocab_size=32000), "p.json")
    with pytest.raises(ConfigError, match="was taken in float32, and the run is in bfloat16"):
        profile.check_model(dataclasses.replace(MODEL, bf16=True), "p.json")
    with pytest.raises(ConfigError, match="swiglu True and not False"):
        profile.check_model(dataclasses.replace(MODEL, swiglu=False), "p.json")
