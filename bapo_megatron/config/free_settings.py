"""Type of free-form settings: a dict in a recipe, a JSON object as a flag.

Used in this folder and ``evaluation/``.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec


def _json_object(words: list[str]) -> dict[str, Any]:
    """The value of a flag that takes a JSON object. ValueError if it is something else."""
    try:
        found = json.loads(words[0])
    except ValueError:  # the decoder's message names neither the value nor the form
        found = None
    if not isinstance(found, dict):
        raise ValueError(f'{words[0]} is no JSON object: write {{"name": value}}')
    return found


Settings = Annotated[
    dict[str, Any],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=_json_object,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]
"""Free-form settings of a loss, a reward or an environment."""
