"""Methods and staleness settings that a study compares, each as the flags of `bapo train` that make it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from bapo_megatron.algo.bounds import (
    BoundsConfig,
    balanced,
    clip_higher,
    grpo,
    paper,
    published_code,
)
from bapo_megatron.config import RunConfig
from bapo_megatron.errors import ConfigError

_SAMPLING_UPDATES = 4
_SEGMENTS = 4
BASELINE = "grpo"
BAPO = ("paper", "balanced", "balanced_half", "published_code")
"""The presets of BAPO, readings of one method, and one of them with another target."""


@dataclass(frozen=True)
class Method:
    """A method: clipping bounds, advantages and PAPO."""

    name: str
    bounds: BoundsConfig
    detail: str = ""
    polarity: bool = False
    """PAPO's weights on top."""

    @property
    def label(self) -> str:
        """Name of the method in a legend."""
        return f"{self.name}, {self.detail}"

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that make it: all fields of the bounds, so that the recipe's own do not matter."""
        fields = dataclasses.asdict(self.bounds).items()
        bounds = (f"--algorithm.bounds.{name.replace('_', '-')}={value}" for name, value in fields)
        return (*bounds, "--algorithm.polarity." + ("enabled" if self.polarity else "no-enabled"))


METHODS = {
    "grpo": Method("GRPO", grpo(), "ratios in 0.8 to 1.2"),
    "clip_higher": Method("clip-higher", clip_higher(), "ratios in 0.8 to 1.28"),
    "paper": Method("BAPO", paper(), "preset `paper`"),
    "balanced": Method("BAPO", balanced(), "preset `balanced`"),
    "balanced_half": Method(
        "BAPO", dataclasses.replace(balanced(), target=0.5), "preset `balanced` with a target of 0.5"
    ),
    "published_code": Method("BAPO", published_code(), "preset `published_code`"),
    "papo_grpo": Method("PAPO", grpo(), "on GRPO's bounds", polarity=True),
    "papo": Method("PAPO", balanced(), "on BAPO's `balanced`", polarity=True),
}


@dataclass(frozen=True)
class StalenessSetting:
    """A source and degree of staleness: reuse, partial rollout, or smaller steps."""

    label: str
    epochs: int = 1
    """Passes over each batch."""
    updates: int = 1
    """Optimizer updates in each pass."""
    in_segments: bool = False
    """Partial rollout: a response continues under newer weights."""
    split: int = 1
    """The batch is cut into so many steps of their own: fresh samples for each update."""

    @property
    def oldest(self) -> int:
        """Updates between sampling and training of the oldest token that reuse alone makes."""
        return self.epochs * self.updates - 1

    def steps(self, steps: int) -> int:
        """Steps of an arm in a study of ``steps``. The split setting makes as many updates as `stale_7`."""
        matched = SETTINGS["stale_7"]
        return steps * matched.epochs * matched.updates if self.split > 1 else steps

    def work(self, steps: int) -> float:
        """Rough duration of an arm of so many steps: sampling takes as long as a few updates."""
        return steps * (_SAMPLING_UPDATES + self.epochs * self.updates)

    def flags(self, base: RunConfig) -> tuple[str, ...]:
        """The flags that make it. ConfigError if the recipe's batch cannot be split so."""
        prompts, rest = divmod(base.rollout.prompts_per_step, self.split)
        if rest or not prompts:
            raise ConfigError(
                f"rollout.prompts_per_step={base.rollout.prompts_per_step} cannot be split into "
                f"{self.split} equal parts, as the setting `fresh_matched` needs; choose a multiple of "
                f"{self.split}, or leave the setting out"
            )
        flags = (
            f"--rollout.prompts-per-step={prompts}",
            f"--algorithm.reuse-epochs={self.epochs}",
            f"--algorithm.updates-per-epoch={self.updates}",
        )
        return (*flags, *_segment_flags(base)) if self.in_segments else flags


def _segment_flags(base: RunConfig) -> tuple[str, ...]:
    """A quarter of the longest response under one version, and as old as the longest then becomes. Sampling
    and training take turns, so that an arm has one outcome."""
    longest = base.rollout.max_response_tokens
    budget = -(-longest // _SEGMENTS)
    return (
        f"--rollout.max-staleness={-(-longest // budget) - 1}",
        f"--rollout.budget-tokens={budget}",
        f"--rollout.segment-tokens={budget}",
        "--rollout.no-overlap",
    )


SETTINGS = {
    "fresh": StalenessSetting("on-policy"),
    "stale_3": StalenessSetting("up to 3 updates stale", 2, 2),
    "stale_7": StalenessSetting("up to 7 updates stale", 2, 4),
    "stale_15": StalenessSetting("up to 15 updates stale", 4, 4),
    "partial": StalenessSetting("partial rollout, and reuse up to 3", 2, 2, in_segments=True),
    "fresh_matched": StalenessSetting("on-policy, as many updates as `stale_7`", split=4),
}
REUSE = ("fresh", "stale_3", "stale_7", "stale_15")
"""Settings of rising staleness by reuse."""
STALE = ("stale_3", "stale_7", "stale_15")
MATCHED = "fresh_matched"


def is_run(method: str, setting: str) -> bool:
    """Whether the pair of method and setting needs a run of its own.

    On-policy every ratio is 1 and no bound clips anything, so methods that differ by their bounds make the
    same updates: GRPO's run stands for them. The matched run is a control of the baseline alone.
    """
    if setting == MATCHED:
        return method == BASELINE
    return setting != "fresh" or method == BASELINE or METHODS[method].polarity


def stand_in(method: str, setting: str) -> str:
    """The method whose run says what ``method`` does in ``setting``."""
    return BASELINE if setting == "fresh" and not is_run(method, setting) else method
