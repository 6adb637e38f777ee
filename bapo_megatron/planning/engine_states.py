"""Memory of an engine's recurrent states: what Gated DeltaNet layers keep in place of keys and values.

``state_cache`` returns a plan's ``StateCache``: bytes and slots. A state has the same size for any sequence
length. SGLang caches states in ``--max-mamba-cache-size`` slots or, by default, in 0.9 times the KV cache's
memory (``_handle_max_mamba_cache`` in kv_cache_configurator.py of 0.5.23). The radix cache stores states,
too, since a state cannot be rolled back by a token: on a GPU a request takes 5 slots
(``_calculate_mamba_ratio``), without the radix cache one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.job import GB, Job

STATE_SLOTS = "--max-mamba-cache-size"
"""SGLang flag for the number of slots."""
_SHARE, _STRATEGY = "--mamba-full-memory-ratio", "--mamba-radix-cache-strategy"
_NO_RADIX_CACHE = "--disable-radix-cache"
_DEFAULT_SHARE = 0.9
_SLOTS = {"auto": 5, "extra_buffer": 5, "extra_buffer_lazy": 4, "no_buffer": 3}
"""Slots per request by radix cache strategy; on a GPU "auto" is "extra_buffer"."""


@dataclass(frozen=True)
class StateCache:
    """An engine's cache of recurrent states, for running requests and cached prefixes: bytes per sequence and
    per GPU, slots, slots per request."""

    per_sequence: int
    """Bytes of one sequence's states in all layers, over an engine's TP ranks."""
    slots: int
    per_request: int
    """Slots per running request."""
    reserved: float
    """Bytes of all slots on each GPU."""

    @property
    def requests(self) -> int:
        """Concurrent requests for which there are slots."""
        return self.slots // self.per_request

    def values(self) -> dict[str, float]:
        return {**vars(self), "requests": self.requests}


def state_cache(job: Job, room: float) -> StateCache | None:
    """Return the state cache, if ``room`` bytes of a GPU are shared by it and the KV cache; None for a model
    without states. SGLang allocates one slot more than it uses."""
    shape, rollout = job.shape, job.run.rollout
    size = sum(len(shape.layers_of(kind)) * kind.decoding().per_sequence for kind in shape.kinds)
    if not size:
        return None
    sglang, of_gpu = rollout.sglang, size / rollout.sglang.tensor
    if rollout.engine != "sglang":
        return StateCache(size, job.max_in_flight, 1, min(room, job.max_in_flight * of_gpu))
    has_no_prefixes = _NO_RADIX_CACHE in sglang.flags or sglang.on_update == "in_place"
    of_request = 1 if has_no_prefixes else _SLOTS.get(_value(sglang.flags, _STRATEGY, "auto"), 5)
    share = _number(sglang.flags, _SHARE, _DEFAULT_SHARE)
    of_share = int(room * share / (1 + share) / of_gpu) - 1
    slots = max(0, int(_number(sglang.flags, STATE_SLOTS, of_share)))
    return StateCache(size, slots, of_request, min(room, (slots + 1) * of_gpu))


def state_lines(job: Job, states: StateCache | None, engines: int) -> Iterator[str]:
    """Yield the state cache's lines of a plan's page; nothing for a model without states."""
    if states is None:
        return
    yield (
        f"  {states.per_sequence / 1e6:,.1f} MB of states a sequence: {states.slots:,} slots take "
        f"{states.reserved / GB:.1f} GB of a GPU, enough for {states.requests:,} requests at a time"
    )
    wanted = min(job.max_in_flight, -(-job.sampled_responses // max(1, engines)))
    if states.requests < wanted:
        yield (
            f"  WARNING: an engine has {wanted:,} responses of a step, for which it needs "
            f"{STATE_SLOTS}={wanted * states.per_request} in rollout.sglang.flags"
        )


def _number(flags: Sequence[str], name: str, default: float) -> float:
    """Return the flag's number. Raises ConfigError if it is not one."""
    text = _value(flags, name, str(default))
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"rollout.sglang.flags: {name} {text}: it must be a number") from None


def _value(flags: Sequence[str], name: str, default: str) -> str:
    """Return the flag's value, from the next item or after an equals sign."""
    for flag, after in pairwise((*flags, "")):
        own, _, value = flag.partition("=")
        if own == name:
            return value or after
    return default
