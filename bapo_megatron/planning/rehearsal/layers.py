"""Choice of the rehearsed layers: Transformer Engine's if a GPU run has them and they are found, or torch's.

``prepare_layers`` then imports them, with patches for the whole process. ``make te-sources`` downloads the
sources to a place outside of every environment: without the compiled part they break the import of
megatron-core. Else an installed package of the version is taken. Used by ``job.py``, ``processes.py`` and
``benchmarks/gpu/phases.py``.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

from bapo_megatron.errors import ConfigError

Layers = Literal["te", "torch"]

VERSIONS = ("2.11.0", "2.20.2")
"""The last version that megatron-core 0.16.1 asks for (>=2.9, <2.12), and the newest that was tested."""

_REPOSITORY = Path(__file__).parents[3]


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


def find_sources(version: str) -> Path:
    """The folder that holds the package ``transformer_engine`` of ``version``.

    It is ``VERSION`` in the folder that BAPO_TE_SOURCES names, by default ``.te`` of the repository; else
    that of the package that is installed, if it is of this version. ConfigError if neither is there.
    """
    folder = Path(os.environ.get("BAPO_TE_SOURCES", _REPOSITORY / ".te")) / version
    if (folder / "transformer_engine/__init__.py").is_file():
        return folder
    with suppress(PackageNotFoundError):
        installed = distribution("transformer_engine")
        if installed.version.partition("+")[0] == version:
            return Path(str(installed.locate_file("transformer_engine"))).parent
    raise ConfigError(
        f"no sources of Transformer Engine {version} in {folder}, and it is not installed: run "
        "`make te-sources`, or let BAPO_TE_SOURCES name the folder that holds them"
    )
