"""Optimizer state away from the device, in one process: the same bits, the planned bytes, the right order."""

import threading
import weakref

import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import STATES, UPDATE, OffloadSettings
from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.optimizer.optimizer_chunk import OptimizerChunk
from megatron.core.parameter import local_parameters
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.spec.optimizer_state import chunks_to_offload, optimizer_bytes
from tests.parallel.strategies import make_run
from tests.unit.models.builds import GPT, LLAMA, take_step

STEPS = 20
CHUNK = 640
SMALL = {**LLAMA, "num_layers": 1}
BF16 = {**SMALL, "bf16": True}


def settings(fraction=1.0, *, mode=UPDATE, **fields):
    return OffloadSettings(mode=mode, fraction=fraction, chunk_size=CHUNK, **fields)


MODES = {
    "0.3": settings(0.3),
    "all": settings(),
    "0.3, overlapped": settings(0.3, overlap=True),
    "all, overlapped": settings(overlap=True),
    "states": settings(mode=STATES),
}


def trained(run, steps=STEPS):
    """(losses, norms, name -> parameter, (name, element, key) -> state)"""
    losses, norms = run.steps(steps)
    norm = float(run.optimizer.params_norm())
    run.data_parallel.synchronize()
    return losses, norms, {n: p.detach().clone() for n, p in local_parameters(run.model).items()}, state_of(run), norm


def state_of(run):
    """Name and key -> the whole fp32 tensor, in one process."""
    found = {}
    for piece, key, tensor in run.optimizer.pieces():
        found.setdefault((piece.name, key), {})[piece.start] = tensor.clone()
    return {place: torch.cat([parts[start] for start in sorted(parts)]) for place, parts in found.items()}


def assert_same(found, expected):
    assert found[:2] == expected[:2]
    for ours, theirs in zip(found[2:4], expected[2:4], strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not ours[name].equal(theirs[name])] == []
    assert found[4] == pytest.approx(expected[4], rel=1e-12)


@pytest.fixture(scope="module")
def on_device():
    """fields -> what twenty steps without offload give."""
    found = {}

    def result(fields, **optimizer):
        key = str((fields, optimizer))
        if key not in found:
            found[key] = trained(make_run({}, fields=fields, **optimizer))
        return found[key]

    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fields", [SMALL, BF16], ids=["fp32", "bf16"])
def test_the_same_bits_as_on_the_device(mode, fields, on_device):
    run = make_run({}, fields=fields, offload=MODES[mode])
    assert_same(trained(run), on_device(fields))
    on_cpu, chunks = run.optimizer.cpu_chunks
    share = {"0": 0.3, "a": 1.0, "s": 0.0}[mode[0]]
    assert chunks > 20 and abs(on_cpu - share * chunks) < 2


@pytest.mark.parametrize("mode", ["0.3, overlapped", "all", "states"])
def test_a_decoupled_learning_rate(mode, on_device):
    """Chunks begin and end inside the word embeddings and the output layer."""
    decoupled = {"decoupled_lr": 5e-2}
    expected = on_device(BF16, **decoupled)
    assert_same(trained(make_run({}, fields=BF16, offload=MODES[mode], **decoupled)), expected)
    assert expected[0] != on_device(BF16)[0], "it takes part"


LOW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "main_params_dtype": "bf16"}


@pytest.mark.parametrize(
    ("fields", "optimizer"),
    [(SMALL, {}), (BF16, {}), (BF16, LOW), (SMALL, {"optimizer": "sgd"})],
    ids=["fp32", "bf16", "low precision", "sgd"],
)
def test_states_that_leave_the_device_between_steps(fields, optimizer, on_device):
    """The same bits; in the body no state is on the device, and a checkpoint could be written."""
    run = make_run({}, fields=fields, **optimizer)
    owner, losses, norms = run.optimizer, [], []
    for number in range(6):
        states = [weakref.ref(tensor) for chunks in owner.chunks for chunk in chunks for tensor in chunk.state.values()]
        nbytes, expected = owner.device_bytes, state_of(run)
        held = sum(tensor().nbytes for tensor in states)
        assert held > 0
        with owner.states_on_host():
            assert [tensor() for tensor in states] == [None] * len(states)
            assert owner.device_bytes == nbytes - held and owner.host_bytes >= held
            during = state_of(run)
            assert during.keys() == expected.keys() and all(during[key].equal(expected[key]) for key in expected)
        assert owner.device_bytes == nbytes
        more = run.steps(1, first=number)
        losses += more[0]
        norms += more[1]
    alone = trained(make_run({}, fields=fields, **optimizer), steps=6)
    assert_same((losses, norms, *trained(run, steps=0)[2:]), alone)


def test_with_a_loss_scale_and_skipped_steps():
    """Overflows at first: the gradients that were sent are forgotten, and nothing is updated."""
    fp16 = {"fields": {**SMALL, "fp16": True}, "initial_loss_scale": 2.0**24, "hysteresis": 1}
    results = []
    for mode in (OffloadSettings(), settings(0.6, overlap=True), settings(0.6), settings(mode=STATES)):
        run = make_run({}, offload=mode, **fp16)
        updates = [bool(take_step(run.step, run.batches(n), 5e-3, 0.1)[1].applied) for n in range(STEPS)]
        run.data_parallel.synchronize()
        results.append((updates, torch.cat([p.detach().flatten() for p in run.model.parameters()])))
    assert False in results[0][0][:-1] and results[0][0].count(True) > 5
    for updates, parameters in results[1:]:
        assert updates == results[0][0] and parameters.equal(results[0][1])


def test_a_parameter_without_a_gradient_is_updated_as_on_the_device(on_device):
    """What no sample needs (an expert, say) still decays; its chunks wait for no gradient of their own."""
    tied = {**GPT, "num_layers": 1}
    found = []
    for mode in (OffloadSettings(), settings(overlap=True)):
        run = make_run({}, fields=tied, offload=mode)
        parameter = local_parameters(run.model)["embedding.position_embeddings.weight"]
        for number in range(4):
            parameter.requires_grad_(number % 2 == 0)
            run.steps(1, first=number)
        run.data_parallel.synchronize()
        found.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
    assert found[0].equal(found[1])


def test_adapters_alone():
    """LoRA: frozen weights have no state anywhere; some slices are shorter than a chunk."""
    fields = {**SMALL, "lora_rank": 4}
    found = []
    for mode in (OffloadSettings(), settings(0.5, overlap=True), settings(mode=STATES)):
        run = make_run({}, fields=fields, before=lambda m: freeze_all_but_adapters(local_parameters(m)), offload=mode)
        losses, _ = run.steps(6)
        run.data_parallel.synchronize()
        found.append((losses, torch.cat([p.detach().flatten() for p in run.model.parameters()])))
    assert all(losses == found[0][0] and parameters.equal(found[0][1]) for losses, parameters in found)
    assert found[0][0][3] != found[0][0][0]


def test_nothing_offloaded_costs_nothing():
    """A fraction of 0: no cut, no thread, no further byte."""
    plain = make_run({}, fields=BF16)
    before = set(threading.enumerate())
    none = make_run({}, fields=BF16, offload=OffloadSettings(mode="off", fraction=0.0, chunk_size=CHUNK))
    none.steps(2)
    assert none.optimizer.cpu is none.optimizer.offloaded_states is None and none.optimizer.host_bytes == 0
    assert none.optimizer.cpu_chunks == (0, len(none.data_parallel.buckets))
    assert none.optimizer.device_bytes == plain.optimizer.device_bytes
    assert set(threading.enumerate()) <= before


def planned(run, mode, **optimizer):
    """By the planner, for this run's slices."""
    buckets = run.data_parallel.buckets
    half = buckets[0].dtype != torch.float32
    return optimizer_bytes([len(b.param_shard) for b in buckets], OptimizerConfig(**optimizer), mode, half=half)


PRECISE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


@pytest.mark.parametrize(
    "optimizer", [{}, PRECISE, {**PRECISE, "main_params_dtype": "bf16"}], ids=["fp32", "bf16", "all"]
)
@pytest.mark.parametrize("fields", [SMALL, BF16], ids=["fp32", "bf16"])
def test_bytes_are_the_planned_ones(fields, optimizer):
    remainders = "main_params_dtype" in optimizer
    if remainders and fields is SMALL:
        optimizer = {**optimizer, "main_params_dtype": "fp32"}
    for mode in (OffloadSettings(chunk_size=CHUNK), *MODES.values()):
        if remainders and mode.mode == UPDATE:
            continue
        run = make_run({}, fields=fields, offload=mode, **optimizer)
        run.steps(1)
        run.data_parallel.synchronize()
        plan = planned(run, mode, **optimizer)
        assert (run.optimizer.device_bytes, run.optimizer.host_bytes) == (plan.device + plan.staging, plan.host), mode


def test_bytes_by_hand():
    """Three chunks of 1000 elements of a bf16 model, one of them offloaded."""
    config = OptimizerConfig()
    mode = OffloadSettings(mode=UPDATE, fraction=0.3, chunk_size=1000)
    found = optimizer_bytes([2000, 1000], config, mode, half=True)
    assert (found.device, found.staging, found.disk) == (2000 * 12, 0, 0)
    assert found.host == 1000 * (12 + 4 + 2), "state, one gradient, one result"
    parked = optimizer_bytes(
        [2000, 1000], config, OffloadSettings(mode=STATES, fraction=1.0, chunk_size=1000), half=True
    )
    assert (parked.device, parked.staging, parked.host) == (0, 2 * 12_000, 36_000)


@pytest.mark.parametrize(
    ("sizes", "share", "offloaded"),
    [
        ([10, 10, 10], 0.0, [False] * 3),
        ([10, 10, 10], 1.0, [True] * 3),
        ([10, 10, 10], 0.3, [True, False, False]),
        ([10, 10, 10], 0.6, [True, True, False]),
        ([30, 1, 1], 0.1, [False, True, True]),  # the large one would be too much
        ([10, 3], 1e-9, [False, False]),
    ],
)
def test_which_chunks_are_offloaded_by_share(sizes, share, offloaded):
    assert chunks_to_offload(sizes, share) == offloaded


class TestDisk:
    def test_the_same_bits_and_no_file_is_left(self, tmp_path, on_device):
        for mode in (settings(0.5, directory=str(tmp_path)), settings(mode=STATES, directory=str(tmp_path))):
            run = make_run({}, fields=BF16, offload=mode)
            plan = planned(run, mode)
            assert plan.disk > 0 and plan.disk == sum(
                chunk.nbytes
                for chunks in run.optimizer.chunks
                for chunk in chunks
                if mode.mode == STATES or chunk.on_cpu
            )
            assert_same(trained(run), on_device(BF16))
            assert run.optimizer.host_bytes == plan.disk + plan.host
            assert list(tmp_path.iterdir()) == [], "files have no name, so none can be left"

    def test_a_missing_folder(self, tmp_path):
        with pytest.raises(ConfigError, match=r"--offload-dir \S+ is not a folder; make it"):
            make_run({}, fields=SMALL, offload=settings(directory=str(tmp_path / "none")))

    def test_a_folder_that_cannot_be_written(self):
        with pytest.raises(
            ConfigError, match=r"--offload-dir /proc cannot hold \d+ more bytes|--offload-dir /proc has 0"
        ):
            make_run({}, fields=SMALL, offload=settings(directory="/proc"))

    def test_a_full_disk(self, tmp_path, monkeypatch):
        room = type("Room", (), {"f_bavail": 10, "f_frsize": 100})
        monkeypatch.setattr("megatron.core.offload.host_pool.os.statvfs", lambda path: room)
        with pytest.raises(ConfigError, match=r"has 1000 bytes free and this rank offloads \d{6}"):
            make_run({}, fields=SMALL, offload=settings(directory=str(tmp_path)))


class TestOrder:
    """What is copied and updated when, by a record of the copies."""

    @pytest.fixture
    def events(self, monkeypatch):
        found = []
        for name in ("to_host", "to_device"):
            plain = getattr(CopyEngine, name)

            def recorded(self, *args, name=name, plain=plain):
                found.append((name, threading.current_thread().name))
                return plain(self, *args)

            monkeypatch.setattr(CopyEngine, name, recorded)
        return found

    def test_overlapped_gradients_leave_before_the_step_and_results_come_back_after_it(self, events):
        run = make_run({"overlap_reduce": True}, fields=SMALL, offload=settings(overlap=True))
        cpu = run.optimizer.cpu
        chunks = run.optimizer.cpu_chunks[0]
        run.step.forward_backward(run.batches(0))
        cpu.synchronize()
        assert events == [("to_host", "cpu-optimizer")] * chunks, "every gradient left during backward"
        gate = threading.Event()
        cpu._thread.run(gate.wait, "gate", after=())
        run.optimizer.step(1e-3, 0.0)
        assert len(events) == chunks, "the step returned, and no chunk was updated"
        embedding = run.model.embedding.word_embeddings
        reader = threading.Thread(target=lambda: embedding.weight)
        reader.start()
        reader.join(0.05)
        assert reader.is_alive(), "who reads a parameter waits for it"
        gate.set()
        reader.join(10)
        assert not reader.is_alive() and 0 < events.count(("to_device", "cpu-optimizer")) <= chunks
        run.data_parallel.synchronize()
        assert (
            events.count(("to_device", "cpu-optimizer")) == chunks
            and events.count(("to_host", "cpu-optimizer")) == 1 + chunks
        ), "the gate, too"

    def test_in_sequence_two_gradients_are_ahead(self, events):
        run = make_run({}, fields=SMALL, offload=settings())
        run.step.forward_backward(run.batches(0))
        assert events == []
        run.optimizer.step(1e-3, 0.0)
        kinds = "".join(name.removeprefix("to_")[0] for name, _ in events)
        count = run.optimizer.cpu_chunks[0]  # behind the gate
        assert kinds == "h" + "hh" + "dh" * (count - 2) + "dd"

    def test_an_error_of_the_thread_reaches_the_run(self, monkeypatch):
        run = make_run({}, fields=SMALL, offload=settings())
        monkeypatch.setattr(OptimizerChunk, "step", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.steps(1)
