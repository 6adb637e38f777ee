"""SGLang's requirements: the install command, and the server flags and settings that a run needs.

No third-party package is imported, because `bapo doctor` runs on a bare machine. Used in
``commands/doctor/`` and this folder.
"""

from collections.abc import Mapping
from typing import Any

from bapo_megatron.runtime.device import should_have_gpu

FP32_HEAD = "enable_fp32_lm_head"
"""The setting for bfloat16 models: an output layer in float32, as in the trainer."""

NO_PREFILL_GRAPH = ("--cuda-graph-backend-prefill", "disabled")
"""The flag that disables CUDA graphs of the prefill, on every server with GPUs; those of decoding stay.

SGLang's default, graphs in pieces (``breakable``), crashes a colocated server when it frees the graphs'
memory (``BreakableCudaGraphBackend`` raises NotImplementedError). It also keeps only weak references to the
pieces' inputs: greedy responses were silently wrong (sglang issue 37606)."""

IN_PLACE = ("disable_radix_cache", "disable_overlap_schedule")
"""The settings (fields of ``ServerArgs``, flags with dashes) of servers with ``on_update=in_place``.

With a prefix cache, keys and values of old weights would serve new requests. With the overlap scheduler, a
pause in place leaves the results of the last step unread (``event_loop_overlap`` and ``pause_generation`` in
scheduler.py): its tokens come from the old weights, but are counted to the new ones, because the server
records the number of a request's tokens when the weights change (``record_weight_version_events``). A pause
that retracts reads the results first.
"""

RESERVED_TOKENS = 8
"""Reserved tokens of a server's context, which no sequence may fill.

SGLang ends a request at context - 2 - input new tokens (``init_req_max_new_tokens`` in scheduler.py; its
``max_req_len`` is context - 1) and refuses an input of context - 6 tokens or more (``max_req_input_len`` in
tp_worker.py). The last token of a sequence of n may be asked for with an input of n - 1, so n + 6 would do.
"""


def install_command() -> str:
    """The command that installs the tested SGLang for this machine."""
    return "make cluster" if should_have_gpu() else "make sglang"


def prefill_graph(settings: Mapping[str, Any]) -> str | None:
    """The backend of prefill CUDA graphs in a server's settings (``/server_info``); None if not stated."""
    graphs = settings.get("cuda_graph_config")
    prefill = graphs.get("prefill") if isinstance(graphs, Mapping) else None
    backend = prefill.get("backend") if isinstance(prefill, Mapping) else None
    return backend if isinstance(backend, str) else None


def flag(setting: str) -> str:
    """The command-line flag of a setting."""
    return "--" + setting.replace("_", "-")
