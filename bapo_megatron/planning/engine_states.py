"""Memory of an engine's recurrent states: what Gated DeltaNet layers keep in place of keys and values.

``state_cache`` returns a plan's ``StateCache``: bytes and slots. A state has the same size for any sequence
length. SGLang caches states in ``--max-mamba-cache-size`` slots or, by default, in 0.9 times the KV cache's
memory (``_handle_max_mamba_cache`` in kv_cache_configurator.py of 0.5.23). The radix cache stores states,
too, since a state cannot be rolled back by a token: a request takes 5 slots (``_calculate_mamba_ratio``), or
one without the radix cache. SGLang's flags for other ratios and strategies are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.job import GB, Job

STATE_SLOTS = "--max-mamba-cache-size"
"""SGLang flag for the number of slots."""
_NO_RADIX_CACHE = "--disable-radix-cache"
_SHARE = 0.9
_SLOTS_OF_REQUEST = 5


@dataclass(frozen=True)
class StateCache:
    """An engine's cache of recurrent states, for running requests and cached prefixes: bytes per sequence and
    per GPU, slots, slots per request."""

    per_sequence: int
    """Bytes of one sequence's states in all layers, summed over an engine's TP ranks."""
    slots: int
    per_request: int
    """Slots per running request."""
    reserved: float
    """Bytes of all slots on each GPU."""

    @property
    def requests(self) -> int:
        """Maximum number of concurrent requests."""
        return self.slots // self.per_request

    def values(self) -> dict[str, float]:
        return {**vars(self), "requests": self.requests}


def state_cache(job: Job, room: float) -> StateCache | None:
    """Return an engine's state cache, which shares ``room`` bytes of each GPU with the KV cache; None for a
    model without states. SGLang allocates one slot more than it uses."""
    shape, rollout = job.shape, job.run.rollout
    size = sum(len(shape.layers_of(kind)) * kind.decoding().per_sequence for kind in shape.kinds)
    if not size:
        return None
    sglang, of_gpu = rollout.sglang, size / rollout.sglang.tensor
    if rollout.engine != "sglang":
        return StateCache(size, job.max_in_flight, 1, min(room, job.max_in_flight * of_gpu))
    has_no_prefixes = _NO_RADIX_CACHE in sglang.flags or sglang.on_update == "in_place"
    of_request = 1 if has_no_prefixes else _SLOTS_OF_REQUEST
    of_share = int(room * _SHARE / (1 + _SHARE) / of_gpu) - 1
    slots = _given_slots(sglang.flags) or max(0, of_share)
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


def _given_slots(flags: Sequence[str]) -> int | None:
    """Return the last value of ``STATE_SLOTS``, from the next item or after an equals sign; None without that
    flag. Raises ConfigError if it is not a number."""
    words = [(*flag.partition("="), after) for flag, after in pairwise((*flags, ""))]
    given = [value or after for name, _, value, after in words if name == STATE_SLOTS]
    if given and not given[-1].isdecimal():
        raise ConfigError(
            f"rollout.sglang.flags: {STATE_SLOTS} {given[-1]!r} is not a number of slots: give one"
        )
    return int(given[-1]) if given else None
