"""The sampler's state, rebuilt from its write-ahead log: open groups, finished groups, counts.

``SamplerState.apply(record)`` is the only mutator; a record is in the log before anything acts on it, so a
log replay gives the same state. A damaged record costs only its content: a response continues from the tokens
before the gap, and nothing is trained on twice. ``SamplerState.served`` is the last step that has its groups;
step s produces the weights of step s (0: the initial weights).

    lag of a group at step t = (t - 1) - (step of the weights of its oldest token)      0 is on-policy
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.requests import ENVIRONMENT, PROMPTS
from bapo_megatron.rollout.sampler.response import Answer, Response, continued, given, restarted, summary
from bapo_megatron.rollout.sampler.write_ahead_log import Record
from bapo_megatron.types import RESPONSE_COLUMNS, Group, Prompt, ResponseTokens

FORMAT = 3
"""Journal format of a run with an environment; without one it is 1."""
TEACHER_LOG_PROBS = RESPONSE_COLUMNS["teacher_log_probs_R"].array
"""Array of a ``judged`` record: the teacher's log-probs of all responses, end to end."""


class GroupSummary(NamedTuple):
    """Statistics of a scored group, dropped or not, for step metrics: rewards, lengths, finish reasons,
    failures. Created by ``SamplerState`` from log records alone, so a resumed run counts the same."""

    number: int
    rewards: Sequence[float | None]
    """Reward of each response; None for a response left out of the group."""
    lengths: Sequence[int]
    """Sampled tokens of each response."""
    reasons: Sequence[str]
    """Finish reason of each response."""
    failures: list[str]
    """Kind of each failed score."""
    source: str = ""
    """Prompt source; empty in a run of one file."""
    episodes: Sequence[dict[str, Any]] = ()
    """The ``summary`` of each response; empty without an environment."""
    scores: Sequence[float | None] = ()
    """Reward of each response without penalties; empty if all equal ``rewards``."""

    @property
    def trained(self) -> GroupSummary:
        """The summary without left-out responses; it keeps their failures."""
        kept = [place for place, reward in enumerate(self.rewards) if reward is not None]
        if len(kept) == len(self.rewards):
            return self
        names = ("rewards", "lengths", "reasons", "episodes", "scores")
        rows: dict[str, Any] = {
            name: [row[place] for place in kept] for name in names if (row := getattr(self, name))
        }
        return self._replace(**rows)


@dataclass
class OpenGroup:
    """A group (one prompt, several responses) that is being sampled or scored; numbered in opening order.
    Only ``SamplerState.apply`` changes it."""

    number: int
    epoch: int
    index: int
    """Position of the prompt in the dataset."""
    responses: list[Response]
    opened_after: int
    """Step of the engines' weights when the group was opened."""

    @property
    def is_complete(self) -> bool:
        return all(response.is_complete for response in self.responses)

    @property
    def tokens(self) -> int:
        """Number of sampled tokens of all responses so far."""
        return sum(response.sampled_tokens for response in self.responses)

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that sampled one of its tokens; None before the first token."""
        versions = (version for response in self.responses for version in response.tokens_by_version)
        return min(versions, default=None)


@dataclass(frozen=True)
class FinishedGroup:
    """A scored group that waits for its training step: the ``Group`` to train on, and its summary."""

    number: int
    epoch: int
    index: int
    group: Group
    tokens: int
    oldest_version: int
    summary: GroupSummary


class SamplerState:
    """The sampler's state (groups, weights, counts), a pure function of the write-ahead log's records: only
    ``apply`` changes it, and raises ConfigError if the log has another ``identity`` or a newer format."""

    def __init__(
        self, prompts: Sequence[Prompt], group_size: int, identity: Mapping[str, Any] | None = None
    ) -> None:
        """Create an empty state of the dataset ``prompts``. ``identity``: settings that records depend on."""
        self._prompts = prompts
        self._group_size = group_size
        self._identity = dict(identity or {})
        self.next_number = 0  # number of the next group to open
        self.taken = 0
        """Number of prompts taken from the dataset over all epochs."""
        self.served = 0
        """Last step that has its groups (its batch record was applied)."""
        self.unrecorded: set[int] = set()
        """Steps up to ``served`` whose batch record was damaged."""
        self.weights_step = 0
        """Step that produced the engines' weights."""
        self._version = 0  # version of the engines' weights
        self._step_of: dict[int, int] = {}  # last step of each weight version
        self._newest = -1  # newest version in `_step_of`
        self._first_step_of: dict[int, int] = {}  # a step without an update keeps the version
        self.open: dict[int, OpenGroup] = {}
        self.finished: dict[int, FinishedGroup] = {}
        self.tokens: Counter[str] = Counter()
        """The run's token counts: ``sampled``, ``trained``, and ``dropped_REASON``."""
        self._trained: dict[int, int] = {}  # tokens of each step's batch, in case its file is lost
        self.scored: list[GroupSummary] = []
        """Groups scored since the last batch."""
        self.dropped: Counter[str] = Counter()
        """Number of groups dropped since the last batch, by reason."""

    def apply(self, record: Record) -> None:
        """Apply a record that is already in the write-ahead log."""
        change: Callable[[Record], None] = getattr(self, f"_on_{record.kind}")
        change(record)

    def step_of(self, version: int) -> int | None:
        """Return the last step of weight ``version``; None if unknown."""
        return self._step_of.get(version)

    def lag(self, oldest_version: int | None, step: int) -> int:
        """Return the lag, in steps, at ``step`` of a group whose oldest token is of ``oldest_version``."""
        if oldest_version is None or oldest_version > self._newest:
            return 0  # sampled from weights that are still being loaded
        made = self._step_of.get(oldest_version)
        return step if made is None else step - 1 - made  # None: these weights' record was damaged

    def remaining_budget(self, group: OpenGroup, sample: int, budget: int) -> int:
        """Return a response's remaining token budget under the current weights, at ``budget`` tokens a step.
        Weights serve several steps if a step had nothing to train on. A response may have tokens of newer
        weights while they are being loaded or after a resume, and a new request may get the newest
        weights."""
        by_version, present = group.responses[sample].tokens_by_version, self._version
        newer = max((count for version, count in by_version.items() if version > present), default=0)
        first = max(self._first_step_of.get(present, 0), min(group.opened_after, self.weights_step))
        granted = budget * (self.weights_step - first + 1)
        return max(0, min(granted - by_version.get(present, 0), budget - newer))

    @property
    def is_empty(self) -> bool:
        """Whether no weights were loaded and no group was opened."""
        return not self._step_of and self.next_number == 0

    @property
    def outstanding(self) -> int:
        """Number of groups neither trained on nor dropped."""
        return len(self.open) + len(self.finished)

    @property
    def outstanding_places(self) -> list[tuple[int, int, int]]:
        """Number, epoch and prompt index of each outstanding group, in opening order."""
        groups: list[OpenGroup | FinishedGroup] = [*self.open.values(), *self.finished.values()]
        return sorted((group.number, group.epoch, group.index) for group in groups)

    @property
    def outstanding_tokens(self) -> int:
        of_open = sum(group.tokens for group in self.open.values())
        return of_open + sum(group.tokens for group in self.finished.values())

    def snapshot(self) -> Record:
        """Return a snapshot record of everything except the groups, the first record of every log."""
        fields = {
            **({"format": FORMAT} if ENVIRONMENT in self._identity else {}),
            "identity": self._identity,
            "next_number": self.next_number,
            "taken": self.taken,
            "served": self.served,
            "weights_step": self.weights_step,
            "step_of": sorted(self._step_of.items()),
            "first_step_of": sorted(self._first_step_of.items()),
            "tokens": dict(self.tokens),
            "trained": sorted(self._trained.items()),
            "judged": list(self.scored),  # key of earlier versions
            "dropped": dict(self.dropped),
        }
        return Record("state", fields, {})

    # --- one method per record kind, named as on disk ---

    def _on_state(self, record: Record) -> None:
        fields = record.fields
        if fields.get("format", 1) > FORMAT:
            raise ConfigError(
                f"the run's journal has format {fields['format']}, this version of the program reads formats "
                f"up to {FORMAT}: continue it with the version that wrote it, or name another --run-dir"
            )
        for name, ours in self._identity.items():
            theirs = fields["identity"].get(name)
            if theirs != ours and not (name == PROMPTS and theirs is None):
                raise ConfigError(
                    f"the run's journal was written with {name}={theirs}, now it is {ours}: continue with "
                    "the same settings, data, tokenizer and chat template, or name another --run-dir"
                )
        if not self.is_empty:  # otherwise earlier logs, with their steps' groups, were deleted
            self._pass_over(fields["served"] + 1)
        self.next_number, self.taken = fields["next_number"], fields["taken"]
        self.served, self.weights_step = fields["served"], fields["weights_step"]
        self._step_of = dict(fields["step_of"])
        self._first_step_of = dict(fields["first_step_of"])
        self._newest = max(self._step_of, default=-1)
        self._version = max((v for v, step in self._step_of.items() if step == self.weights_step), default=0)
        self.tokens, self.dropped = Counter(fields["tokens"]), Counter(fields["dropped"])
        self._trained = dict(fields["trained"])
        self.scored = [GroupSummary(*summary) for summary in fields["judged"]]

    def _on_open(self, record: Record) -> None:
        for number, epoch, index in record.fields["groups"]:
            self._group(number, epoch, index)
        if record.fields["taken"] is not None:
            self.taken = record.fields["taken"]

    def _on_segments(self, record: Record) -> None:
        parts = record.fields["parts"]
        segments = ResponseTokens.split(record.arrays, (length for *_, length, _ in parts))
        for segment, (number, epoch, index, sample, start, length, reason) in zip(
            segments, parts, strict=True
        ):
            responses = self._group(number, epoch, index).responses
            # Damage destroyed a preceding record: a segment or a restart.
            if responses[sample].tokens != start or not responses[sample].is_sampling:
                continue
            responses[sample] = continued(responses[sample], segment, reason)
            self.tokens["sampled"] += length

    def _on_given(self, record: Record) -> None:
        at = 0
        for number, epoch, index, sample, start, attempt, length, said in record.fields["parts"]:
            ids = record.arrays["token_ids"][at : at + length].copy()
            at += length
            responses = self._group(number, epoch, index).responses
            episode = responses[sample].episode
            if responses[sample].tokens != start or (episode.is_waiting, episode.restarts) != (True, attempt):
                continue
            responses[sample] = given(responses[sample], Answer(ids, **said))

    def _on_restarted(self, record: Record) -> None:
        group, sample = self.open.get(record.fields["number"]), record.fields["sample"]
        if group is None:
            return
        self.tokens["dropped_restarted"] += group.responses[sample].sampled_tokens
        group.responses[sample] = restarted(group.responses[sample])

    def _on_judged(self, record: Record) -> None:
        group = self.open.get(record.fields["number"])
        if group is None or not group.is_complete:
            return
        rewards, failures = record.fields["rewards"], record.fields["failures"]
        lengths_B = [[item.tokens for item in response.tree.branches] for response in group.responses]
        taught = record.arrays.get(TEACHER_LOG_PROBS)
        columns = [None] * len(rewards) if taught is None else _split(taught, lengths_B)
        named = record.fields.get("named") or [{}] * len(rewards)
        scored = [
            (response, reward, column, each)
            for response, reward, column, each in zip(group.responses, rewards, columns, named, strict=True)
            if reward is not None
        ]
        rollouts = tuple(item for response, *rest in scored for item in response.rollouts(*rest))
        tokens = sum(response.sampled_tokens for response, *_ in scored)
        if left_out := group.tokens - tokens:
            self.tokens["dropped_failed"] += left_out
        source = self._prompts[group.index].source
        episodes = [summary(one) for one in group.responses] if self._is_in_environment(source) else ()
        summary_of_group = GroupSummary(
            group.number,
            rewards,
            [response.sampled_tokens for response in group.responses],
            [str(response.finish_reason) for response in group.responses],
            failures,
            source,
            episodes,
            record.fields.get("scores", ()),
        )
        self.scored.append(summary_of_group)
        del self.open[group.number]
        self.finished[group.number] = FinishedGroup(
            group.number,
            group.epoch,
            group.index,
            Group(self._prompts[group.index], rollouts),
            tokens,
            min((version for response, *_ in scored for version in response.tokens_by_version), default=0),
            summary_of_group,
        )

    def _on_dropped(self, record: Record) -> None:
        number, reason = record.fields["number"], record.fields["reason"]
        if (group := self._take(number)) is not None:
            self.tokens[f"dropped_{reason}"] += group.tokens
            self.dropped[reason] += 1

    def _on_batch(self, record: Record) -> None:
        step = record.fields["step"]
        for number in record.fields["groups"]:
            if (group := self._take(number)) is not None:
                self.tokens["trained"] += group.tokens
                self._trained[step] = self._trained.get(step, 0) + group.tokens
        self._pass_over(step)
        self.unrecorded.discard(step)
        self.served = max(self.served, step)
        self.scored.clear()
        self.dropped.clear()

    def _on_rewind(self, record: Record) -> None:
        self.served = min(self.served, record.fields["step"])
        for step in [step for step in self._trained if step > self.served]:
            lost = self._trained.pop(step)
            self.tokens["trained"] -= lost
            self.tokens["dropped_lost"] += lost

    def _pass_over(self, step: int) -> None:
        """Mark steps between ``served`` and ``step`` as unrecorded."""
        self.unrecorded.update(range(self.served + 1, step))

    def _on_weights(self, record: Record) -> None:
        version, step = record.fields["version"], record.fields["step"]
        self._step_of[version] = self.weights_step = step
        self._first_step_of[version] = min(step, self._first_step_of.get(version, step))
        self._newest = max(self._newest, version)
        self._version = version

    def _is_in_environment(self, source: str) -> bool:
        named = self._identity.get(ENVIRONMENT)
        return (named.get(source) if isinstance(named, dict) else named) is not None

    def _group(self, number: int, epoch: int, index: int) -> OpenGroup:
        """Return the open group ``number``; open it if its own record was damaged."""
        if number not in self.open:
            responses = [Response() for _ in range(self._group_size)]
            self.open[number] = OpenGroup(number, epoch, index, responses, self.weights_step)
            self.next_number = max(self.next_number, number + 1)
        return self.open[number]

    def _take(self, number: int) -> OpenGroup | FinishedGroup | None:
        return self.open.pop(number, None) or self.finished.pop(number, None)


def _split(values: np.ndarray, lengths_B: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
    """Split end-to-end values into a list of branches for each response."""
    ends = np.cumsum([length for row in lengths_B for length in row])
    parts = iter(np.split(values, ends[:-1]))
    return [[next(parts) for _ in row] for row in lengths_B]
