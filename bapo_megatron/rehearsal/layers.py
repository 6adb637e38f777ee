"""The layers that are rehearsed: Transformer Engine's where its sources are found, else torch's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from bapo_megatron.errors import ConfigError
from bapo_megatron.rehearsal.transformer_engine.sources import VERSIONS, find_sources

Layers = Literal["te", "torch"]


def choose_layers(asked: Layers | None, dtype: str) -> tuple[Layers, str]:
    """The layers to rehearse, and a sentence that says why. ConfigError if they are asked for and missing.

    ``asked`` None: those that the run would have on a GPU, if that can be.
    """
    if asked == "torch":
        return "torch", "torch's layers, as asked for"
    if dtype == "float32":
        if asked == "te":
            raise ConfigError("--layers te: a run in float32 has torch's layers; leave it out")
        return "torch", "torch's layers: the run is in float32"
    if asked == "te":
        te_folder()
        return "te", f"Transformer Engine {VERSIONS[0]}'s layers, as asked for"
    try:
        te_folder()
    except ConfigError as error:
        return "torch", f"torch's layers, and not those of Transformer Engine that a GPU would have: {error}"
    return "te", f"Transformer Engine {VERSIONS[0]}'s layers"


def prepare_layers(layers: Layers) -> None:
    """Import what a rank needs, before any rank is forked; this process must do nothing else.

    Transformer Engine asks for the GPU when it is imported, and megatron for Transformer Engine.
    """
    if layers == "te":
        from bapo_megatron.rehearsal.fake.cuda_device import answer_queries
        from bapo_megatron.rehearsal.transformer_engine import install

        answer_queries(lambda: None)
        install(te_folder(), answer_cuda=False)
        _take_indices_for_gpus()
    from bapo_megatron.rehearsal import metering  # noqa: F401  with torch and megatron


def _take_indices_for_gpus() -> None:
    """Let Transformer Engine take a number for a GPU, which torch does where it is built for CUDA alone."""
    import torch

    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and "canonicalize_device" in vars(module):
            plain = module.canonicalize_device
            module.canonicalize_device = lambda device, plain=plain: plain(  # type: ignore[attr-defined]
                torch.device("cuda", device) if isinstance(device, int) else device
            )


def te_folder() -> Path:
    """The folder of Transformer Engine's sources that are rehearsed. ConfigError if it is not there."""
    return find_sources(VERSIONS[0])
