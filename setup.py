"""Package metadata of Megatron-Patched."""

import runpy
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup

# AdamW in one pass over host memory. Optional: without a compiler torch's kernels need several passes
# (docs/cpu_adam.md). Contraction is off and errno unused so that the loop is vectorised and gives the same bits
# everywhere; no -march, because the kernel itself has a version for each instruction set.
CPU_ADAM = Extension(
    "megatron.kernels.backends._cpu_adam",
    ["megatron/kernels/backends/cpu_adam.cpp"],
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
    extra_link_args=["-pthread"],
    optional=True,
)
SERVE = ["fastapi>=0.110", "uvicorn>=0.30"]
# What CUDA runs use beyond torch, which brings Triton. FlashAttention-3 has no package to name here: docs/gpu.md.
GPU = ["transformer-engine[core-cu13,pytorch]>=2.12"]
# Triton's interpreter for the tests of kernels on a machine without a GPU, and what benchmarks/gpu measures beside us.
GPU_DEV = ["triton>=3.6", "pytest-timeout>=2.3", "liger-kernel>=0.8", "torchao>=0.18"]

setup(
    name="megatron-patched",
    version=runpy.run_path(str(Path(__file__).with_name("megatron") / "base" / "version.py"))["VERSION"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    description="LLM training in Megatron-LM's shape that runs the same code on a laptop's CPU and on a GPU cluster",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=find_namespace_packages(include=["megatron", "megatron.*"]),
    ext_modules=[CPU_ADAM],
    package_data={
        "megatron.kernels.backends": ["cpu_allocator.cpp"],  # compiled on first use
        "megatron.config": ["flag_table.csv"],
        "megatron.planner.time": ["constants.json"],
    },
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "safetensors>=0.4",
        "transformers>=4.45",
        "tokenizers>=0.20",
        "sentencepiece>=0.2",
        "tiktoken>=0.7",
        "jinja2>=3.1",
        "pyyaml>=6",
        "tensorboard>=2.16",
        "rich>=13",
        "matplotlib>=3.8",
        "psutil>=5.9",
        "tomli>=2; python_version < '3.11'",
    ],
    extras_require={
        "wandb": ["wandb>=0.17"],
        "serve": SERVE,
        "parquet": ["pyarrow>=15"],
        "eval": ["lm-eval>=0.4.8"],
        "gpu": GPU,
        "gpu-dev": GPU_DEV,
        "dev": ["pytest>=8", "pytest-xdist>=3.6", "ruff>=0.6", "mypy>=1.10", "openai>=1.60", "peft>=0.13", *SERVE],
    },
)
