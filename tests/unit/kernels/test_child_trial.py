"""Trials in child processes: how they end, their answers in files, and what set-up chooses by them. All on the CPU."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.kernels import child_answer, child_trial, choose, choose_attention
from megatron.kernels import transformer_engine as chooser
from megatron.kernels.backends import flash3
from megatron.kernels.child_answer import TrialAnswer, answer_path, cache_folder, one_child, read, write
from megatron.kernels.child_trial import failure_in_child
from tests import pool
from tests.unit.kernels import child_trials, transformer_engine_fake
from tests.unit.models.builds import LLAMA

CPU, CUDA, LIBRARY = child_trials.CPU, torch.device("cuda", 0), child_trials.LIBRARY
ROOT = Path(__file__).parents[3]
APART = "its trial in a process of its own"
CUDA_ERROR = "CUDA error (flash_fwd_launch_template.h:180): invalid device function"
WAIT = 60.0  # seconds


def until(condition):
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def trials_under_way():
    """Children of this process that run a trial. Other tests may have left some that ended and have no command line."""
    lines = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, or is a zombie
            lines.append(" ".join(child.cmdline()))
    return [line for line in lines if "child_process" in line]


class TestEnds:
    """No child is without an answer, and none outlives its trial."""

    def failure(self, trial, folder, **options):
        found = failure_in_child(trial, CPU, LIBRARY, folder=folder, **options)
        assert trials_under_way() == []
        return found

    @pytest.mark.parametrize("code", [1, 0])
    def test_exit(self, tmp_path, code):
        """Also one that claims success: the trial has not come to its end."""
        found = self.failure(partial(child_trials.exits, code), tmp_path)
        assert found == f"{APART} ended with exit code {code}: {CUDA_ERROR}"

    def test_signal(self, tmp_path):
        assert self.failure(partial(child_trials.crashes), tmp_path) == f"{APART} was ended by SIGSEGV"

    def test_limit(self, tmp_path):
        assert self.failure(partial(child_trials.hangs), tmp_path, seconds=0.5) == f"{APART} took longer than 0.5 s"

    def test_error(self, tmp_path):
        """As in a trial in this process."""
        assert self.failure(partial(child_trials.raises), tmp_path) == "no kernel for heads of 64 channels"

    def test_the_same_algorithms(self, tmp_path):
        trial = partial(child_trials.deterministic)
        assert self.failure(trial, tmp_path) == "its algorithms are not deterministic"
        torch.use_deterministic_algorithms(True)
        try:
            assert self.failure(trial, tmp_path) is None
        finally:
            torch.use_deterministic_algorithms(False)

    def test_a_device_without_memory_says_nothing(self, tmp_path):
        """The trial itself would end the child. The answer holds for a while only."""
        assert failure_in_child(partial(child_trials.exits, 1), torch.device("meta"), LIBRARY, folder=tmp_path) is None
        (path,) = tmp_path.glob("*.json")
        assert read(path).files == {}

    def test_no_process(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        found = self.failure(partial(child_trials.works), tmp_path)
        assert found == f"{APART} could not be started: No such file or directory"

    def test_a_folder_with_another_package_of_this_name(self, tmp_path, monkeypatch):
        (tmp_path / "megatron").mkdir()
        (tmp_path / "megatron" / "__init__.py").write_text("raise RuntimeError('another')")
        monkeypatch.chdir(tmp_path)
        assert self.failure(partial(child_trials.works), tmp_path) is None

    def test_with_its_parent(self, tmp_path):
        log = tmp_path / "pid"
        code = "import sys; from tests.unit.kernels.child_trials import *; wait_for_one_that_hangs(*sys.argv[1:])"
        command = [sys.executable, "-c", code, str(log), str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT) as parent:
            until(lambda: log.exists() and log.read_text().endswith("\n"))
            parent.send_signal(signal.SIGKILL)
        until(lambda: not psutil.pid_exists(int(log.read_text())))


class TestAnswers:
    @pytest.fixture
    def children(self, monkeypatch):
        """Replaces children: the answers that they give, and the number of those started."""
        started = []

        def run(work, seconds):
            started.append(work)
            return TrialAnswer(None, child_answer.stamps([__file__]), time.time())

        monkeypatch.setattr(child_trial, "_run", run)
        return started

    def ask(self, folder, *args):
        return failure_in_child(partial(child_trials.works, *args), CPU, LIBRARY, folder=folder)

    def test_of_a_child(self, tmp_path, monkeypatch):
        """Two ranks that ask at the same time start one child, which leaves the libraries that it has loaded."""
        log, folder = tmp_path / "log", tmp_path / "answers"
        assert pool.run(2, child_trials.failure_of, folder, log) == [None, None]
        assert log.read_text() == "tried\n"
        (path,) = folder.glob("*.json")
        assert any(Path(name).name.startswith("libtorch_cpu.") for name in read(path).files)

    def test_is_kept(self, tmp_path, children):
        assert [self.ask(tmp_path), self.ask(tmp_path)] == [None, None] and len(children) == 1
        assert self.ask(tmp_path, "another size") is None and len(children) == 2

    @pytest.mark.parametrize(
        "damage",
        [
            b"",
            b"\xff",
            b"{}",
            b"[null, {}]",
            b'[null, {"a": 1}, 0]',
            b"[null, [], 0]",
            b'[5, {"a": [Infinity, 1]}, "x"]',
        ],
    )
    def test_a_damaged_file_is_written_again(self, tmp_path, children, damage):
        self.ask(tmp_path)
        (path,) = tmp_path.glob("*.json")
        path.write_bytes(damage)
        assert [self.ask(tmp_path), self.ask(tmp_path)] == [None, None] and len(children) == 2

    def test_a_folder_that_cannot_be_written(self, tmp_path, children):
        (tmp_path / "file").touch()
        for _ in range(2):
            assert self.ask(tmp_path / "file" / "folder") is None
        assert len(children) == 2

    def test_holds(self, tmp_path):
        library, now = tmp_path / "library.so", time.time()
        library.write_bytes(b"1")
        worked = TrialAnswer(None, child_answer.stamps([str(library)]), 0.0)
        assert worked.holds()
        library.write_bytes(b"12")
        assert not worked.holds()
        library.unlink()
        assert not worked.holds()
        assert TrialAnswer("failed", {}, now).holds() and TrialAnswer(None, {}, now - 500).holds()
        assert not TrialAnswer("failed", {}, now - 700).holds() and not TrialAnswer("failed", {}, now + 700).holds()

    def test_files(self, tmp_path):
        """A failure is read as it was written, and a time of long ago is not read."""
        path, answer = tmp_path / "a" / "b.json", TrialAnswer("why", {}, time.time())
        write(path, answer)
        assert read(path) == answer and os.listdir(path.parent) == ["b.json"]
        write(path, answer._replace(time=1.0))
        assert read(path) is None

    def test_what_it_depends_on(self, tmp_path, monkeypatch):
        module = tmp_path / "module_of_kernels.py"
        module.touch()
        monkeypatch.syspath_prepend(tmp_path)

        def path(*asked, device=CPU):
            return answer_path(tmp_path, asked, device, module.stem)

        properties = type("Properties", (), {"name": "H100", "major": 9, "minor": 0})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        first = path(64)
        assert first == path(64) != path(128)
        assert path(64, device=torch.device("cuda", 1)) == path(64, device=CUDA) != first
        for target, name, value in (
            (torch, "__version__", "2.8"),
            (torch, "__file__", "/elsewhere/torch/__init__.py"),
            (sys, "executable", "/elsewhere/python"),
            (child_answer, "_driver", lambda: "580.1"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(target, name, value)
                assert path(64) != first
        with monkeypatch.context() as patched:
            patched.setenv("LD_LIBRARY_PATH", "/elsewhere")
            assert path(64) != first
        module.write_text("x = 1")
        assert path(64) != first

    def test_the_folder(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
        assert cache_folder() == Path("/cache/megatron-patched/kernel-trials")
        for ignored in ("", "cache"):
            monkeypatch.setenv("XDG_CACHE_HOME", ignored)
            assert cache_folder() == tmp_path / ".cache/megatron-patched/kernel-trials"

    def test_the_lock_has_a_time_limit(self, tmp_path):
        holder = "import sys, time, pathlib; from megatron.kernels.child_answer import one_child\n" + (
            "with one_child(pathlib.Path(sys.argv[1]), 0.0): print('held', flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", holder, str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"held\n"
            begun = time.monotonic()
            with one_child(tmp_path, 0.3):
                assert time.monotonic() - begun >= 0.3
            process.stdin.close()


FLASH_3 = """
import os, sys
from tests.unit.kernels import flash3_operator
if {exits}:
    def _forward(*args, **options):
        print("{error}", file=sys.stderr, flush=True)
        os._exit(1)
    flash3_operator._forward = _forward
flash3_operator.register()
"""


class TestFlashAttention3:
    """The whole way, with the operators of a stand-in: a package that a child finds on the paths of this process."""

    @pytest.fixture
    def choice(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(flash3, "unfit", lambda *needs: None)  # as on a Hopper
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, flash3.MODULE, raising=False)

        def choose_with(exits, *, blocks=False):
            package = FLASH_3.format(exits=exits, error=CUDA_ERROR)
            (tmp_path / f"{flash3.MODULE}.py").write_text(package)
            needs = choose_attention.Needs(CPU, torch.bfloat16, 64, 64, 2, True, 0.0, None, True)
            if blocks:
                return choose_attention._of_blocks("auto", needs, needed=True)[1]
            return choose_attention._of_sequences("auto", needs, [])[1]

        yield choose_with
        sys.modules.pop(flash3.MODULE, None)

    @pytest.mark.parametrize("blocks", [False, True])
    def test_one_that_exits(self, choice, blocks):
        """This process goes on, and its kernel is the next that can run."""
        found = choice(True, blocks=blocks)
        reason = f"FlashAttention-3: {APART} ended with exit code 1: {CUDA_ERROR}; "
        assert found.startswith(f"unfused blocks (plain torch in fp32; {reason}" if blocks else f"math ({reason}")
        assert flash3.MODULE not in sys.modules, "the library that ends a process is not loaded into this one"

    def test_one_that_works(self, choice, tmp_path):
        assert choice(False) == "FlashAttention-3"
        assert flash3.MODULE in sys.modules and list((tmp_path / "cache").rglob("*.json"))

    def test_no_child_traces(self, choice, monkeypatch):
        """A dry run has no device to try."""
        monkeypatch.setattr(choose_attention, "failure_in_child", None)
        with FakeTensorMode():
            assert choice(False).startswith("math (FlashAttention-3: "), "its operators have no shapes for tracing"
        assert flash3.MODULE in sys.modules

    def test_no_child_without_blocks(self, choice, monkeypatch):
        monkeypatch.setattr(choose_attention, "failure_in_child", None)
        needs = choose_attention.Needs(CPU, torch.bfloat16, 64, 64, 2, True, 0.0, None, True)
        assert choose_attention._of_blocks("auto", needs, needed=False)[1] == "FlashAttention-3 blocks"


class TestTransformerEngine:
    CONFIG = ModelConfig(**LLAMA, bf16=True, kv_channels=64, transformer_impl="transformer_engine")

    def test_one_that_ends_the_child(self, monkeypatch):
        """The package was asked for by name, so the run stops. It is not loaded."""
        transformer_engine_fake.install(monkeypatch)
        monkeypatch.setattr(chooser, "load", None)
        trials = []
        monkeypatch.setattr(
            chooser, "failure_in_child", lambda trial, *where: trials.append((trial, *where)) or f"{APART} was ended"
        )
        with pytest.raises(ConfigError) as refused:
            choose.choose_kernels(self.CONFIG, CUDA, documents=False)
        assert f"cannot run here: transformer_engine 2.12.0: {APART} was ended; install" in str(refused.value)
        ((trial, *where),) = trials
        assert where == [CUDA, "transformer_engine"]
        assert (trial.args, trial.keywords) == ((self.CONFIG, torch.device("cuda")), {"documents": False})

    def test_what_a_child_tries(self, monkeypatch):
        calls = transformer_engine_fake.install(monkeypatch)
        engine, _ = chooser.find_engine("transformer_engine", CUDA)
        monkeypatch.setattr(choose, "find_engine", lambda impl, device: (engine, ""))
        monkeypatch.setattr(choose_attention.flash, "missing", lambda device, dtype: None)
        choose._try_engine(self.CONFIG, CPU, documents=True)
        assert {"fused_attn_fwd", "fused_attn_bwd", "general_gemm", "rmsnorm_fwd", "rmsnorm_bwd", "swiglu"} <= {
            name for name, _ in calls
        }

    def test_one_that_cannot_be_loaded_is_left_to_set_up(self, monkeypatch):
        """It says why in the same words with a child and without."""
        assert chooser.find_engine("local", CUDA) == (None, "")
        monkeypatch.setattr(chooser.importlib.metadata, "version", lambda name: "2.12.0")
        monkeypatch.setattr(chooser.importlib, "import_module", lambda name: 1 / 0)
        choose._try_engine(self.CONFIG, CUDA, documents=True)


def test_no_child_on_the_cpu(monkeypatch):
    for module in (choose_attention, chooser):
        monkeypatch.setattr(module, "failure_in_child", None)
    choose.choose_kernels(ModelConfig(**LLAMA, bf16=True, transformer_impl="transformer_engine"), CPU, blocks=True)
