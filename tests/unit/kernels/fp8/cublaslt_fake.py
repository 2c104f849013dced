"""cuBLASLt on the CPU: it keeps the objects that it is asked for, and multiplies what lies at the given addresses."""

import ctypes
import math

import torch

from megatron.kernels.ops.fp8.formats import E4M3, E5M2
from megatron.kernels.ops.fp8.quantize import VECTOR, Quantized, dequantize

TYPES = {28: E4M3, 29: E5M2}
WORK_SPACE = 96


def at(address, count, dtype):
    """The numbers that lie there: no copy."""
    size = count * torch.empty((), dtype=dtype).itemsize
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)


class FakeCublasLt:
    """The functions of the library that are called. objects: number -> attributes; kernels: how many the search
    finds."""

    def __init__(self, kernels=1):
        self.objects, self.kernels, self.aligned = {}, kernels, []
        self._made = 0

    def __getattr__(self, name):
        for ending, function in (("Create", self._create), ("Destroy", self._destroy), ("SetAttribute", self._set)):
            if name.endswith(ending):
                return function
        raise AttributeError(name)

    def _create(self, handle, *arguments):
        self._made += 1
        self.objects[self._made] = {"made from": [getattr(each, "value", each) for each in arguments]}
        handle._obj.value = self._made
        return 0

    def _destroy(self, handle):
        del self.objects[handle.value]
        return 0

    def _set(self, handle, attribute, value, size):
        assert size.value == ctypes.sizeof(value._obj)
        self.objects[handle.value][attribute] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, product, a, b, c, d, preference, wanted, found, count):
        wishes = self.objects[preference.value]
        assert wanted == 1 and ctypes.sizeof(found._obj) == 96 and wishes[1] >= WORK_SPACE
        self.aligned.append([wishes[attribute] for attribute in (5, 6, 7, 8)])
        found._obj.work_space, count._obj.value = WORK_SPACE, self.kernels
        return 0

    def cublasLtMatmul(
        self, handle, product, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, kernel, space, size, stream
    ):
        about = self.objects[product.value]
        assert about["made from"] == [68, 0] and about[3] == 1 and 4 not in about and 25 not in about
        assert (handle.value, stream.value, size.value) == (11, 22, WORK_SPACE) and space.value
        assert c.value == d.value and of_c.value == of_d.value and alpha._obj.value == beta._obj.value == 1.0
        left, right = (
            self._operand(address.value, layout, about[17 + place], about.get(31 + place, 0))
            for place, (address, layout) in enumerate(((a, of_a), (b, of_b)))
        )
        kind, rows, columns, between = self.objects[of_d.value]["made from"]
        assert kind == 0 and rows == between
        at(d.value, rows * columns, torch.float32).view(columns, rows).add_(right @ left.t())
        return 0

    def _operand(self, address, layout, scale, kind):
        """Its columns as the rows of a matrix, in fp32."""
        of, rows, columns, between = self.objects[layout.value]["made from"]
        assert rows == between
        data = at(address, rows * columns, TYPES[of]).view(columns, rows)
        if kind == 0:
            return dequantize(Quantized(data, at(scale, 1, torch.float32), None))
        assert kind == 4
        blocks = math.ceil(rows / 128)
        factors = at(scale, blocks * columns, torch.float32).view(blocks, columns)
        return dequantize(Quantized(data, factors.t(), VECTOR))
