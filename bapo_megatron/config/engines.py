"""Configuration of rollout engines: addresses, deadlines, weight transfer, and the launch of SGLang servers.

``SglangConfig`` is a recipe's ``rollout.sglang``. Its base class ``EngineConfig`` has the fields of every
kind of engine; a user's engine subclasses it to add fields. Their method ``problems`` yields their errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Lt

from bapo_megatron.config.transports import TransportName, placement_problems


@dataclass(frozen=True)
class EngineConfig:
    """Settings of any kind of engine: server addresses, concurrency, deadlines, colocation, weight sync. Base
    class of ``SglangConfig`` and of users' classes."""

    urls: tuple[str, ...] = ()
    """Servers that run already, e.g. http://node7:30000. None: the run starts servers of its own."""
    _: KW_ONLY
    max_in_flight: Annotated[int, Ge(1)] = 256
    """Requests at a server at a time."""
    request_minutes: Annotated[float, Gt(0)] = 60.0
    """Longest wait for one answer, queueing included. Then the request is aborted, and continued from its
    tokens."""
    update_minutes: Annotated[float, Gt(0)] = 10.0
    """Longest wait for a server to load new weights."""
    lost_minutes: Annotated[float, Gt(0)] = 30.0
    """Longest wait while no server answers; then the run saves a checkpoint and ends."""
    colocated: bool = False
    """The servers are on the GPUs that train, and release their memory while the policy trains
    (`parallel.offload` offloads the policy meanwhile)."""
    release_minutes: Annotated[float, Gt(0)] = 2.0
    """Longest wait until the driver reports the memory of colocated servers free; then they are killed, and
    started again when it is their turn."""
    kept_gb: Annotated[float, Gt(0)] = 6.0
    """Most memory in GB (10^9 bytes) that colocated servers may keep on a GPU while the policy trains."""
    sync: TransportName = "disk"
    """Weight sync to the servers. `disk`: a folder in the run directory, which they must see. `broadcast`:
    over NCCL between GPUs, gloo on a CPU. `ipc`, for colocated servers: from the trainer's memory. If
    `broadcast` or `ipc` fails: from disk."""
    bucket_mb: Annotated[float, Gt(0)] = 512.0
    """Megabytes (2^20 bytes) of each of the two buffers of `broadcast` or `ipc`."""
    address: str | None = None
    """Address of rank 0's machine for a broadcast. None: its host name, or 127.0.0.1 if the servers are on
    it."""

    def problems(self, longest_request: int) -> Iterator[str]:
        """Yield validation errors, each beginning with the field's name. ``longest_request``: most tokens of
        prompt and response together."""
        for url in self.urls:
            if not _is_address(url):
                yield f"urls: {url!r} is not an address; write it as http://HOST:PORT"
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            yield f"urls names a server twice: {', '.join(sorted(self.urls))}"
        if self.colocated and self.urls:
            yield (
                f"colocated: the run must start the servers itself, to end those that keep their memory; "
                f"leave out urls={', '.join(self.urls)}"
            )
        yield from placement_problems(self.sync, self.colocated)

    def without_trainer(self) -> Self:
        """Return these settings for a run without a trainer: own GPUs, and weights once, from a folder."""
        return replace(self, sync="disk", colocated=False)


_ADDRESS = re.compile(r"https?://(\[[\da-fA-F:.]+\]|[^\s/:@?#\[\]]+)(:(?P<port>\d{1,5}))?(/[^\s?#]*)?")


def _is_address(url: str) -> bool:
    match = _ADDRESS.fullmatch(url)
    return match is not None and 0 < int(match["port"] or 80) < 2**16


_REFUSED_FLAGS = {
    # They open a port without a check of the API key.
    r"--(smg-)?grpc|--encoder-only|--tokenizer-worker": "does not go with an API key: leave it out",
    # No flush empties these caches (``OUTLIVING`` in requirements.py).
    r"--(hicache-storage-backend|enable-lmcache|enable-flexkv)(=|$)": (
        "keeps keys and values of earlier weights: leave it out"
    ),
    # Retracted requests meet the limit, too (``_add_request_to_queue`` in scheduler.py).
    r"--max-queued-requests(=|$)": (
        "fails requests that new weights, or a full KV cache, put back into the queue: leave it out, and set "
        "max_in_flight"
    ),
    r"--(admin-)?api-k": (
        "would show the key to every user of the machine in the list of processes: write it into a file of "
        "mode 0600, and name that with api_key_file"
    ),
}
"""SGLang's flags that servers of a run may not have, as patterns of their beginnings, and why not."""

_SPECULATIVE, _DRAFT = "--speculative-alg", "--speculative-draft-model"
"""Beginnings of SGLang's flags of speculative decoding, and of a model that drafts."""


def _draft_flag(flags: tuple[str, ...]) -> str | None:
    """Return the flag that gives servers a draft model; None without one, as for drafts by n-grams."""
    for flag, after in pairwise((*flags, "")):
        name, _, value = flag.partition("=")
        algorithm = (value or after).upper()
        if name.startswith(_DRAFT) or (name.startswith(_SPECULATIVE) and algorithm not in ("NGRAM", "NONE")):
            return name
    return None


@dataclass(frozen=True)
class SglangConfig(EngineConfig):
    """SGLang servers, for `rollout.engine=sglang`: the addresses of running ones, or how to start them."""

    servers: Annotated[int, Ge(1)] = 1
    """Servers that the run starts on rank 0's machine, each on `tensor` GPUs."""
    python: Path | None = None
    """Interpreter of SGLang's environment. None: BAPO_SGLANG_PYTHON, else that of `make sglang`, or `make
    cluster`; on a machine with GPUs the latter alone."""
    tensor: Annotated[int, Ge(1)] = 1
    """Tensor parallel size of a server."""
    first_gpu: Annotated[int, Ge(0)] = 0
    """The first GPU of the first server that the run starts."""
    memory_fraction: Annotated[float, Gt(0), Lt(1)] = 0.85
    """Share of a GPU's memory for weights and KV cache."""
    context: int | None = None
    """Longest sequence of prompt and response in tokens. None: the longest of the run."""
    flags: tuple[str, ...] = ()
    """More flags of sglang.launch_server."""
    on_update: Literal["retract", "in_place"] = "retract"
    """Responses in flight when weights change. `retract`: their keys and values are computed again.
    `in_place`: they keep the old ones; such servers have no prefix cache and sample more slowly."""
    compare_digests: bool = True
    """After each weight sync compare a server's weights with those sent, tensor by tensor. False: with those
    of the other servers."""
    api_key_file: Path | None = None
    """File with the API key of the servers: one line, mode 0600. None: BAPO_SGLANG_API_KEY_FILE, else the
    run's own key in RUN/api_key."""
    require_api_key: bool = False
    """Refuse servers in `urls` that ask for no key. False: a warning."""
    start_minutes: Annotated[float, Gt(0)] = 15.0
    """Longest wait for a server to start, plus 10 s for each GB of weights."""

    def problems(self, longest_request: int) -> Iterator[str]:
        """Yield validation errors, each beginning with the field's name."""
        yield from super().problems(longest_request)
        for pattern, why in _REFUSED_FLAGS.items():
            if refused := [flag.split("=")[0] for flag in self.flags if re.match(pattern, flag)]:
                yield f"flags: {refused[0]} {why}"
        if self.sync != "disk" and (draft := _draft_flag(self.flags)):
            yield (
                f"flags: {draft} has a draft model, which sync={self.sync} gives no weights of its own: take "
                "sync=disk, or --speculative-algorithm NGRAM, or leave it out"
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
