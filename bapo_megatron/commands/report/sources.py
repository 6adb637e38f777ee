"""Table of a report by source of training data: prompts, reward, length, entropy, gradient share, clipping.

Its cells are text, from the run's metrics named ``source/NAME/...``. Used by ``page.py``.
"""

from __future__ import annotations

from bapo_megatron.commands.report.data import RunRecord, known_values, mean
from bapo_megatron.commands.report.text import number, percent

SOURCE_COLUMNS = (
    *("prompts", "trained on", "reward", "length", "entropy", "tokens", "gradient"),
    *("contribution", "without bounds", "clipped high", "clipped low"),
)


def source_cells(run: RunRecord, window: int) -> list[tuple[str, list[str]]]:
    """The rows of the table, ``SOURCE_COLUMNS`` behind each source's name; none for a run of one file."""
    first = "source/"
    names = dict.fromkeys(
        name.removeprefix(first).removesuffix("/rollout/groups")
        for row in run.steps
        for name in row
        if name.startswith(first) and name.endswith("/rollout/groups")
    )
    return [(name, _cells(run, f"{first}{name}/", window)) for name in names]


def _cells(run: RunRecord, prefix: str, window: int) -> list[str]:
    def values(name: str) -> list[float]:
        return known_values(run.steps, prefix + name)

    rewards = values("reward/mean")
    return [
        *(f"{sum(values(f'rollout/{name}')):,.0f}" for name in ("groups_sampled", "groups")),
        f"{number(mean(rewards[:window]))} → {number(mean(rewards[-window:]))}",
        *(number(mean(values(name))) for name in ("rollout/length_mean", "policy/entropy")),
        *(percent(mean(values(name))) for name in ("token_share", "gradient_share")),
        *(percent(mean(values(f"bapo/contribution{end}"))) for end in ("", "_unclipped")),
        *(percent(mean(values(f"bapo/clip_fraction_{bound}"))) for bound in ("high", "low")),
    ]
