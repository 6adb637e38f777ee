"""GPU check of the environment: hardware, package versions, and the implementations that they select."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bapo_megatron.policy.device import attention_problem, uses_transformer_engine
from benchmarks.common import machine
from benchmarks.gpu.rows import Row, Size

PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers", "numpy")


def rows(size: Size, _folder: Path) -> Iterator[Row]:
    yield Row("processor", machine())
    if size.cuda:
        gpu = torch.cuda.get_device_properties(0)
        yield Row("GPU", f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB, CUDA {torch.version.cuda}")
    for name in PACKAGES:
        yield Row(name, _version(name))
    yield Row("Python", platform.python_version())
    yield Row("bfloat16 layers", "Transformer Engine" if uses_transformer_engine(torch.bfloat16) else "torch")
    problem = attention_problem(torch.bfloat16)
    yield Row("bfloat16 attention", problem or "available", "available", problem is None)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
