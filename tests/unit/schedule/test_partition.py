"""Layers to stages."""

import pytest

from megatron.base.errors import ConfigError
from megatron.schedule.partition import Stage, parse_layout, partition, whole_model


def sizes(stages):
    """Every layer once, in order, with the ends where they belong."""
    assert [number for stage in stages for number in stage.layers] == list(range(sum(len(s.layers) for s in stages)))
    assert [stage.number for stage in stages] == list(range(len(stages)))
    assert [stage.embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.head for stage in stages] == [False] * (len(stages) - 1) + [True]
    return [len(stage.layers) for stage in stages]


def test_one_stage_is_the_whole_model():
    assert partition(5, [0]) == (whole_model(5),) == (Stage(0, range(5), True, True),)


@pytest.mark.parametrize(
    ("layers", "p", "v", "options", "expected"),
    [
        (8, 4, 1, {}, [2, 2, 2, 2]),
        (8, 2, 2, {}, [2, 2, 2, 2]),
        (10, 4, 1, {"first": 1, "last": 3}, [1, 3, 3, 3]),
        (7, 4, 1, {"first": 1}, [1, 2, 2, 2]),
        (7, 4, 1, {"last": 1}, [2, 2, 2, 1]),
        (3, 2, 1, {"first": 2, "last": 1}, [2, 1]),
        (8, 2, 2, {"first": 2, "last": 6}, [1, 3, 1, 3]),
        (6, 4, 1, {"embedding_counts": True, "head_counts": True}, [1, 2, 2, 1]),
        (7, 4, 1, {"head_counts": True}, [2, 2, 2, 1]),
        (2, 4, 1, {"embedding_counts": True, "head_counts": True}, [0, 1, 1, 0]),
        (15, 2, 4, {"embedding_counts": True}, [1, 2, 2, 2, 2, 2, 2, 2]),
    ],
)
def test_partition(layers, p, v, options, expected):
    assert sizes(partition(layers, list(range(p)) * v, **options)) == expected


def test_ranks_in_a_v():
    """The first rank has both ends."""
    ends = {"embedding_counts": True, "head_counts": True}
    assert sizes(partition(10, [0, 1, 2, 2, 1, 0], **ends)) == [1, 2, 2, 2, 2, 1]
    assert sizes(partition(10, [0, 1, 2, 2, 1, 0], first=2)) == [1, 2, 2, 2, 2, 1]


@pytest.mark.parametrize(
    ("layers", "p", "v", "options", "problem"),
    [
        (7, 4, 1, {}, "7 layers are not divisible by 4 pipeline ranks"),
        (8, 4, 1, {"first": 1}, "7 of 8 layers that are left are not divisible by 3"),
        (4, 2, 1, {"first": 1, "last": 1}, "2 of 4 layers that are left are not divisible by 0"),
        (4, 2, 1, {"first": 5}, "-1 of 4 layers"),
        (4, 1, 2, {"first": 4}, "one pipeline rank has all layers"),
        (
            4,
            2,
            1,
            {"first": 5, "last": 0, "head_counts": True},
            "a stage has fewer layers than the embedding or the loss",
        ),
        (6, 2, 2, {}, "the 3 layers of a pipeline rank are not divisible by its 2 virtual stages"),
    ],
)
def test_what_does_not_divide(layers, p, v, options, problem):
    with pytest.raises(ConfigError) as error:
        partition(layers, list(range(p)) * v, **options)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        ("Et|t|t|tL", 4, [1, 1, 1, 1]),
        ("Et*3|(tt|)*2,L", 7, [3, 2, 2, 0]),
        ("E | t | (t)*3 | L", 4, [0, 1, 3, 0]),
        ("E((t|)*2)*1 t|tL", 4, [1, 1, 1, 1]),
        ("E|||t*2L", 2, [0, 0, 0, 2]),
        ("Et|t|t|tmL", 4, [1, 1, 1, 1]),
        ("Et|t|tt|m*2L", 4, [1, 1, 2, 0]),
    ],
)
def test_layout(text, layers, expected):
    assert sizes(parse_layout(text, layers, len(expected))) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Et|tL", "has 2 stages, but pipeline ranks and their virtual stages make 4"),
        ("Et|t|t|L", "has 3 layers, but --num-layers is 4"),
        ("tE|t|t|tL", "must begin with its one E"),
        ("Et|t|t|t", "must begin with its one E (embedding) and end with its one L"),
        ("|Et|t|ttL", "must have E in its first stage"),
        ("Ex|t|t|tL", "has 'x'"),
        ("Et|t|ttm|L", "must have each m"),
        ("Et|t|t|mtL", "must have each m"),
        ("Et|t|t|(tL", "has '('"),
        ("Et|t|t|t*9999999L", "repeats t 9999999 times"),
    ],
)
def test_layouts_that_are_none(text, problem):
    with pytest.raises(ConfigError) as error:
        parse_layout(text, 4, 4)
    assert problem in str(error.value)
