"""Choice of the rehearsed layers: Transformer Engine's if its sources are found, else torch's.

``prepare_layers`` then imports them, with patches for the whole process. Used by ``job.py``,
``processes.py`` and ``benchmarks/gpu/phases.py``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, Literal

from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.rehearsal.transformer_engine.sources import VERSIONS, find_sources

Layers = Literal["te", "torch"]


def choose_layers(asked: Layers | None, dtype: str) -> tuple[Layers, str]:
    """The layers to rehearse, and a sentence with the reason. ConfigError if ``asked`` ones are missing.

    ``asked`` None: those of the run on a GPU, if they can be rehearsed.
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
    """Import everything that a rank needs, before any rank is forked; this process must do nothing else."""
    # The order of the imports: Transformer Engine asks for a GPU when it is imported, so the fake one comes
    # first; megatron looks for Transformer Engine when it is imported, so megatron comes last.
    for name in ("apex", "amp_C"):  # its compiled kernels take no fake tensors
        sys.modules[name] = None  # type: ignore[assignment]
    if layers == "te":
        from bapo_megatron.planning.rehearsal.fake.cuda_device import answer_queries
        from bapo_megatron.planning.rehearsal.transformer_engine.installation import install

        answer_queries(lambda: None)
        install(te_folder(), answer_cuda=False)
        _accept_fake_tensors()
    else:  # megatron and the policy find none, also where it is installed
        for name in ("transformer_engine", "transformer_engine_torch"):
            sys.modules[name] = None  # type: ignore[assignment]
    from bapo_megatron.planning.rehearsal import rank  # noqa: F401  with torch and megatron


def _accept_fake_tensors() -> None:
    """Patch Transformer Engine's checks: a fake tensor counts as a tensor, an int as a CUDA device."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and "canonicalize_device" in vars(module):
            plain = module.canonicalize_device
            module.canonicalize_device = lambda device, plain=plain: plain(  # type: ignore[attr-defined]
                torch.device("cuda", device) if isinstance(device, int) else device
            )
    utils = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    choose = utils.get_attention_backend

    def get_attention_backend(asked: Any) -> Any:
        if asked.qkv_type is FakeTensor:
            asked.qkv_type = torch.Tensor
        return choose(asked)

    utils.get_attention_backend = get_attention_backend  # type: ignore[attr-defined]


def te_folder() -> Path:
    """Folder of the rehearsed version of Transformer Engine's sources. ConfigError if it is missing."""
    return find_sources(VERSIONS[0])
