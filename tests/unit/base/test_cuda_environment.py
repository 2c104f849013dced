"""Defaults of environment variables for CUDA: what is set, what stays, what is refused."""

import pytest

from megatron.base import cuda_environment
from megatron.base.cuda_environment import (
    allocator_settings,
    deterministic_settings,
    set_allocator,
    set_cudnn,
    set_deterministic,
)
from megatron.base.errors import ConfigError

GROWING = "expandable_segments:True"


def allocator(**given):
    environment = dict(given)
    set_allocator(environment)
    return environment


def deterministic(**given):
    environment = dict(given)
    set_deterministic(environment)
    return environment


def test_the_allocators_segments_grow():
    environment = allocator()
    assert environment == {"PYTORCH_ALLOC_CONF": GROWING} and allocator_settings(environment) == GROWING


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_what_the_user_set_stays(name):
    environment = allocator(**{name: "max_split_size_mb:64"})
    assert environment == {name: "max_split_size_mb:64"}
    assert allocator_settings(environment) == "max_split_size_mb:64"


def test_deterministic_mode():
    environment = deterministic()
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and environment["NCCL_ALGO"] == "Ring"
    assert deterministic_settings(environment) == "CUBLAS_WORKSPACE_CONFIG=:4096:8, NCCL_ALGO=Ring"
    assert deterministic_settings({}) == ""


@pytest.mark.parametrize("given", [{"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, {"NCCL_ALGO": "Tree"}, {"NCCL_ALGO": "^NVLS"}])
def test_deterministic_mode_keeps_what_agrees_with_it(given):
    assert given.items() <= deterministic(**given).items()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, "CUBLAS_WORKSPACE_CONFIG=:0:0 contradicts --deterministic-mode"),
        ({"NCCL_ALGO": "NVLS"}, "NCCL_ALGO=NVLS contradicts --deterministic-mode"),
        ({"NCCL_ALGO": "allreduce:nvlstree"}, "NCCL_ALGO=allreduce:nvlstree contradicts"),
    ],
)
def test_deterministic_mode_refuses_what_contradicts_it(given, message):
    with pytest.raises(ConfigError, match=message):
        deterministic(**given)


class TestCudnn:
    @pytest.fixture
    def wheel(self, tmp_path, monkeypatch):
        """torch's cuDNN, in a folder of its own."""
        folder = tmp_path / "vendor_of_wheels" / "cudnn"
        folder.mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(cuda_environment, "_CUDNN_WHEEL", "vendor_of_wheels.cudnn")
        return folder

    def test_the_wheel_is_taken(self, wheel):
        environment = {}
        set_cudnn(environment)
        assert environment == {"CUDNN_HOME": str(wheel)}

    @pytest.mark.parametrize("name", ["CUDNN_HOME", "CUDNN_PATH"])
    def test_the_choice_of_the_user_stays(self, name, wheel):
        environment = {name: "/opt/cudnn"}
        set_cudnn(environment)
        assert environment == {name: "/opt/cudnn"}

    def test_an_empty_name_is_no_choice(self, wheel):
        environment = {"CUDNN_HOME": ""}
        set_cudnn(environment)
        assert environment == {"CUDNN_HOME": str(wheel)}

    def test_no_wheel(self, monkeypatch):
        monkeypatch.setattr(cuda_environment, "_CUDNN_WHEEL", "no_such_vendor.cudnn")
        environment = {}
        set_cudnn(environment)
        assert environment == {}
