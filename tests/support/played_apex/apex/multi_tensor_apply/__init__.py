"""The caller of kernels over lists of tensors."""

from __future__ import annotations

from typing import Any

_CHUNK = 2048 * 32


def multi_tensor_applier(op: Any, noop_flag: Any, lists: Any, *arguments: Any) -> Any:
    """Call a kernel of ``amp_C``."""
    return op(_CHUNK, noop_flag, lists, *arguments)
