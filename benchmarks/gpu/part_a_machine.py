"""Part A: the versions and packages of this machine, and its ceilings: copies, products in bf16 and fp8."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import Tensor

from benchmarks.gpu.case import Case, Result, Setting, check, measuring
from benchmarks.gpu.driver import ROOT
from benchmarks.gpu.measure import check_error, copy_rate, package, poison, random, timed
from benchmarks.gpu.parts import START_SECONDS
from benchmarks.gpu.record import MissingError, NotRunError
from benchmarks.gpu.shapes import layer_products
from megatron.kernels.backends import cpu_adam, flash3
from megatron.kernels.child_trial import failure_in_child
from megatron.kernels.choose_attention import Needs, try_flash_3

# Packages that some cases use, and that neither setup.py nor torch brings.
IMPORTED_AS = {"pyyaml": "yaml"}  # packages that are imported under another name than they are installed by
OPTIONAL = (
    "pytest", "xdist", "pytest_timeout", "triton", "transformer_engine", "flash_attn_interface", "torchao", "liger_kernel",
)  # fmt: skip
LIBRARIES = ("nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "triton", "transformers", "numpy")
FP8_MAX = 448.0


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part."""
    of = functools.partial
    shapes = layer_products(setting)
    return [
        Case("versions", of(versions, setting), 0.5),
        Case("packages", packages, 0.5),
        Case("start FlashAttention-3", of(start_flash_3, setting), START_SECONDS),
        Case("copy", of(copy, setting), measuring(3)),
        Case("gemm bf16", of(square_product, setting), measuring(2)),
        *(Case(f"gemm {name}", of(products, setting, *shape), measuring(3)) for name, shape in shapes.items()),
        Case("gemm fp8", of(fp8_product, setting), measuring(1)),
        Case("import transformer_engine", import_transformer_engine, START_SECONDS),
        Case("extension", extension, 10.0, limit=60.0),  # a C++ compiler's time
    ]


def versions(setting: Setting) -> Result:
    """Names the machine and its libraries."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if setting.cuda:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": nvidia_smi("driver_version"),
            "clocks_mhz": nvidia_smi("clocks.max.sm,clocks.max.mem"),
            "power_limit_w": nvidia_smi("power.limit"),
        }
    return Result(", ".join(f"{name} {value}" for name, value in found.items() if value is not None), found)


def nvidia_smi(query: str) -> str | None:
    """Returns nvidia-smi's answer for the first GPU, or None if it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def packages() -> Result:
    """Raises CheckError if a package that setup.py asks for is missing."""
    lacking = [name for name in required_packages() if importlib.util.find_spec(name) is None]
    optional = {name: importlib.util.find_spec(name) is not None for name in OPTIONAL}
    check(
        not lacking,
        f"missing: {', '.join(lacking)}; run pip install -e . here, or without a network pip download them on another "
        "machine, pip install --no-index --target DIR their wheels here, and put DIR on PYTHONPATH",
    )
    there = ", ".join(name for name, found in optional.items() if found) or "none"
    absent = ", ".join(name for name, found in optional.items() if not found) or "none"
    return Result(f"all that setup.py asks for; optional, there: {there}; missing: {absent}", optional)


def required_packages() -> list[str]:
    """Returns the import names of install_requires in setup.py."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "install_requires":
            wanted = [Requirement(spec) for spec in ast.literal_eval(node.value)]
            names = [each.name for each in wanted if each.marker is None or each.marker.evaluate()]
            return [IMPORTED_AS.get(name, name.replace("-", "_")) for name in names]
    raise AssertionError("setup.py has no install_requires")


def extension() -> Result:
    """Compiles the CPU optimizer into a temporary folder, unless it is there already."""
    if cpu_adam.missing() is None:
        return Result("the CPU optimizer is built and runs here")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", folder, "--build-lib", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        built = list(Path(folder).rglob("_cpu_adam*.so"))
    check(bool(built), f"setup.py build_ext made no library: {done.stderr[-400:] or done.stdout[-400:]}")
    return Result(
        f"the CPU optimizer compiles in {time.monotonic() - begun:.0f} s; this tree has it not installed, so runs here "
        f"take torch's kernels: {cpu_adam.missing()}"
    )


def copy(setting: Setting) -> Result:
    """Measures copies inside the device's memory, and between pinned host memory and the device."""
    values = {"device": copy_rate(setting)}
    host = torch.empty(setting.size(1 << 28, 1 << 18), dtype=torch.uint8, pin_memory=setting.cuda)
    device = torch.empty_like(host, device=setting.device)
    values["to_device"] = timed(lambda: device.copy_(host, non_blocking=True), setting).rate(host.nbytes) / 1e9
    values["to_host"] = timed(lambda: host.copy_(device, non_blocking=True), setting).rate(host.nbytes) / 1e9
    return Result("GB/s: " + ", ".join(f"{name} {rate:.1f}" for name, rate in values.items()), values)


def square_product(setting: Setting) -> Result:
    """Measures a large square product in bf16, on random numbers and on zeros, which draw less power."""
    n = setting.size(8192, 128)
    out = torch.empty(n, n, dtype=torch.bfloat16, device=setting.device)
    values = {}
    for name, scale in (("random", 1.0), ("zeros", 0.0)):
        a, b = (random(n, n, setting=setting, seed=seed, scale=scale) for seed in (0, 1))
        timing = timed(lambda a=a, b=b: torch.mm(a, b, out=out), setting)
        values[name], values[f"{name}_spread"] = timing.rate(2 * n**3) / 1e12, timing.spread
    return Result(f"{values['random']:.4g} TFLOP/s on random numbers, {values['zeros']:.4g} on zeros, {n}^3", values)


def products(setting: Setting, tokens: int, width: int, out: int) -> Result:
    """Measures the three products of a linear layer [tokens, width] -> [tokens, out]; the weight gradient is in
    fp32."""
    x, weight, grad = (
        random(*shape, setting=setting, seed=seed)
        for seed, shape in enumerate(((tokens, width), (out, width), (tokens, out)))
    )
    main_grad = torch.zeros(out, width, device=setting.device)

    def into_fp32() -> Tensor:
        if setting.cuda:
            return torch.addmm(main_grad, grad.t(), x, out_dtype=torch.float32, out=main_grad)
        return main_grad.add_(grad.t() @ x)

    runs = {"fprop": lambda: x @ weight.t(), "dgrad": lambda: grad @ weight, "wgrad": into_fp32}
    flops, values = 2 * tokens * width * out, {}
    for name, run in runs.items():
        timing = timed(run, setting)
        values[name], values[f"{name}_spread"] = timing.rate(flops) / 1e12, timing.spread
    return Result("TFLOP/s: " + ", ".join(f"{name} {values[name]:.4g}" for name in runs), values)


def fp8_product(setting: Setting) -> Result:
    """Measures a large square product in fp8 with one scale per tensor, and compares it with fp32."""
    if setting.cuda and torch.cuda.get_device_capability() < (8, 9):
        raise NotRunError("fp8 products need a GPU of compute capability 8.9 or more")
    n = setting.size(8192, 128)
    a, b = (random(n, n, setting=setting, seed=seed).clamp(-4, 4) for seed in (0, 1))
    scale = torch.full((), FP8_MAX / 4.0, device=setting.device)
    a8, b8 = ((x.float() * scale).to(torch.float8_e4m3fn) for x in (a, b))
    inverse = scale.reciprocal()

    def product() -> Tensor:
        return torch._scaled_mm(a8, b8.t(), inverse, inverse, out_dtype=torch.bfloat16)

    poison(setting)
    rows = slice(0, min(n, 256))
    exact = (a8[rows].float() @ b8.float().t()) * inverse * inverse
    off = check_error(product()[rows], exact, 1e-2, "fp8 product against fp32")
    rate = timed(product, setting).rate(2 * n**3) / 1e12
    return Result(f"{rate:.4g} TFLOP/s, {n}^3; error {off:.1e}", {"tflops": rate, "error": off})


def import_transformer_engine() -> Result:
    """Imports Transformer Engine: a library that does not fit torch's CUDA libraries fails here."""
    module = package("transformer_engine.pytorch")
    return Result(f"Transformer Engine {importlib.metadata.version('transformer_engine')} from {module.__file__}")


def start_flash_3(setting: Setting) -> Result:
    """Starts FlashAttention-3 in a process of its own, as set-up does: a library that does not fit torch, CUDA or the
    GPU fails here, also one that ends its process."""
    setting.needs_cuda("FlashAttention-3")
    if importlib.util.find_spec(flash3.MODULE) is None:
        raise MissingError(flash3.MODULE)
    needs = Needs(
        torch.device("cuda"), torch.bfloat16, 128, 128, 4, windowed=False, dropout=0.0, softcap=None, documents=True
    )
    reason = flash3.unfit(needs.device, needs.dtype, (needs.qk_dim, needs.v_dim), needs.dropout)
    if reason is not None:
        raise NotRunError(reason)
    with tempfile.TemporaryDirectory() as folder:  # tries, whatever an answer of before says
        trial = partial(try_flash_3, needs, blocks=False)
        failure = failure_in_child(trial, torch.device("cuda", 0), flash3.MODULE, folder=Path(folder), seconds=50.0)
    check(failure is None, str(failure))
    return Result("FlashAttention-3 runs: forward and backward of documents, heads of 128 channels")
