"""A parameter that knows its place in the global model, and initial values that do not depend on the layout.

The gradient buffer and the optimizer meet the model only through these: they never see a module.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.groups import Group

# Elements that are initialised at a time: the work space fits a CPU core's cache, or keeps a GPU busy.
_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 24}


@dataclass(frozen=True)
class Init:
    """Initial values: normal(0, scale), uniform(-scale, scale), the constant `scale`, or `scale` x Xavier-uniform.

    Xavier (Glorot and Bengio, 2010) takes fan-in and fan-out from the global weight, so it does not depend on the layout.
    """

    kind: str  # "normal", "uniform", "constant" or "xavier"
    scale: float

    def for_shape(self, global_shape: tuple[int, ...]) -> Init:
        """The same without "xavier": its bound is sqrt(6 / (fan-in + fan-out)), with all dims but the last as outputs."""
        if self.kind != "xavier":
            return self
        fan_out, fan_in = math.prod(global_shape[:-1]), global_shape[-1]
        return Init("uniform", self.scale * math.sqrt(6.0 / (fan_in + fan_out)))


@dataclass(frozen=True)
class ParamInfo:
    """Where a parameter's local piece lies in the global tensor, and how its gradient behaves.

    sum_over_tp: each tp rank holds only a part of the gradient (the parameter is replicated, its input is not), so the
    parts are summed over tp after the backward. decay: weight decay applies. on_both_ends: the first and the last
    pipeline rank hold a copy each (tied embeddings), so their gradients are summed, too.
    """

    global_shape: tuple[int, ...]
    shape: tuple[int, ...]  # of the local piece, also while the parameter itself is freed
    tp_dim: int | None  # dim that is sharded over tp; None when every tp rank holds the whole parameter
    offset: tuple[int, ...]  # where the local piece starts in the global tensor
    init: Init
    decay: bool
    sum_over_tp: bool
    on_both_ends: bool = False

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return math.prod(self.global_shape)


class GradSlot:
    """Where a parameter's gradient goes: its piece of a bucket's fp32 gradient memory.

    `fresh` means that nothing has been written since the gradient was cleared: the next writer overwrites, so clearing
    needs no pass over memory and the first GEMM no read. Memory that is not kept between backward passes is taken from
    `provide` (which sets `main_grad` of every parameter of the bucket) when the first of them is written.

    While `put_off` holds a list, weight gradients are not computed but appended to it as jobs; `waiting` counts those of
    this parameter that have not run.
    """

    __slots__ = ("_main_grad", "_provide", "fresh", "put_off", "waiting", "written")

    def __init__(self, provide: Callable[[], None]) -> None:
        self._main_grad: Tensor | None = None
        self._provide = provide
        self.fresh = True
        self.put_off: list[Callable[[], None]] | None = None
        self.waiting = 0
        self.written: Callable[[], None] = lambda: None  # called when a job has run

    @property
    def main_grad(self) -> Tensor:
        """fp32, in the parameter's shape."""
        if self._main_grad is None:
            self._provide()
        assert self._main_grad is not None
        return self._main_grad

    @main_grad.setter
    def main_grad(self, memory: Tensor | None) -> None:
        self._main_grad = memory

    def write(self, kernel: Callable[[Tensor, bool], None]) -> None:
        """Run `kernel(main_grad, overwrite)`, which computes a gradient and writes or accumulates it; now or later."""
        if self.put_off is None:
            kernel(self.main_grad, self.fresh)
            self.fresh = False
            return
        self.waiting += 1
        self.put_off.append(lambda: self._run(kernel))

    @torch.no_grad()
    def _run(self, kernel: Callable[[Tensor, bool], None]) -> None:
        kernel(self.main_grad, self.fresh)
        self.fresh = False
        self.waiting -= 1
        self.written()

    def add(self, grad: Tensor) -> None:
        """Accumulate `grad` (the parameter's shape, any float dtype)."""
        if self.fresh:
            self.main_grad.copy_(grad)
            self.fresh = False
        else:
            self.main_grad.add_(grad)


class Parameter(nn.Parameter):
    """A trainable tensor with its ParamInfo and, once a bucket owns it, its GradSlot."""

    info: ParamInfo
    slot: GradSlot | None


def make_parameter(
    global_shape: tuple[int, ...],
    init: Init,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tp: Group,
    tp_dim: int | None = None,
    decay: bool = True,
    sum_over_tp: bool = False,
) -> Parameter:
    """The local piece of a global parameter, uninitialised. `tp_dim` must be divisible by the tp size."""
    shape, offset = list(global_shape), [0] * len(global_shape)
    if tp_dim is not None:
        shape[tp_dim] //= tp.size
        offset[tp_dim] = shape[tp_dim] * tp.rank
    parameter = Parameter(torch.empty(shape, dtype=dtype, device=device))
    sharded = tp_dim if tp.size > 1 else None
    parameter.info = ParamInfo(
        global_shape=tuple(global_shape),
        shape=tuple(shape),
        tp_dim=sharded,
        offset=tuple(offset),
        init=init.for_shape(global_shape),
        decay=decay,
        sum_over_tp=sum_over_tp and tp.size > 1,
    )
    parameter.slot = None
    return parameter


def local_parameters(model: nn.Module) -> dict[str, Parameter]:
    """Global name -> parameter. A tied parameter appears once, under its first name. Buffers are not parameters."""
    found: dict[str, Parameter] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, Parameter), f"{name} was not made by make_parameter"
        found[name] = parameter
    return found


@torch.no_grad()
def initialize(parameters: dict[str, Parameter], seed: int) -> None:
    """Fill every parameter from (seed, global name, global index) alone: any layout starts from the same model."""
    for name, parameter in parameters.items():
        info = parameter.info
        if info.init.kind == "constant":
            parameter.fill_(info.init.scale)
        else:
            _fill_random(parameter, info, _key(seed, name))


def _key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _fill_random(parameter: Parameter, info: ParamInfo, key: int) -> None:
    """By blocks of rows: 64-bit arithmetic on a whole large matrix would cost many times its size in memory."""
    flat = parameter.view(parameter.shape[0], -1)
    index_of_row, within = _global_index(parameter, info)
    rows = max(1, _BLOCK[parameter.device.type] // max(1, flat.shape[1]))
    for start in range(0, flat.shape[0], rows):
        index = index_of_row[start : start + rows, None] + within[None, :]
        flat[start : start + rows] = _random_values(index, key, info.init).to(parameter.dtype)


def _global_index(parameter: Parameter, info: ParamInfo) -> tuple[Tensor, Tensor]:
    """Index in the flattened global tensor of local element (row, column), as a sum of two vectors."""
    device = parameter.device
    strides = [math.prod(info.global_shape[d + 1 :]) for d in range(len(info.global_shape))]
    positions = [
        (torch.arange(n, device=device, dtype=torch.int64) + start) * stride
        for n, start, stride in zip(parameter.shape, info.offset, strides, strict=True)
    ]
    within = torch.zeros(1, dtype=torch.int64, device=device)
    for position in positions[1:]:
        within = (within[:, None] + position[None, :]).reshape(-1)
    return positions[0], within


def _random_values(index: Tensor, key: int, init: Init) -> Tensor:
    """fp32 values from a counter-based generator: the SplitMix64 finaliser of (index + key), 24 bits of it.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; indexing instead of stepping is
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    # torch's int64 multiplication wraps, and its >> is arithmetic: the masks make it logical.
    z = (index + key).mul_(-7046029254386353131)  # 0x9E3779B97F4A7C15
    z.bitwise_xor_((z >> 30).bitwise_and_(0x3FFFFFFFF)).mul_(-4658895280553007687)  # 0xBF58476D1CE4E5B9
    z.bitwise_xor_((z >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(-7723592293110705685)  # 0x94D049BB133111EB
    bits = z.bitwise_xor_((z >> 31).bitwise_and_(0x1FFFFFFFF)).bitwise_right_shift_(40)  # signed, 24 bits
    u = bits.float().add_(0.5).mul_(2.0**-23)  # symmetric in (-1, 1), never 0 or +-1
    if init.kind == "uniform":
        return u.mul_(init.scale)
    return u.erfinv_().mul_(math.sqrt(2.0) * init.scale)  # the normal distribution's inverse
