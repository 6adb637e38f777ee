"""The rules of a journal, held against its bytes by a state machine that shares nothing with the package's.

Every record is checked when it is read: what it changes, and that it was allowed at that moment. Groups are
numbered in the order in which they begin. A *place* is (epoch, index of the prompt). ``step`` s starts from
the weights that step s - 1 has made; the lag of a token is s - 1 less the last step that made its version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.config import RolloutConfig
from bapo_megatron.types import Prompt
from tests.support.raw_journal import RawGroup, RawRecord, read_log, read_step_file

GIVEN = -1
"""The version of tokens that an environment gave."""

NEW_BEGINNINGS = 3
"""Times that a stale prompt is sampled once more before it may be given up."""


@dataclass
class Exchange:
    """A turn of a model, and the answer of its environment."""

    turn_ids: list[int]
    said: dict[str, Any] | None = None
    """None where it has not answered yet."""
    given_ids: list[int] = field(default_factory=list)


@dataclass
class _Response:
    ids: list[int] = field(default_factory=list)
    log_probs: list[bytes] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str | None = None
    returns: int = 0
    """``Audit.returns`` when its last segment came."""
    waits: bool = False
    """Its environment is to answer."""
    turn_start: int = 0
    """Tokens before its last turn."""
    attempt: int = 0
    path: list[int] = field(default_factory=list)
    """The places, among all tokens, of those of the branch that continues."""
    paths: list[list[int]] = field(default_factory=list)
    """The branch at the end of each turn, sampled or given."""

    @property
    def branches(self) -> list[tuple[list[int], list[bool]]]:
        """Each path that no other begins with, and which of its tokens were sampled in it first."""
        known: set[int] = set()
        found = []
        whole = [*self.paths, self.path]
        for path in [one for n, one in enumerate(whole) if one and one not in whole[:n]]:
            if any(len(path) < len(other) and path == other[: len(path)] for other in whole):
                continue
            found.append((path, [self.versions[one] != GIVEN and one not in known for one in path]))
            known.update(path)
        return found

    @property
    def sampled(self) -> list[int]:
        """The versions of the tokens that no environment gave."""
        return [version for version in self.versions if version != GIVEN]


@dataclass
class _Group:
    place: tuple[int, int]
    responses: list[_Response]
    begun_after: int
    """The step whose weights were the last to come before it was begun."""
    rewards: list[float | None] | None = None
    """None for a response that is left out."""
    end: str | None = None
    """``trained``, or why it was dropped."""

    @property
    def tokens(self) -> int:
        return sum(len(response.sampled) for response in self.kept)

    @property
    def kept(self) -> list[_Response]:
        """The responses that are not left out."""
        if self.rewards is None:
            return self.responses
        return [one for one, reward in zip(self.responses, self.rewards, strict=True) if reward is not None]

    @property
    def is_uniform(self) -> bool:
        return self.rewards is not None and len({*self.rewards} - {None}) <= 1


class Audit:
    """A state machine over a journal's records; AssertionError at the first record that breaks a rule."""

    def __init__(
        self, config: RolloutConfig, prompts: Sequence[Prompt], journal: Path, cut_steps: bool = False
    ) -> None:
        """``cut_steps``: the run was continued within steps, with weights of some of their updates."""
        self.config, self.prompts, self.journal, self.cut_steps = config, prompts, journal, cut_steps
        self.groups: list[_Group] = []
        self.begun: dict[tuple[int, int], list[int]] = {}
        """Groups that were begun at each place."""
        self.taken = self.served = self.weights_step = 0
        self.versions_of: dict[int, list[int]] = {}
        """The version that each step has made, and those within the next that a run was continued with."""
        self.last_step_of: dict[int, int] = {}
        """The step that brought each version when it came last."""
        self.returns = 0
        """How often weights came that had been there before: a trainer or a sampler has begun again."""
        self.tokens: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        """Groups, since the last step was given its own."""
        self.episodes: dict[str, list[Exchange]] = {}
        """All turns that ended, and the answers to them, by the episode's name: group, sample, attempt."""
        self._new: set[int] = set()
        """Groups that were scored in the present commit: a step in it was chosen without them."""

    @property
    def live(self) -> dict[int, _Group]:
        """Groups in the making or waiting."""
        return {number: group for number, group in enumerate(self.groups) if group.end is None}

    def read(self, record: RawRecord) -> None:
        """Check a record and take note of it."""
        getattr(self, f"_{record.kind}")(record.fields, record.arrays)
        if record.is_last:
            self._new.clear()

    def finish(self) -> None:
        """What must hold when the last record was read."""
        steps = sorted(int(path.stem[5:]) for path in self.journal.glob("step_*.npz"))
        assert steps == list(range(1, len(steps) + 1))
        for step in steps[self.served :]:  # killed between the step's file and the record of it
            groups, _ = read_step_file(self.journal / f"step_{step:06d}.npz")
            self._batch({"step": step, "groups": [group.number for group in groups]}, {})
        assert self.served == len(steps)
        self._check_places()

    def totals(self) -> Counter[str]:
        """Tokens by what became of them."""
        kept = sum(group.tokens for group in self.live.values())
        dropped = sum(count for kind, count in self.tokens.items() if kind.startswith("dropped_"))
        return Counter({**self.tokens, "dropped": dropped, "kept": kept})

    # --- records ---

    def _state(self, fields: dict[str, Any], _arrays: dict[str, np.ndarray]) -> None:
        """The beginning of a file repeats what the files before it said."""
        ours = (len(self.groups), self.taken, self.served, self.weights_step)
        assert tuple(fields[name] for name in ("next_number", "taken", "served", "weights_step")) == ours
        assert +Counter(fields["tokens"]) == +self.tokens
        assert +Counter(fields["dropped"]) == +self.dropped
        assert dict(fields["step_of"]) == self.last_step_of
        self._check_places()

    def _open(self, fields: dict[str, Any], _arrays: dict[str, np.ndarray]) -> None:
        opened, before = fields["groups"], self.taken
        begins_again = fields["taken"] is None
        if not begins_again:
            self.taken = fields["taken"]
            assert self.taken == before + len(opened)
        for number, epoch, index in opened:
            assert number == len(self.groups), "groups are numbered in order"
            groups = self.begun.setdefault((epoch, index), [])
            if begins_again:
                assert self.config.on_stale == "resample"
                assert self.groups[groups[-1]].end == "stale", "only what was too old begins again"
            else:
                assert not groups, "a place is taken once"
                assert epoch == (before + number - opened[0][0]) // len(self.prompts)
                assert 0 <= index < len(self.prompts)
            groups.append(number)
            responses = [_Response() for _ in range(self.config.group_size)]
            self.groups.append(_Group((epoch, index), responses, self.weights_step))
        if not begins_again:
            assert len(self.live) <= self._most_groups()

    def _most_groups(self) -> int:
        config = self.config
        steps = config.max_staleness + 1 + self.weights_step - self.served
        replaced = int(round((config.max_oversampling - 1) * config.prompts_per_step, 6))
        return steps * config.prompts_per_step - max(0, self.dropped["uniform"] - replaced)

    def _segments(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        at = 0
        for number, epoch, index, sample, start, length, reason in fields["parts"]:
            group, end = self.groups[number], at + length
            response = group.responses[sample]
            assert group.place == (epoch, index)
            assert group.end is None, "a segment of a group that is gone"
            assert response.reason is None, "a segment after the end"
            assert not response.waits, "a segment before the environment has answered"
            assert start == len(response.ids), "a segment elsewhere than at the end of the last"
            assert 1 <= length <= (self.config.segment_tokens or length)
            versions = arrays["versions"][at:end].tolist()
            assert versions == sorted(versions)
            if response.sampled and versions[0] < response.sampled[-1]:
                assert self.returns > response.returns, "older weights than before"
            response.path += range(len(response.ids), len(response.ids) + length)
            response.ids += arrays["token_ids"][at:end].tolist()
            response.log_probs += [one.tobytes() for one in arrays["log_probs"][at:end]]
            response.versions += versions
            response.waits, response.returns = reason == "turn", self.returns
            response.reason = None if response.waits else reason
            if response.waits:
                response.paths.append([*response.path])
                self._exchanges(number, sample).append(Exchange(response.ids[response.turn_start :]))
            self._check_length(response)
            self._check_budget(group, response)
            at = end
        self.tokens["sampled"] += at
        assert all(len(array) == at for array in arrays.values())

    def _given(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Answers of environments: they follow a turn, and end the response or give it tokens."""
        at = 0
        for number, epoch, index, sample, start, attempt, length, said in fields["parts"]:
            group, end = self.groups[number], at + length
            response = group.responses[sample]
            assert group.place == (epoch, index)
            assert group.end is None, "an answer in a group that is gone"
            assert response.waits, "an answer to no turn"
            assert (start, attempt) == (len(response.ids), response.attempt)
            exchange = self._exchanges(number, sample)[-1]
            exchange.said, exchange.given_ids = said, arrays["token_ids"][at:end].tolist()
            if (after := said.get("after")) is not None:
                response.path = [*response.paths[after]] if after >= 0 else []
            response.path += range(len(response.ids), len(response.ids) + length)
            if length:
                response.paths.append([*response.path])
            response.ids += arrays["token_ids"][at:end].tolist()
            response.log_probs += [np.float32(0).tobytes()] * length
            response.versions += [GIVEN] * length
            response.turn_start = len(response.ids)
            response.waits, response.reason = False, said["finish_reason"]
            assert (response.reason is None) == (length > 0), "it continues with tokens, and ends without"
            assert response.reason in (None, "stop", "length", "turns", "failed")
            assert (response.reason == "failed") == (said["failure"] is not None)
            assert len(response.path) < self.config.max_response_tokens or not length
            at = end

    def _exchanges(self, number: int, sample: int) -> list[Exchange]:
        attempt = self.groups[number].responses[sample].attempt
        return self.episodes.setdefault(f"{number}-{sample}-{attempt}", [])

    def _restarted(self, fields: dict[str, Any], _arrays: dict[str, np.ndarray]) -> None:
        group = self.groups[fields["number"]]
        response = group.responses[fields["sample"]]
        assert group.end is None
        assert response.waits, "only a step of an environment makes a response begin again"
        self.tokens["dropped_restarted"] += len(response.sampled)
        group.responses[fields["sample"]] = _Response(attempt=response.attempt + 1)

    def _check_length(self, response: _Response) -> None:
        longest = self.config.max_response_tokens
        assert len(response.path) <= longest
        assert response.reason in (None, "stop", "length")
        assert response.reason != "length" or len(response.path) == longest

    def _check_budget(self, group: _Group, response: _Response) -> None:
        """One budget for each step that had these weights, from the group's beginning on."""
        if (budget := self.config.budget_tokens) is None:
            return
        first = min(group.begun_after, self.weights_step)
        for version, spent in Counter(response.sampled).items():
            steps = sum(version in made for step, made in self.versions_of.items() if step >= first)
            steps = max(1, steps)  # they may be on their way
            assert spent <= budget * steps, f"{spent} tokens of version {version}, of {steps} steps"

    def _judged(self, fields: dict[str, Any], _arrays: dict[str, np.ndarray]) -> None:
        group = self.groups[fields["number"]]
        assert group.end is None
        assert group.rewards is None, "scored twice"
        assert all(response.reason for response in group.responses)
        assert len(fields["rewards"]) == len(group.responses)
        before = group.tokens
        group.rewards = fields["rewards"]
        if left_out := before - group.tokens:
            self.tokens["dropped_failed"] += left_out
        self._new.add(fields["number"])

    def _dropped(self, fields: dict[str, Any], _arrays: dict[str, np.ndarray]) -> None:
        group, reason = self.groups[fields["number"]], fields["reason"]
        assert group.end is None, f"dropped as {reason} after it was {group.end}"
        if reason == "uniform":
            assert self.config.drop_uniform_groups
            assert group.is_uniform
        elif reason == "stale":
            assert self.config.on_stale != "train"
            assert self._lag(group, max(self.served, self.weights_step) + 1) > self.config.max_staleness
        elif reason == "failed":
            assert len(group.kept) < 2
        else:
            assert reason == "refused"
        group.end = reason
        self.tokens[f"dropped_{reason}"] += group.tokens
        self.dropped[reason] += 1

    def _weights(self, fields: dict[str, Any], _arrays: dict[str, np.ndarray]) -> None:
        step, version = fields["step"], fields["version"]
        assert step <= self.served, "weights of a step that has no groups yet"
        known = self.versions_of.setdefault(step, [])
        if version not in known:
            assert not known or self.cut_steps, "a step has made two versions"
            assert all(version > one for one in known), "a step has gone back"
            known.append(version)
        self.returns += step <= self.weights_step
        self.last_step_of[version] = step
        self.weights_step = step

    def _batch(self, fields: dict[str, Any], _arrays: dict[str, np.ndarray]) -> None:
        step, numbers = fields["step"], fields["groups"]
        assert step == self.served + 1
        groups, metrics = read_step_file(self.journal / f"step_{step:06d}.npz")
        assert [group.number for group in groups] == numbers
        waiting = [number for number, group in self.live.items() if group.rewards and number not in self._new]
        fit = [number for number in waiting if not self._is_too_old(self.groups[number], step)]
        assert numbers == fit[: self.config.prompts_per_step], "not those that were begun first"
        for stored in groups:
            group = self.groups[stored.number]
            assert not (self.config.drop_uniform_groups and group.is_uniform)
            self._check_file(group, stored)
            group.end = "trained"
            self.tokens["trained"] += group.tokens
        used = {version for group in groups for one in group.responses for version in one.versions.tolist()}
        assert used - {GIVEN} <= self._versions
        self._check_metrics(metrics)
        self.served = step
        self.dropped.clear()

    # --- rules ---

    @property
    def _versions(self) -> set[int]:
        """All that engines were given."""
        return {version for made in self.versions_of.values() for version in made}

    def _made(self, version: int, before: int | None = None) -> int:
        """The last step, of those before ``before``, that made this version; ``before`` if none did."""
        steps = [step for step, made in self.versions_of.items() if version in made]
        fit = [step for step in steps if before is None or step < before]
        return max(fit) if fit or before is None else before

    def _lag(self, group: _Group, step: int) -> int:
        versions = {version for response in group.kept for version in response.sampled}
        return max((step - 1 - self._made(version, step) for version in versions), default=0)

    def _is_too_old(self, group: _Group, step: int) -> bool:
        return self.config.on_stale != "train" and self._lag(group, step) > self.config.max_staleness

    def _check_file(self, group: _Group, stored: RawGroup) -> None:
        """The file holds what the log says, bit for bit."""
        prompt = self.prompts[group.place[1]]
        assert stored.prompt_id == prompt.prompt_id
        assert np.array_equal(stored.prompt_ids, prompt.token_ids_P)
        rewards = [one for one in group.rewards or [] if one is not None]
        rows = [
            (ours, reward, *branch)
            for ours, reward in zip(group.kept, rewards, strict=True)
            for branch in ours.branches or [([], [])]
        ]
        for (ours, reward, path, is_first), theirs in zip(rows, stored.responses, strict=True):
            assert theirs.reward == reward
            assert theirs.token_ids.tolist() == [ours.ids[one] for one in path]
            assert theirs.log_probs.tobytes() == b"".join(ours.log_probs[one] for one in path)
            assert theirs.versions.tolist() == [ours.versions[one] for one in path]
            assert theirs.is_sampled.tolist() == is_first
            assert theirs.finish_reason == (ours.reason if path == ours.path else "stop")

    def _check_metrics(self, metrics: dict[str, Any]) -> None:
        """The step's metrics agree with the audit. More may have been sampled while its file was written."""
        stored = {
            name: metrics[f"sampler/tokens_{name}"] for name in ("sampled", "trained", "dropped", "kept")
        }
        assert stored["sampled"] == stored["trained"] + stored["dropped"] + stored["kept"]
        assert stored["trained"] == self.tokens["trained"]
        assert stored["sampled"] <= self.tokens["sampled"]
        assert stored["dropped"] <= self.totals()["dropped"]

    def _check_places(self) -> None:
        """Every place below the cursor was begun, and none was forgotten because it was too old."""
        epochs = Counter(epoch for epoch, _ in self.begun)
        whole, rest = divmod(self.taken, len(self.prompts))
        expected = {**dict.fromkeys(range(whole), len(self.prompts)), **({whole: rest} if rest else {})}
        assert epochs == expected
        if self.config.on_stale == "resample":
            for groups in self.begun.values():
                assert self.groups[groups[-1]].end != "stale" or len(groups) > NEW_BEGINNINGS


def audit(
    logs: Path, journal: Path, config: RolloutConfig, prompts: Sequence[Prompt], cut_steps: bool = False
) -> Audit:
    """Hold a journal to its rules. ``logs``: a folder with all of its logs, also those it has deleted."""
    found = Audit(config, prompts, journal, cut_steps)
    paths = sorted(logs.glob("segments-*.log"))
    numbers = [int(path.stem[9:]) for path in paths]
    assert numbers == list(range(1, len(paths) + 1)), f"a log is missing: there are {numbers}"
    for path in paths:
        for record in read_log(path):
            try:
                found.read(record)
            except AssertionError as error:
                raise AssertionError(f"{path.name}: {record.kind} {record.fields}: {error}") from error
    found.finish()
    totals = found.totals()
    assert totals["sampled"] == totals["trained"] + totals["dropped"] + totals["kept"], totals
    return found
