"""Runs a program of Megatron-LM on the CPU over gloo: `python tests/megatron/on_cpu.py DIR RANKS PROGRAM flags...`.

DIR is Megatron-LM's source folder (d98e8a6 was used) with its dataset helpers compiled; the interpreter has what it
imports (torch, einops, omegaconf, triton, pybind11). It is a script and no module: our package of the same name must
not be found. And CUDA must be replaced before anything of Megatron-LM's is imported.

What asks for CUDA is answered as a machine with one idle device would, and everything stays in host memory. Its
distributed optimizer is mended where it only works with Transformer Engine or Apex: see `mend_distributed_optimizer`.
Everything is imported once, and the ranks are forked. SAMPLES in the environment names a file to which each rank that
reads data appends the number and the tokens of every training sample.
"""

import collections
import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import traceback
import types
import typing

import torch

CPU = torch.device("cpu")


class Idle:
    """A stream or an event that has nothing to wait for; any method may be called."""

    def __init__(self, *args, **kwargs):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class Device:
    """Properties of the device."""

    name, major, minor, multi_processor_count, total_memory = "cpu", 8, 0, 1, 2**34


def on_cpu(value):
    is_cuda = str(value).startswith("cuda") if isinstance(value, str | torch.device) else False
    return CPU if is_cuda else value


def redirected(function):
    """With the CPU wherever the arguments name a CUDA device."""

    def call(*args, **kwargs):
        return function(*map(on_cpu, args), **{key: on_cpu(value) for key, value in kwargs.items()})

    return call


def replace_cuda():
    """Answer what Megatron-LM asks torch.cuda."""
    cuda = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)
    cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: CPU
    cuda.get_device_properties, cuda.get_device_capability = lambda *args: Device, lambda *args: (8, 0)
    cuda.get_device_name, cuda.memory_stats = lambda *args: "cpu", lambda *args, **kwargs: collections.defaultdict(int)
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.Stream = cuda.Event = Idle
    cuda.current_stream = cuda.default_stream = Idle
    cuda.stream = lambda stream: contextlib.nullcontext()
    for name in (
        "FloatTensor",
        "DoubleTensor",
        "HalfTensor",
        "BFloat16Tensor",
        "IntTensor",
        "LongTensor",
        "ByteTensor",
    ):
        setattr(cuda, name, getattr(torch, name))
    for name in ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros"):
        setattr(torch, name, redirected(getattr(torch, name)))
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.to = redirected(torch.Tensor.to)
    plain_type = torch.Tensor.type

    def tensor_type(self, *args, **kwargs):
        found = plain_type(self, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.", "torch.cuda.")

    torch.Tensor.type = tensor_type
    begin = torch.distributed.init_process_group

    def over_gloo(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return begin("gloo", *args, **kwargs)

    torch.distributed.init_process_group = over_gloo


def replace_generators():
    """Its tracker of CUDA generators: dropout is off in what is compared."""
    tracker = importlib.import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker
    tracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    tracker.add = lambda self, name, seed: self.states_.__setitem__(name, torch.get_rng_state())


def mend_distributed_optimizer():
    """Without Transformer Engine and Apex it cannot load: it asserts that there is state before there is any, copies
    into leaves that need gradients, looks for a `step` among each parameter's tensors, and gives all of them one and
    the same step to count up."""
    Theirs = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    state_dict, load, put = Theirs.state_dict, Theirs.load_state_dict, Theirs._set_main_param_and_optimizer_states

    def with_state(self):
        if not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return state_dict(self)

    def with_own_steps(self, saved):
        load(self, saved)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    @torch.no_grad()
    def with_step(self, parameter, tensors):
        held = self._get_main_param_and_optimizer_states(parameter)
        put(self, parameter, {**tensors, **{key: held[key] for key in ("step",) if key in held}})

    Theirs.state_dict, Theirs.load_state_dict = with_state, with_own_steps
    Theirs._set_main_param_and_optimizer_states = with_step


def mend_attention():
    """Its plain attention differs from Transformer Engine's in that it cannot be made for latent attention, whose
    values have another width."""
    Attention = importlib.import_module("megatron.core.transformer.dot_product_attention").DotProductAttention
    make = Attention.__init__

    def made(self, config, *args, k_channels=None, v_channels=None, **kwargs):
        make(self, config, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    Attention.__init__ = made


def replace_delta_kernels():
    """What its gated delta net takes from a package of Triton kernels, also in the deterministic mode that computes the
    rest in plain torch: the normalisation of queries and keys."""

    def l2norm(x):
        return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)

    contents = {
        "fla": {},
        "fla.modules": {},
        "fla.ops": {},
        "fla.modules.convolution": dict.fromkeys(("causal_conv1d", "causal_conv1d_update")),
        "fla.modules.l2norm": {"l2norm": l2norm},
        "fla.ops.gated_delta_rule": dict.fromkeys(("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")),
    }
    for name, functions in contents.items():
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update(functions)


def mend_delta_rule(layer):
    """The recurrence of a gated delta net token by token in fp64. Its rule in chunks takes decays as differences of
    sums in fp32, after which the gradient of A_log differs by 2e-4 from that of the recurrence."""

    def recurrence(q, k, v, g, beta, **_):
        q, k, v, g, beta = (x.double() for x in (q * q.shape[-1] ** -0.5, k, v, g, beta))
        state, outputs = q.new_zeros(*q[:, 0].shape, v.shape[-1]), []
        for number in range(q.shape[1]):
            state = state * g[:, number].exp()[..., None, None]
            known = torch.einsum("bhkv,bhk->bhv", state, k[:, number])
            written = beta[:, number].unsqueeze(-1) * (v[:, number] - known)
            state = state + k[:, number].unsqueeze(-1) * written.unsqueeze(-2)
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, number]))
        return torch.stack(outputs, dim=1).float(), None

    if hasattr(layer, "gated_delta_rule"):
        layer.gated_delta_rule = recurrence


def mend_reduction():
    """Its reduction over one rank returns its input, to which its experts then add their biases in place. Autograd
    refuses that; with several ranks there is a copy."""
    Reduce = importlib.import_module("megatron.core.tensor_parallel.mappings")._ReduceFromModelParallelRegion
    forward = Reduce.forward
    Reduce.forward = staticmethod(lambda ctx, x, *args: forward(ctx, x, *args).clone())


def mend_predictions():
    """Its layers for further tokens ask for a class that is not there without Transformer Engine."""
    prediction = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    prediction.is_inference_column_parallel_linear = lambda module: False


def write_down_samples(file):
    GPTDataset = importlib.import_module("megatron.core.datasets.gpt_dataset").GPTDataset
    read = GPTDataset.__getitem__

    def item(self, number):
        found = read(self, number)
        if self.index_split.name == "train" and number is not None:
            with open(f"{file}.{os.environ['RANK']}", "a", encoding="ascii") as lines:
                lines.write(f"{number} {' '.join(map(str, found['tokens'].tolist()))}\n")
        return found

    GPTDataset.__getitem__ = item


def run_rank(rank, ranks, port, program):
    """The exit code."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # whatever it is: the other ranks have to be ended
        traceback.print_exc()
        code = 1
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main(folder, ranks, program, *flags):
    """The exit code: 0 when all ranks' are."""
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    sys.path[0] = folder
    sys.argv = [program, *flags]
    if not hasattr(typing, "override"):  # Megatron-LM asks for Python 3.12
        typing.override = lambda function: function
    # Processes that it spawns to write checkpoints would import its program anew, without what is replaced here.
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = torch.multiprocessing.get_context = lambda method=None: fork
    torch.set_num_threads(1)
    replace_cuda()
    replace_generators()
    mend_distributed_optimizer()
    mend_attention()
    mend_predictions()
    importlib.import_module("megatron.training.training")
    if "SAMPLES" in os.environ:
        write_down_samples(os.environ["SAMPLES"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    left, worst = set(), 0
    for rank in range(int(ranks)):
        if (child := os.fork()) == 0:
            os._exit(run_rank(rank, int(ranks), port, os.path.join(folder, program)))
        left.add(child)
    while left:
        child, status = os.wait()
        left.discard(child)
        if (code := os.waitstatus_to_exitcode(status)) and not worst:
            worst = abs(code)
            for other in left:
                os.kill(other, signal.SIGTERM)
    return worst


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
