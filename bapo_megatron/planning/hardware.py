"""GPU types of ``bapo plan``: memory, FLOP/s and link rates from the vendor's data sheets.

Sources (NVIDIA data sheets, dense rates without sparsity): "A100 Tensor Core GPU" and DGX A100 (2021),
"H100 Tensor Core GPU" and DGX H100 (2023), "H200 Tensor Core GPU" (2024), "HGX B200" and DGX B200 (2024).
The data sheets give NVLink's rate for both directions together; here it is that of one. The network is one
InfiniBand port for each GPU: 200 Gb/s beside an A100, 400 Gb/s beside the others. PCIe is generation 4
beside an A100, 5 beside the others. Host memory has two sockets of eight channels: DDR4-3200 in a DGX A100,
DDR5-4800 in a DGX H100 and H200, DDR5-5600 in a DGX B200. Used in ``commands/cluster/`` and ``planning/``.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Gpu:
    """A GPU type: its rates and memory, and those of its node, in bytes, bytes/s and FLOP/s."""

    name: str
    memory: float
    """Bytes by the data sheet (decimal gigabytes); the driver shows 3 to 7 % more, which is left as a
    reserve."""
    peak: float
    """Dense bfloat16 rate."""
    memory_bandwidth: float
    nvlink: float
    """NVLink within the node, one direction, for each GPU."""
    network: float
    """Network between nodes, one direction, for each GPU."""
    host_memory: float
    """Host memory of a DGX node with eight such GPUs."""
    host_bandwidth: float
    """Bandwidth of that memory, both sockets."""
    pcie: float
    """PCIe between a GPU and the host, one direction."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80gb", 80 * GB, 312e12, 2039 * GB, 300 * GB, 25 * GB, 2000 * GB, 409 * GB, 32 * GB),
        Gpu("h100-80gb", 80 * GB, 989e12, 3350 * GB, 450 * GB, 50 * GB, 2000 * GB, 614 * GB, 64 * GB),
        Gpu("h200-141gb", 141 * GB, 989e12, 4800 * GB, 450 * GB, 50 * GB, 2000 * GB, 614 * GB, 64 * GB),
        Gpu("b200-180gb", 180 * GB, 2250e12, 8000 * GB, 900 * GB, 50 * GB, 2000 * GB, 717 * GB, 64 * GB),
    )
}
GPUS_PER_NODE = 8
