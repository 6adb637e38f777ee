"""GPU check of the environment: hardware, package versions, and the implementations that they select."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from bapo_megatron.planning.job import GB
from bapo_megatron.policy.device import uses_transformer_engine
from benchmarks.common import machine
from benchmarks.gpu.rows import Row, Size

PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers", "numpy")
DISK_GB, HOST_GB = 35, 40
"""Needs of all sections: model folders and a checkpoint of 25 GB, and its copy on the host."""


def rows(size: Size, folder: Path) -> Iterator[Row]:
    yield Row("processor", machine())
    if size.cuda:
        gpu = torch.cuda.get_device_properties(0)
        yield Row("GPU", f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB, CUDA {torch.version.cuda}")
    if size.cuda and not size.tiny:
        yield from room(folder)
    for name in PACKAGES:
        yield Row(name, _version(name))
    yield Row("Python", platform.python_version())
    yield Row("bfloat16 layers", "Transformer Engine" if uses_transformer_engine(torch.bfloat16) else "torch")


def room(folder: Path) -> Iterator[Row]:
    """Rows of the free disk space at the temporary ``folder``, and of the free host memory."""
    for name, free, needed in (
        (f"free disk at {folder.parent}", shutil.disk_usage(folder).free / GB, DISK_GB),
        ("free host memory", psutil.virtual_memory().available / GB, HOST_GB),
    ):
        yield Row(name, f"{free:.0f} GB", f"{needed} GB", free >= needed)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
