"""Admission control (back-pressure of staleness): how many groups may be outstanding, and which may sample.

    outstanding groups <= (S + 1 + w - p) B      S = max_staleness, B = prompts_per_step

w: step of the engines' weights; p: last step whose groups the trainer has; outstanding: sampled, scored, or
waiting for their step. While the policy trains, p = w + 1: S B groups; when it waits for groups, p = w:
(S + 1) B. So no group is opened that would have to wait for more than S steps, and S = 0 samples nothing
during training. (AReaL bounds staleness in the same way, arXiv 2505.24298, with samples for groups.)

Used in this folder.
"""

from __future__ import annotations

from bapo_megatron.config import RolloutConfig
from bapo_megatron.rollout.sampler.event_log.state import FinishedGroup, OpenGroup, SamplerState


class AdmissionController:
    """The admission rules over the sampler's state. Nothing may be sampled before ``open``.

    Synchronous. The loop asks it before it opens groups, the dispatcher before it sends a request. Made by
    ``GroupSampler``.
    """

    def __init__(self, config: RolloutConfig, sampler_state: SamplerState) -> None:
        self._config = config
        self._state = sampler_state
        self._trainer_step = 0
        """The last step whose groups the trainer has."""
        self._asked_step = 0
        self._is_open = False

    def open(self) -> None:
        """Admit requests from now on: this process has loaded weights into the engines.

        The state alone does not tell: it may know newer weights, of a trainer that was killed and resumed
        from an older checkpoint.
        """
        self._is_open = True

    def trainer_has(self, step: int) -> None:
        """Note that the trainer has the groups of ``step``, and none of later steps."""
        self._trainer_step = step

    def trainer_asks(self, step: int) -> None:
        """Note that the trainer asks for the groups of ``step``."""
        self._asked_step = step

    @property
    def is_asked(self) -> bool:
        """Whether the trainer has asked for groups that it was not given yet."""
        return self._asked_step > self._trainer_step

    @property
    def trainer_waits(self) -> bool:
        """Whether the trainer waits for the groups of its next step."""
        return self._trainer_step == self._state.weights_step

    @property
    def _steps_ahead(self) -> int:
        """Steps by which sampling may still run ahead of the weights; negative if it may not sample."""
        given = max(self._trainer_step, self._state.served)  # served is ahead while old steps are replayed
        return self._config.max_staleness + self._state.weights_step - given

    @property
    def may_sample(self) -> bool:
        """Whether any token may be sampled now."""
        return self._is_open and (self._config.overlap or self.trainer_waits) and self._steps_ahead >= 0

    @property
    def room(self) -> int:
        """Number of groups that may be opened now."""
        if not self.may_sample:
            return 0
        replaced = (self._config.max_oversampling - 1) * self._config.prompts_per_step
        beyond = max(0, self._state.dropped["uniform"] - int(replaced))
        most = (self._steps_ahead + 1) * self._config.prompts_per_step
        return max(0, most - beyond - self._state.outstanding)

    def budget(self, group: OpenGroup, sample: int) -> int | None:
        """Most tokens that a response may still have from the current weights; None: any number."""
        budget = self._config.budget_tokens
        return None if budget is None else self._state.remaining_budget(group, sample, budget)

    def is_stale(self, group: OpenGroup | FinishedGroup, step: int) -> bool:
        """Whether the group's lag at ``step`` is more than ``max_staleness``."""
        return self._state.lag(group.oldest_version, step) > self._config.max_staleness

    def must_drop(self, group: OpenGroup | FinishedGroup, step: int) -> bool:
        """Whether the group is stale at ``step``, and ``on_stale`` does not train on stale groups."""
        return self._config.on_stale != "train" and self.is_stale(group, step)
