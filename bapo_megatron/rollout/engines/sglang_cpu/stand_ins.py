"""Stand-ins for what SGLang 0.5.23 lacks on a CPU: torchvision's operators, triton, CUDA-only functions.

``launch.py`` calls ``install()`` before ``import sglang``, in SGLang's environment. The real torchvision and
triton stay in use where they load: an environment with CUDA builds has both, even without a GPU.
"""

import importlib.util
import json
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_library: Any = None
_MODULES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
}
"""Modules of ``sglang.srt.models``, by architecture, for the models that this project trains."""
_HYBRID_FLAGS = (
    *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    *("--max-mamba-cache-size", "512"),
)
"""Without a CPU kernel for state snapshots the radix cache keeps states only at the ends of sequences, and
SGLang refuses its overlap schedule. The size limit stops states from filling all free memory."""
_DISABLED = "SGLANG_DISABLED_MODEL_ARCHS"
"""Environment variable with the modules that SGLang skips; read on the first model import."""


def install() -> None:
    """Make ``import sglang`` work. Idempotent."""
    global _library
    if _library is None:
        _library = _torchvision_operators()
        if importlib.util.find_spec("triton") is None:
            _triton()


def import_one_model(model: Path) -> None:
    """Let SGLang import only this model's module, not all 255, which saves 4 of a start's 12 CPU seconds.
    No effect if the variable is set or this project does not train the model."""
    served = {_MODULES.get(name) for name in _architectures(model)}
    if served and None not in served:
        models = _package().joinpath("srt/models").glob("*.py")
        os.environ.setdefault(_DISABLED, ",".join(sorted({path.stem for path in models} - served)))


def flags_of(model: Path) -> tuple[str, ...]:
    """Return the flags that a model needs on a CPU: state-cache flags for a hybrid, else none."""
    return _HYBRID_FLAGS if any(name.startswith("Qwen3_5") for name in _architectures(model)) else ()


def _architectures(model: Path) -> list[str]:
    return json.loads((model / "config.json").read_text()).get("architectures") or []  # type: ignore[no-any-return]


def unpin() -> None:
    """Leave host memory of per-token records (routed experts) unpinned: only CUDA can pin memory."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    def allocate(dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, *_: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    ALLOC_MEMORY_FUNCS["cpu"] = allocate


def replace_triton() -> None:
    """Replace the triton calls of hybrids without AMX: the gated norm and a shared expert's gate."""
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.kernels.ops.elementwise import elementwise

    def gate(hidden: Any, weight: Any, shared: Any, output: Any, *, do_add: bool) -> None:
        gated = torch.sigmoid(hidden @ weight)[:, None] * shared
        output.copy_(output + gated if do_add else gated)

    layernorm_gated._use_cpu = True
    elementwise._launch_fused_gate_sigmoid_mul = gate


def _torchvision_operators() -> Any:
    """Load, or else define, the operators that ``import torchvision`` needs; returns their library or path.
    A CPU build of torch cannot load the operator library of torchvision's CUDA build on PyPI."""
    spec = importlib.util.find_spec("torchvision")
    for path in Path(spec.origin).parent.glob("_C*.so") if spec and spec.origin else ():
        with suppress(OSError):
            torch.ops.load_library(path)
            return path
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _package() -> Path:
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("sglang is not installed in this environment")
    return Path(spec.origin).parent


def _triton() -> None:
    """Install an empty triton, which supports import, subclassing and version queries: SGLang's own, as on a
    Mac. Its file is loaded alone, because the package imports triton first."""
    path = _package() / "_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    assert spec is not None
    assert spec.loader is not None
    stubs = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    with (
        patch.object(sys, "platform", "darwin"),
        patch.object(platform, "machine", return_value="arm64"),
        patch.object(torch.backends.mps, "is_available", return_value=True),
        patch.object(stubs, "_patch_non_blocking"),
    ):
        stubs.install_platform_stubs()
