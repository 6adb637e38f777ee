"""The rules of supply: how many groups may be in the making, and which responses may be sampled now.

With S = ``max_staleness`` and B = ``prompts_per_step``: when the weights of step w are at the engines and
the groups of step p were given out, at most (S + 1 + w - p) B groups may wait or be in the making. While the
policy trains, p = w + 1: S B groups; when it waits for groups, p = w: (S + 1) B. So no group is begun that
would have to wait longer than S steps, and S = 0 samples nothing during training. (AReaL bounds staleness in
the same way, arXiv 2505.24298, with samples for groups.)
"""

from __future__ import annotations

from bapo_megatron.config import RolloutConfig
from bapo_megatron.rollout.sampler.state import Finished, OpenGroup, SamplerState


class AdmissionController:
    """The rules, applied to a book. ``reached``: the last step whose groups the trainer has."""

    def __init__(self, config: RolloutConfig, sampler_state: SamplerState) -> None:
        self._config = config
        self._state = sampler_state
        self.reached = 0
        self.is_open = False
        """Nothing is sampled before this process has brought weights to the engines: the book may know newer
        ones, of a trainer that was killed and goes on from an older checkpoint."""

    @property
    def _ahead(self) -> int:
        """Steps that sampling may still be ahead of the weights."""
        given = max(self.reached, self._state.served)  # while old steps are given again, new ones must wait
        return self._config.max_staleness + self._state.weights_step - given

    @property
    def may_sample(self) -> bool:
        """Whether any token may be sampled now."""
        if not self.is_open:
            return False
        if not self._config.overlap and self.reached != self._state.weights_step:
            return False
        return self._ahead >= 0

    @property
    def room(self) -> int:
        """Groups that may be begun now."""
        if not self.may_sample:
            return 0
        replaced = (self._config.max_oversampling - 1) * self._config.prompts_per_step
        beyond = max(0, self._state.dropped["uniform"] - int(replaced))
        most = (self._ahead + 1) * self._config.prompts_per_step
        return max(0, most - beyond - self._state.outstanding)

    def allowance(self, group: OpenGroup, sample: int) -> int:
        """Tokens that a response may be asked for in one request, now; 0 if it is whole or must wait."""
        config, response = self._config, group.responses[sample]
        if response.finish_reason:
            return 0
        left = config.max_response_tokens - response.tokens
        if config.segment_tokens is not None:
            left = min(left, config.segment_tokens)
        if config.budget_tokens is not None:
            left = min(left, self._state.unspent(group, sample, config.budget_tokens))
        return max(0, left)

    def is_stale(self, group: OpenGroup | Finished, step: int) -> bool:
        """Whether the group is too old for ``step``."""
        return self._state.lag(group.oldest_version, step) > self._config.max_staleness
