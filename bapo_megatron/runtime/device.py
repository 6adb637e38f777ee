"""MKL's choice of vector kernels on a CPU, made once and reproducibly before several threads compute."""

from __future__ import annotations

import torch


def choose_vector_kernels() -> None:
    """Call MKL's vector functions once with one thread.

    MKL chooses a function's kernel at the first call. When several threads made that call at once, one of
    them now and then took a coarse kernel for it: the RoPE cosines of half a pack were off by up to 1.5e-4,
    in the first forward pass of about one process in ten, and the run was not reproducible.
    """
    values = torch.linspace(0.1, 1.0, 64)  # too few to be split between threads
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.tanh):
        function(values)
