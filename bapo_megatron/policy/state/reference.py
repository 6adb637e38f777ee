"""Frozen reference policy: a host copy of its weights, which takes turns with the policy's on the device.

    swap       the policy's weights <-> the reference's, piece by piece, through a buffer of one block
    forward    a pass at the reference's weights, in the policy's own model
    swap       back, also after an error: the policy has the same bits as before

So the reference takes no memory of the device but the buffer, and on the host one copy of this rank's
weights. It is computed by the same code, at the same layout, as the policy. Only the parameters are swapped:
master weights, moments and gradients stay where they are, and a forward pass reads none of them. Storages
are written in place, so every view of them stays valid (``offload.py``). Used by ``policy/megatron.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bapo_megatron.policy.state.offload import HostBlocks, storages_of, synchronize


class FrozenReference:
    """The frozen reference of one rank; ``MegatronPolicy`` has one, if it was asked to load it. Local.

    First ``loading``, in which the caller fills the model with the reference's weights; then ``in_place`` as
    often as needed, in which the model has them. Outside of both the model has the policy's.
    """

    def __init__(self, model: Sequence[Any]) -> None:
        """``model``: the chunks of this rank, whose weights are on the device. Allocates nothing yet."""
        self._storages = storages_of(one for chunk in model for one in chunk.module.parameters())
        self.host = HostBlocks()
        """The host memory of the reference's weights."""

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context manager in which the model is filled; at its end the weights are kept on the host."""
        for data, block in self.host.pieces(self._storages):
            block.copy_(data, non_blocking=True)
        synchronize()  # the caller may write from the host, beside the device's stream
        try:
            yield
        finally:
            self._swap()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager in which the model has the reference's weights, and the host the policy's."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """Exchange the weights on the device with those on the host."""
        for data, block in self.host.pieces(self._storages):
            leaving = data.clone()
            # In the order of the stream: the block is read before it is written.
            data.copy_(block, non_blocking=True)
            block.copy_(leaving, non_blocking=True)
        synchronize()
