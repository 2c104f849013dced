"""Devices, clusters and their files; which ranks share a node; what a bad file says."""

import dataclasses
import random
from pathlib import Path

import pytest

from megatron.base.errors import ConfigError
from megatron.base.mesh import Mesh
from megatron.planner.time.cluster_file import read_cluster
from megatron.planner.time.hardware import BF16, DEVICES, FP8, GB, GIB, MXFP8, TERA, built_in, place

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "clusters").glob("*.toml"))


def write(folder, text):
    file = folder / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_names():
    cluster = built_in("h100:32x8")
    assert (cluster.nodes, cluster.node, cluster.network, cluster.device.name) == (32, 8, 50 * GB, "h100")
    assert built_in("gb200").node == 72 and built_in("gb200").nodes is None


@pytest.mark.parametrize("name", list(DEVICES))
def test_no_device_reaches_more_than_its_peak(name):
    device = DEVICES[name]
    assert set(device.peak) == set(device.reached)
    assert all(0 < device.share(kind) < 1 for kind in device.peak)
    if FP8 in device.peak:
        assert device.flops(MXFP8) == device.flops(FP8) > device.flops(BF16)
    else:
        with pytest.raises(ConfigError, match=f"{name} has no fp8 products, only bf16"):
            device.flops(FP8)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples(file):
    cluster = read_cluster(str(file))
    assert cluster.nodes and cluster.device.memory > 0


def test_the_example_of_a_built_in_cluster_equals_it():
    assert read_cluster(str(EXAMPLES[0].parent / "h100_32x8.toml")) == built_in("h100:32x8")


def test_numbers_of_a_file_replace_those_of_the_device(tmp_path):
    text = 'nodes = 2\n[device]\nlike = "h100"\nbf16_tflops = 500\nmemory_gib = 64\nfp8_matmul_tflops = 1000'
    device = read_cluster(write(tmp_path, text)).device
    assert device.peak == {BF16: 500 * TERA, FP8: 1979 * TERA}
    assert device.share(BF16) == pytest.approx(DEVICES["h100"].share(BF16)), "the same part of the new peak"
    assert (device.reached[FP8], device.memory, device.link) == (1000 * TERA, 64 * GIB, 450 * GB)


def test_main_memory_grows_with_the_node_unless_the_file_gives_it(tmp_path):
    assert built_in("h100").host_memory == 2048 * GIB and built_in("h100:4x4").host_memory == 1024 * GIB
    assert built_in("gb200").host_memory < 72 * built_in("h100").host_memory / 8, "two devices share a Grace processor"
    device = 'device = "a100"\ndevices_per_node = 16'
    assert read_cluster(write(tmp_path, device)).host_memory == 2 * built_in("a100").host_memory
    assert read_cluster(write(tmp_path, f"host_memory_gib = 100\n{device}")).host_memory == 100 * GIB


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = 2", "names no device"),
        ('device = "h1000"', "unknown device 'h1000'; known are v100"),
        ('device = "h100"\nnode = 2', "unknown 'node'; known are device"),
        ('device = "h100"\nnodes = 0', "nodes is 0; it must be a whole number from 1"),
        ('device = "h100"\nnodes = 1.5', "nodes is 1.5"),
        ('device = "h100"\nnodes = true', "nodes is True"),
        ('device = "h100"\nnetwork_gb_per_s = "fast"', "network_gb_per_s is 'fast'; it must be a number from 1e-6"),
        ('device = "h100"\nnetwork_gb_per_s = nan', "network_gb_per_s is nan"),
        ("device = 5", "device is 5; give a name, or a table"),
        ("[device]\nmemory_gib = 5", "device.like is None"),
        ('[device]\nlike = "h100"\nmemory = 5', "unknown 'memory' in"),
        ('[device]\nlike = "h100"\nbf16_tflops = -1', "bf16_tflops is -1"),
        ('[device]\nlike = "a100"\nbf16_matmul_tflops = 999', "is above the peak"),
        ('[device]\nlike = "h100"\nlink_gb_per_s = 1' + "0" * 400, "link_gb_per_s is 1000"),
        ('[device]\nlike = "h100"\nlink_gb_per_s = 1e300', "link_gb_per_s is 1e\\+300; it must be a number from 1e-6"),
        ('device = "h100"\nhost_gb_per_s = 1e-320', "host_gb_per_s is 1e-320"),
        ('device = "h100"\nnodes = ' + "1" * 5000, "write it as docs/planner.md shows"),
        ('device = "h100"\nnodes = 0x' + "f" * 5000, "nodes is a number of thousands of digits; it must be a whole"),
        # The parser gives up where the process allows less recursion.
        ('device = "h100"\nnodes = ' + "[" * 3000 + "]" * 3000, r"write it as docs/planner.md shows|nodes is \[\["),
        (f'device = "{"a" * 3000}"', "^.{,400}$"),
        (f"{'a' * 3000} = 1", "^.{,400}$"),
        ("nodes = = 2", "write it as docs/planner.md shows"),
    ],
)
def test_bad_files(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        read_cluster(write(tmp_path, text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "h1000",
        "h100:8",
        "h100:0x8",
        "h100:8x0",
        "",
        "h100:-1x8",
        "H100",
        "h100:8x8x8",
        "h100:" + "9" * 100 + "x8",
        "h100:9999999x8",
    ],
)
def test_bad_names(name):
    with pytest.raises(ConfigError):
        read_cluster(name)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        read_cluster(str(tmp_path / "none.toml"))


def test_damaged_files_are_refused_in_one_line(tmp_path):
    """Any change of a good file is read or refused; nothing else is raised."""
    rng, good = random.Random(0), EXAMPLES[0].read_bytes()
    refused = 0
    for _ in range(400):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = bytes(rng.randrange(256) for _ in range(rng.randrange(3)))
        file = tmp_path / "damaged.toml"
        file.write_bytes(bytes(data))
        try:
            read_cluster(str(file))
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 100


@pytest.mark.parametrize("node", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("sizes", [(1, 1, 8, 2), (2, 2, 2, 2), (4, 1, 2, 2), (8, 2, 1, 1), (2, 4, 2, 1)])
def test_the_ranks_that_share_a_node(node, sizes):
    """The mesh's own rank lists say the same."""
    tp, cp, dp, pp = sizes
    mesh = Mesh.create(tp * cp * dp * pp, tp=tp, cp=cp, pp=pp)
    cluster = dataclasses.replace(built_in("h100"), node=node)
    for axes in (("tp",), ("cp",), ("dp",), ("pp",), ("cp", "dp")):
        found = place(mesh, cluster, axes)
        group = mesh.groups(*axes)[0]
        on_first = sum(rank // node == group[0] // node for rank in group)
        assert (found.size, found.together) == (len(group), on_first)


def test_a_world_that_the_cluster_does_not_hold():
    with pytest.raises(ConfigError, match="a world of 32 ranks does not fit 2 nodes of 8 h100, which are 16 devices"):
        built_in("h100:2x8").check(32)
    built_in("h100:2x8").check(16)
