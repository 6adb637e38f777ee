"""What a run requires of SGLang: its installation, its servers' settings. Imports no package, for the doctor
of a bare machine."""

from collections.abc import Mapping
from typing import Any

from bapo_megatron.runtime.device import should_have_gpu

FP32_HEAD = "enable_fp32_lm_head"
"""The setting of servers of bfloat16 models: logits are float32 from the matmul on, as the trainer's are."""

NO_PREFILL_GRAPH = ("--cuda-graph-backend-prefill", "disabled")
"""The flag of every server on GPUs. SGLang's default there, graphs of the prefill in pieces (``breakable``),
ends each server that frees the memory of its graphs, as colocated ones do (``BreakableCudaGraphBackend``
raises NotImplementedError). And it keeps only weak references to inputs of the pieces: greedy responses were
silently wrong (sglang issue 37606). Graphs of the decoding stay."""

IN_PLACE = ("disable_radix_cache", "disable_overlap_schedule")
"""The settings (fields of ``ServerArgs``, flags with dashes) of servers with ``on_update=in_place``.

With a prefix cache, keys and values of old weights would serve new requests. With the overlap of scheduling
and computing, a pause in place leaves the results of the last step unread (``event_loop_overlap`` and
``pause_generation`` in scheduler.py): each of its tokens comes from the old weights, and is counted to the
new ones, because the server notes how many tokens a request has when the weights change
(``record_weight_version_events``). A pause that retracts reads the results first.
"""

RESERVED_TOKENS = 8
"""Tokens of a server's context that no sequence fills.

SGLang ends a request at context - 2 - input new tokens (``init_req_max_new_tokens`` in scheduler.py; its
``max_req_len`` is context - 1) and refuses an input of context - 6 tokens or more (``max_req_input_len`` in
tp_worker.py). The last token of a sequence of n may be asked for with an input of n - 1, so n + 6 would do.
"""


def install_command() -> str:
    """The command that installs the tested SGLang for this machine."""
    return "make cluster" if should_have_gpu() else "make sglang"


def prefill_graph(settings: Mapping[str, Any]) -> str | None:
    """The backend of prefill graphs in a server's settings (``/server_info``); None if they do not say."""
    graphs = settings.get("cuda_graph_config")
    prefill = graphs.get("prefill") if isinstance(graphs, Mapping) else None
    backend = prefill.get("backend") if isinstance(prefill, Mapping) else None
    return backend if isinstance(backend, str) else None


def flag(setting: str) -> str:
    """The flag that turns a setting on."""
    return "--" + setting.replace("_", "-")
