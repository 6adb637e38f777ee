"""Stand-in for sgl-kernel's CPU build, which is not on PyPI: the names that SGLang 0.5.23 imports.

It registers only the hybrids' operators under ``torch.ops.sgl_kernel`` (``mamba.py``): SGLang then finds no
AMX support and takes its plain torch paths, which call one function of this file; its others raise.
"""

from typing import Any, NoReturn

from . import mamba  # noqa: F401  registers operators


def assign_req_to_token_pool_cpu(
    requests: Any, table: Any, starts: Any, ends: Any, locations: Any, _width: int
) -> None:
    """Write each request's new cache locations into its table row, columns start to end."""
    taken = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = locations[taken : taken + end - start].to(table.dtype)
        taken += end - start


def _absent(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise NotImplementedError("this function is not in the stand-in for machines without a GPU")


copy_all_layer_kv_cache_cpu = assign_draft_cache_locs_contiguous_cpu = assign_extend_cache_locs_cpu = _absent
build_tree_kernel_efficient_cpu = verify_tree_greedy_cpu = _absent
fill_accept_out_cache_loc_cpu = fill_bonus_tokens_cpu = _absent
