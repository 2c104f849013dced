"""A parameter that knows its place in the global model, and initial values that do not depend on the layout.

The gradient buffer and the optimizer meet the model only through these: they never see a module.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from megatron.core.groups import Groups
from megatron.spec.parameter import LEAST_RATE, LEAST_STEP, Init, ParamSpec, Section, piece_of

# Elements that are initialised at a time: the work space fits a CPU core's cache, or keeps a GPU busy.
_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 24}


@dataclass(frozen=True)
class ParamInfo:
    """A parameter's description, and where this rank's piece of it lies in the global tensor.

    shape: of the local piece, also while the parameter itself is freed. sections: the local piece, in order; it is one,
    unless tp ranks share the keys and values of a group of heads. on_both_ends: the first and the last pipeline rank
    hold a copy each (tied embeddings), so their gradients are summed, too.
    """

    spec: ParamSpec
    shape: tuple[int, ...]
    sections: tuple[Section, ...]
    on_both_ends: bool = False

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return self.spec.numel

    def section_at(self, index: int) -> Section:
        """The section of an element of the flattened local piece."""
        return next(section for section in reversed(self.sections) if section.start <= index)

    def held_first(self, section: Section, groups: Groups) -> bool:
        """Whether of all ranks of a replica that hold the section this is the first: it writes, and counts, for all."""
        return groups.along(self.spec.axis).rank % section.holders == 0 and not (
            self.on_both_ends and groups.pp.rank > 0
        )


class GradSlot:
    """Where a parameter's gradient goes: its piece of a bucket's gradient memory.

    Every writer computes in fp32. If the memory is in bf16, it is given an fp32 copy, and `round_sum(sum, memory)`
    stores the result: this class is the one place that knows it.

    `fresh` means that nothing has been written since the gradient was cleared: the next writer overwrites, so clearing
    needs no pass over memory and the first GEMM no read. Memory that is not kept between backward passes is taken from
    `provide` (which sets `main_grad` of every parameter of the bucket) when the first of them is written.

    While `deferred` holds a list, weight gradients are not computed but appended to it as jobs; `waiting` counts those
    of this parameter that have not run.
    """

    __slots__ = ("_main_grad", "_provide", "_round_sum", "deferred", "fresh", "waiting", "written")

    def __init__(self, provide: Callable[[], None], round_sum: Callable[[Tensor, Tensor], None] | None = None) -> None:
        self._main_grad: Tensor | None = None
        self._provide, self._round_sum = provide, round_sum
        self.fresh = True
        self.deferred: list[Callable[[], None]] | None = None
        self.waiting = 0
        self.written: Callable[[], None] = lambda: None  # called when a job has run

    @property
    def main_grad(self) -> Tensor:
        """fp32 or bf16, in the parameter's shape."""
        if self._main_grad is None:
            self._provide()
        assert self._main_grad is not None
        return self._main_grad

    @main_grad.setter
    def main_grad(self, memory: Tensor | None) -> None:
        self._main_grad = memory

    def write(self, kernel: Callable[[Tensor, bool], None]) -> None:
        """Run `kernel(main_grad, overwrite)`, which computes a gradient and writes or accumulates it; now or later."""
        if self.deferred is None:
            self.write_now(kernel)
            return
        self.waiting += 1
        self.deferred.append(lambda: self._run(kernel))

    def write_now(self, kernel: Callable[[Tensor, bool], None]) -> None:
        """As `write`, and never later."""
        memory = self.main_grad
        if memory.dtype == torch.float32:
            kernel(memory, self.fresh)
        else:
            assert self._round_sum is not None
            total = torch.empty_like(memory, dtype=torch.float32) if self.fresh else memory.float()
            kernel(total, self.fresh)
            self._round_sum(total, memory)
        self.fresh = False

    @torch.no_grad()
    def _run(self, kernel: Callable[[Tensor, bool], None]) -> None:
        self.write_now(kernel)
        self.waiting -= 1
        self.written()

    def add(self, grad: Tensor) -> None:
        """Accumulate `grad` (the parameter's shape, any float dtype)."""

        def accumulate(main_grad: Tensor, overwrite: bool) -> None:
            if overwrite:
                main_grad.copy_(grad)
            else:
                main_grad.add_(grad)

        self.write_now(accumulate)


class Parameter(nn.Parameter):
    """A trainable tensor with its ParamInfo and, once a bucket owns it, its GradSlot."""

    info: ParamInfo
    slot: GradSlot | None


def deliver(parameter: Parameter, grad: Tensor) -> Tensor | None:
    """Accumulates a gradient, in any shape of its elements, into the slot, or returns it for autograd without one."""
    grad = grad.view(parameter.shape)
    if parameter.slot is None:
        return grad.to(parameter.dtype)
    parameter.slot.add(grad)
    return None


def make_parameter(
    spec: ParamSpec, groups: Groups, *, sequence_parallel: bool = False, dtype: torch.dtype, device: torch.device
) -> Parameter:
    """This rank's piece of a parameter, uninitialised, along the axes that its description names."""
    sections: tuple[Section, ...]
    if not spec.shards:
        ranks, zeros = groups.along(None), (0,) * len(spec.shape)
        partial = ranks.size > 1 and bool(spec.reduce_axes(sequence_parallel=sequence_parallel))
        shape, sections = spec.shape, (Section(0, zeros, spec.shape, ranks.size, partial),)
    else:
        along = {axis: groups.along(axis) for axis, _ in spec.shards}
        sizes, places = ({axis: getattr(group, name) for axis, group in along.items()} for name in ("size", "rank"))
        shape, sections = piece_of(spec, sizes, places)
    parameter = Parameter(torch.empty(shape, dtype=dtype, device=device))
    parameter.info = ParamInfo(spec, shape, sections)
    parameter.slot = None
    return parameter


def local_parameters(model: nn.Module) -> dict[str, Parameter]:
    """Global name -> parameter. A tied parameter appears once, under its first name. Buffers are not parameters."""
    parameters: dict[str, Parameter] = {}
    for name, parameter in model.named_parameters():
        assert hasattr(parameter, "info"), f"{name} was not made by make_parameter"
        parameters[name] = cast(Parameter, parameter)  # a traced parameter is of torch's own class
    return parameters


def read_parameters(module: nn.Module) -> list[Parameter]:
    """The parameters of a module, each read as an attribute: one that is freed between its uses gets its memory."""
    return [
        getattr(part, name)
        for part in module.modules()
        for name, parameter in list(part._parameters.items())
        if parameter is not None
    ]


@torch.no_grad()
def initialize(parameters: dict[str, Parameter], seed: int) -> None:
    """Fill every parameter from (seed, global name, global index) alone: any layout starts from the same model."""
    for name, parameter in parameters.items():
        shape, init = parameter.info.spec.shape, parameter.info.spec.initial
        if init.kind == "constant":
            parameter.fill_(init.scale)
        else:
            for section in parameter.info.sections:
                _fill_random(section.of(parameter.detach()), section.offset, shape, init, _key(seed, name))


def _key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _fill_random(values: Tensor, offset: tuple[int, ...], global_shape: tuple[int, ...], init: Init, key: int) -> None:
    """By blocks of rows: 64-bit arithmetic on a whole large matrix would cost many times its size in memory."""
    flat = values.view(-1, values.shape[-1])
    index_of_row, within = _global_index(values, offset, global_shape)
    rows = max(1, _BLOCK[values.device.type] // max(1, flat.shape[1]))
    for start in range(0, flat.shape[0], rows):
        index = index_of_row[start : start + rows, None] + within[None, :]
        flat[start : start + rows] = _random_values(index, key, init).to(values.dtype)


def _global_index(values: Tensor, offset: tuple[int, ...], global_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Index in the flattened global tensor of an element in (row, column), all dims but the last as rows: a sum of two
    vectors."""
    strides = [math.prod(global_shape[d + 1 :]) for d in range(len(global_shape))]
    positions = [
        (torch.arange(n, device=values.device, dtype=torch.int64) + start) * stride
        for n, start, stride in zip(values.shape, offset, strides, strict=True)
    ]
    rows = torch.zeros(1, dtype=torch.int64, device=values.device)
    for position in positions[:-1]:
        rows = (rows[:, None] + position[None, :]).reshape(-1)
    return rows, positions[-1]


def _random_values(index: Tensor, key: int, init: Init) -> Tensor:
    """fp32 values from a counter-based generator: the SplitMix64 finaliser of (index + key), 24 bits of it.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; indexing instead of stepping
    is Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    # torch's int64 multiplication wraps, and its >> is arithmetic: the masks make it logical.
    z = (index + key).mul_(-7046029254386353131)  # 0x9E3779B97F4A7C15
    z.bitwise_xor_((z >> 30).bitwise_and_(0x3FFFFFFFF)).mul_(-4658895280553007687)  # 0xBF58476D1CE4E5B9
    z.bitwise_xor_((z >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(-7723592293110705685)  # 0x94D049BB133111EB
    bits = z.bitwise_xor_((z >> 31).bitwise_and_(0x1FFFFFFFF)).bitwise_right_shift_(40)  # signed, 24 bits
    u = bits.float().add_(0.5).mul_(2.0**-23)  # symmetric in (-1, 1), never 0 or +-1
    if init.kind == "log_uniform":
        return u.mul_((init.scale - LEAST_RATE) / 2).add_((init.scale + LEAST_RATE) / 2).log_()
    if init.kind == "softplus":
        least, largest = math.log(LEAST_STEP), math.log(init.scale)
        step = u.mul_((largest - least) / 2).add_((largest + least) / 2).exp_()
        return step + step.neg().expm1_().neg_().log_()
    if init.kind == "uniform":
        return u.mul_(init.scale)
    return u.erfinv_().mul_(math.sqrt(2.0) * init.scale)  # the normal distribution's inverse
