"""Configuration of SGLang servers: ``EngineConfig``, and the settings of their launch.

A section of ``RunConfig``, ``rollout.sglang``; read where ``rollout.engine=sglang``. Used by ``config/``
and ``sections.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from bapo_megatron.config.engine import EngineConfig

_WITHOUT_KEY = ("--grpc", "--smg-grpc", "--encoder-only", "--tokenizer-worker")
"""Prefixes of SGLang's flags that open a port without a check of the API key."""

_OUTLIVING = ("--hicache-storage-backend", "--enable-lmcache", "--enable-flexkv")
"""SGLang's flags of caches that no flush empties (``OUTLIVING`` in requirements.py)."""


@dataclass(frozen=True)
class SglangConfig(EngineConfig):
    """SGLang servers, for `rollout.engine=sglang`."""

    servers: Annotated[int, Ge(1)] = 1
    """Servers that the run starts on rank 0's machine, each on `tensor` GPUs."""
    python: Path | None = None
    """Interpreter of SGLang's environment. None: BAPO_SGLANG_PYTHON, else what `make sglang`
    made here, or on a machine with GPUs `make cluster`."""
    tensor: Annotated[int, Ge(1)] = 1
    """Tensor parallel size of a server."""
    first_gpu: Annotated[int, Ge(0)] = 0
    """The first GPU of the first server that the run starts."""
    memory_fraction: Annotated[float, Gt(0), Lt(1)] = 0.85
    """Share of a GPU's memory for weights and KV cache."""
    context: int | None = None
    """Longest sequence of prompt and response in tokens. None: the longest of the run. Servers are started
    with a few tokens more, which SGLang reserves."""
    flags: tuple[str, ...] = ()
    """More flags of sglang.launch_server."""
    on_update: Literal["retract", "in_place"] = "retract"
    """Responses in flight when weights change. `retract`: their keys and values are computed again under
    the new weights. `in_place`: they keep the old ones. Weights change faster then, but such servers have no
    prefix cache, and no overlap of scheduling and computing, so they sample more slowly."""
    compare_digests: bool = True
    """After each weight sync compare a server's weights with those that the trainer sent, tensor by tensor.
    False: with those of the other servers alone."""
    api_key_file: Path | None = None
    """File with the API key of the servers: one line, mode 0600. None: BAPO_SGLANG_API_KEY_FILE, else the
    run's own key in RUN/api_key, made at its first start. A key is never part of a command line."""
    require_api_key: bool = False
    """Refuse servers in `urls` that ask for no key. False: they are used, with a warning."""
    start_minutes: Annotated[float, Gt(0)] = 15.0
    """Longest wait for a server to load its model."""

    def problems(self, longest_request: int) -> Iterator[str]:
        """Validation errors, each beginning with the field's name."""
        yield from super().problems(longest_request)
        if other := [flag for flag in self.flags if flag.startswith(_WITHOUT_KEY)]:
            yield f"flags: {other[0].split('=')[0]} does not go with an API key: leave it out"
        if other := [flag.split("=")[0] for flag in self.flags if flag.split("=")[0] in _OUTLIVING]:
            yield f"flags: {other[0]} keeps keys and values of earlier weights: leave it out"
        keys = [flag for flag in self.flags if flag.startswith(("--api-k", "--admin-api-k"))]
        if keys:
            yield (
                f"flags: {keys[0].split('=')[0]} would show the key to every user of the machine in the list "
                "of processes: write it into a file of mode 0600, and name that with api_key_file"
            )
        if self.colocated and self.on_update != "retract":
            yield (
                f"colocated with on_update={self.on_update}: there are no keys and values to keep, because "
                f"their memory is released; leave on_update out"
            )
        if self.context is not None and self.context < longest_request:
            yield (
                f"context={self.context} is less than data.max_prompt_tokens and the longest response of "
                f"training and evaluations together, {longest_request}: raise it, or leave it out"
            )
