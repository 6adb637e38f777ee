"""What the sampler knows: the groups in the making, the finished ones, and what became of all others.

The book changes only by ``apply``, and every record that it applies was written to the journal before. So
reading the journal again gives the same book. Records that damage has taken out of the journal cost what they
held: a response goes on from the tokens before the hole, and nothing is ever trained twice for it.

Steps: ``served`` is the last step that was given its groups; weights of step s are those that its updates
made (0: those that the run began with). A group's lag is the number of steps between the weights of its
oldest token and the weights that its step starts from; 0 is on-policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.sampler.metrics import GroupSummary
from bapo_megatron.rollout.sampler.write_ahead_log import Record
from bapo_megatron.types import FinishReason, Group, Prompt, Rollout

ARRAYS = ("token_ids", "log_probs", "versions")
DTYPES = (np.int32, np.float32, np.int32)
"""What is kept of every token: names and types of the arrays."""


@dataclass
class Response:
    """One response in the making, in the segments that engines returned."""

    segments: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    """(token ids, log-probs, versions) of each."""
    tokens: int = 0
    finish_reason: FinishReason | None = None
    """``stop`` or ``length`` once it is whole."""
    by_version: Counter[int] = field(default_factory=Counter)
    """Tokens by the version of the weights."""

    def arrays(self) -> list[np.ndarray]:
        """Token ids, log-probs and versions of all segments."""
        if len(self.segments) > 1:
            self.segments = [tuple(np.concatenate(parts) for parts in zip(*self.segments, strict=True))]
        return list(self.segments[0]) if self.segments else [np.zeros(0, dtype) for dtype in DTYPES]

    def rollout(self, reward: float) -> Rollout:
        """The whole response with its reward."""
        assert self.finish_reason is not None
        token_ids_R, log_probs_R, versions_R = self.arrays()
        return Rollout(token_ids_R, log_probs_R, versions_R, self.finish_reason, reward)


@dataclass
class OpenGroup:
    """A group in the making. Groups are numbered in the order in which they were begun."""

    number: int
    epoch: int
    """Of the dataset."""
    index: int
    """Of its prompt."""
    responses: list[Response]
    begun_after: int
    """The step whose weights the engines had when it was begun."""

    @property
    def is_whole(self) -> bool:
        """Nothing is left to sample."""
        return all(response.finish_reason for response in self.responses)

    @property
    def tokens(self) -> int:
        """Of all responses so far."""
        return sum(response.tokens for response in self.responses)

    @property
    def oldest_version(self) -> int | None:
        """Of its tokens; None before the first."""
        return min((version for response in self.responses for version in response.by_version), default=None)


@dataclass(frozen=True)
class Finished:
    """A rewarded group that waits for its step."""

    number: int
    epoch: int
    index: int
    group: Group
    tokens: int
    oldest_version: int


class SamplerState:
    """See above."""

    def __init__(
        self, prompts: Sequence[Prompt], group_size: int, identity: Mapping[str, Any] | None = None
    ) -> None:
        """``prompts``: the dataset, in its order. ``identity``: the settings that its records depend on."""
        self._prompts = prompts
        self._group_size = group_size
        self._identity = dict(identity or {})
        self.next_number = 0
        self.taken = 0
        """Places of the dataset that were begun, over all epochs."""
        self.served = 0
        self.weights_step = 0
        self._version = 0
        """That of the weights that the engines have."""
        self._step_of: dict[int, int] = {}
        self._newest = -1
        """The newest version that is in it."""
        self._first_step_of: dict[int, int] = {}
        """The first step that made each version: one that makes no update brings the same version again."""
        self.open: dict[int, OpenGroup] = {}
        self.finished: dict[int, Finished] = {}
        self.tokens: Counter[str] = Counter()
        """Tokens: ``sampled``, ``trained``, and ``dropped_`` by reason."""
        self._trained: dict[int, int] = {}
        """Tokens that each step was given; its file may be lost."""
        self.judged: list[GroupSummary] = []
        """Groups that were judged since the last batch."""
        self.dropped: Counter[str] = Counter()
        """Groups that were dropped since the last batch, by reason."""

    def apply(self, record: Record) -> None:
        """Take note of what ``record`` says."""
        change: Callable[[Record], None] = getattr(self, f"_on_{record.kind}")
        change(record)

    def step_of(self, version: int) -> int | None:
        """The step whose updates made the weights ``version``; None if no such weights were ever sampled."""
        return self._step_of.get(version)

    def lag(self, oldest_version: int | None, step: int) -> int:
        """Of a group whose oldest token has that version, if ``step`` trains on it."""
        if oldest_version is None or oldest_version > self._newest:
            return 0  # of weights that are on their way to the engines
        made = self._step_of.get(oldest_version)
        return step if made is None else step - 1 - made  # damage took the record of these weights

    def unspent(self, group: OpenGroup, sample: int, budget: int) -> int:
        """What a response may get before the next weights come, of a ``budget`` of tokens for each step.

        Weights serve several steps if those between them had no groups to train on. Tokens of newer weights
        are there while these are on their way, and after a trainer went on from a checkpoint; whatever is
        asked for now may come from the newest.
        """
        by_version, present = group.responses[sample].by_version, self._version
        newer = max((count for version, count in by_version.items() if version > present), default=0)
        first = max(self._first_step_of.get(present, 0), min(group.begun_after, self.weights_step))
        granted = budget * (self.weights_step - first + 1)
        return max(0, min(granted - by_version[present], budget - newer))

    @property
    def is_known(self) -> bool:
        """Anything was ever noted: at least that weights came."""
        return bool(self._step_of) or self.next_number > 0

    def knows(self, numbers: Sequence[int]) -> bool:
        """Any of these groups is open or waits for its step."""
        return any(number in self.open or number in self.finished for number in numbers)

    @property
    def outstanding(self) -> int:
        """Groups that were begun and not yet trained on or dropped."""
        return len(self.open) + len(self.finished)

    @property
    def live_tokens(self) -> int:
        """Tokens of the outstanding groups."""
        of_open = sum(group.tokens for group in self.open.values())
        return of_open + sum(group.tokens for group in self.finished.values())

    def state(self) -> Record:
        """All but the groups, as a record: the beginning of every file of the journal."""
        fields = {
            "identity": self._identity,
            "next_number": self.next_number,
            "taken": self.taken,
            "served": self.served,
            "weights_step": self.weights_step,
            "step_of": sorted(self._step_of.items()),
            "first_step_of": sorted(self._first_step_of.items()),
            "tokens": dict(self.tokens),
            "trained": sorted(self._trained.items()),
            "judged": self.judged,
            "dropped": dict(self.dropped),
        }
        return Record("state", fields, {})

    # --- what each kind of record changes ---

    def _on_state(self, record: Record) -> None:
        fields = record.fields
        for name, ours in self._identity.items():
            if (theirs := fields["identity"].get(name)) != ours:
                raise ConfigError(
                    f"the run's journal was written with {name}={theirs}, now it is {ours}: continue with "
                    "the same settings, or name another --run-dir"
                )
        self.next_number, self.taken = fields["next_number"], fields["taken"]
        self.served, self.weights_step = fields["served"], fields["weights_step"]
        self._step_of = dict(fields["step_of"])
        self._first_step_of = dict(fields.get("first_step_of", fields["step_of"]))
        self._newest = max(self._step_of, default=-1)
        self._version = max((v for v, step in self._step_of.items() if step == self.weights_step), default=0)
        self.tokens, self.dropped = Counter(fields["tokens"]), Counter(fields["dropped"])
        self._trained = dict(fields["trained"])
        self.judged = [GroupSummary(*summary) for summary in fields["judged"]]

    def _on_open(self, record: Record) -> None:
        for number, epoch, index in record.fields["groups"]:
            self._group(number, epoch, index)
        if record.fields["taken"] is not None:
            self.taken = record.fields["taken"]

    def _on_segments(self, record: Record) -> None:
        at = 0
        arrays = [record.arrays[name] for name in ARRAYS]
        for number, epoch, index, sample, start, length, reason in record.fields["parts"]:
            part = tuple(array[at : at + length].copy() for array in arrays)  # or one keeps them all
            at += length
            response = self._group(number, epoch, index).responses[sample]
            if response.tokens != start:  # damage took what lies between
                continue
            response.segments.append(part)
            response.tokens += length
            response.by_version.update(_counts(part[2]))
            response.finish_reason = reason
            self.tokens["sampled"] += length

    def _on_judged(self, record: Record) -> None:
        group = self.open.get(record.fields["number"])
        if group is None or not group.is_whole:
            return
        rewards, failures = record.fields["rewards"], record.fields["failures"]
        rollouts = tuple(
            response.rollout(reward) for response, reward in zip(group.responses, rewards, strict=True)
        )
        del self.open[group.number]
        self.finished[group.number] = Finished(
            group.number,
            group.epoch,
            group.index,
            Group(self._prompts[group.index], rollouts),
            group.tokens,
            group.oldest_version or 0,
        )
        lengths, reasons = [r.tokens for r in group.responses], [str(r.finish_reason) for r in rollouts]
        self.judged.append(GroupSummary(group.number, rewards, lengths, reasons, failures))

    def _on_dropped(self, record: Record) -> None:
        number = record.fields["number"]
        group = self.open.pop(number, None) or self.finished.pop(number, None)
        if group is not None:
            self.tokens[f"dropped_{record.fields['reason']}"] += group.tokens
            self.dropped[record.fields["reason"]] += 1

    def _on_batch(self, record: Record) -> None:
        step = record.fields["step"]
        for number in record.fields["groups"]:
            group = self.finished.pop(number, None) or self.open.pop(number, None)
            if group is not None:
                self.tokens["trained"] += group.tokens
                self._trained[step] = self._trained.get(step, 0) + group.tokens
        self.served = max(self.served, step)
        self.judged.clear()
        self.dropped.clear()

    def _on_rewind(self, record: Record) -> None:
        self.served = min(self.served, record.fields["step"])
        for step in [step for step in self._trained if step > self.served]:
            lost = self._trained.pop(step)
            self.tokens["trained"] -= lost
            self.tokens["dropped_lost"] += lost

    def _on_weights(self, record: Record) -> None:
        version, step = record.fields["version"], record.fields["step"]
        self._step_of[version] = self.weights_step = step
        self._first_step_of[version] = min(step, self._first_step_of.get(version, step))
        self._newest = max(self._newest, version)
        self._version = version

    def _group(self, number: int, epoch: int, index: int) -> OpenGroup:
        """The open group, begun now if it is not known (its own record may have been damaged)."""
        if number not in self.open:
            responses = [Response() for _ in range(self._group_size)]
            self.open[number] = OpenGroup(number, epoch, index, responses, self.weights_step)
            self.next_number = max(self.next_number, number + 1)
        return self.open[number]


def _counts(versions_R: np.ndarray) -> dict[int, int]:
    """Tokens by version."""
    first = versions_R[:1]
    if (versions_R == first).all():  # nearly always, and several times as fast
        return dict.fromkeys(first.tolist(), len(versions_R))
    found, counts = np.unique(versions_R, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))
