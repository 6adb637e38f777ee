"""Configuration of masks and added loss terms: the entries of ``algorithm.masks`` and ``algorithm.terms``.

Both fields have the type ``Parts``: in a recipe a tuple of ``PartConfig``, as a flag a JSON list (ValueError
if malformed). ``part_problems`` yields their errors. ``algo/parts.py`` has the registered names.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from bapo_megatron.algo.parts import ADVANTAGES, MASKS, TERMS, part_path
from bapo_megatron.config.flags import Settings, json_flag
from bapo_megatron.errors import ConfigError


@dataclass(frozen=True)
class PartConfig:
    """Choice of a mask or added loss term: the name or path of its function, and the function's settings."""

    name: str
    """A registered name, or your own `package.module:function`."""
    settings: Settings = field(default_factory=dict)
    """Arguments of the function by name."""

    @property
    def label(self) -> str:
        """Name in metrics: that of the function."""
        return self.name.rpartition(":")[2]


def _part(value: Any) -> PartConfig:
    return PartConfig(value) if isinstance(value, str) else PartConfig(**value)


def _is_parts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_part, value))


def _is_part(value: object) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, dict) and "name" in value and not value.keys() - {"name", "settings"}


Parts = Annotated[
    tuple[PartConfig, ...],
    json_flag(
        tuple,
        'list of names: write ["cut_responses", {"name": "icepop", "settings": {"high": 2}}]',
        _is_parts,
        lambda found: tuple(map(_part, found)),
        lambda parts: json.dumps([dataclasses.asdict(one) for one in parts]),
    ),
]
"""Parts: a tuple in a recipe, a JSON list as a flag."""


def part_problems(algorithm: Any) -> Iterator[str]:
    """Yield the errors of an ``AlgorithmConfig``'s advantage, masks and terms: an unknown name, or one that
    occurs twice in a list. Also of ``reference_kl.unbiased`` without a KL term in the loss."""
    if (reference := algorithm.reference_kl).unbiased and not reference.in_loss:
        now = f"not place={reference.place} with coefficient={reference.coefficient:g}"
        yield f"algorithm.reference_kl.unbiased=true needs place=loss and a coefficient, {now}"
    named = [("algorithm.advantage", algorithm.advantage, ADVANTAGES)]
    lists = {"algorithm.masks": (algorithm.masks, MASKS), "algorithm.terms": (algorithm.terms, TERMS)}
    for field_name, (parts, known) in lists.items():
        named += [(f"{field_name}[{number}]", part.name, known) for number, part in enumerate(parts)]
        for label, count in Counter(part.label for part in parts).items():
            if count > 1:
                yield f"{field_name}: {count} are called {label}, and so are their metrics: rename one"
    for owner, name, known in named:
        try:
            part_path(owner, name, known)
        except ConfigError as error:
            yield str(error)
