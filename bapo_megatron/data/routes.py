"""Routes (the experts that the engine chose for each token): their check, and the files of a step's routes.

    RUN/journal/step_000001.routes.npy      uint8 (uint16 if experts need it) [tokens of the step, layers, K]

With ``rollout.route_replay`` the sampler writes this file (``write_routes``) beside each step file, which
stores its CRCs, one per response; K is the number of experts per token. On each rank, ``read_routes``
memory-maps it and returns one response's rows, checked by CRC. ``route_problem`` checks those of an engine.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.storage import FailingDiskError
from bapo_megatron.types import RouteShape, StoredRoutes

WAIT_S = 60.0
"""Longest wait for a file from another machine, seconds: a shared file system may show it late."""

_BLOCK = 1 << 16
"""Rows checked at a time, to fit a processor's cache."""


def unknown_expert(dtype: np.dtype[Any] | type[np.unsignedinteger[Any]]) -> int:
    """Return the number that fills the row of an unknown route: the dtype's largest. A token's route is known
    in all layers or in none."""
    return int(np.iinfo(np.dtype(dtype)).max)


def route_problem(routes: np.ndarray, shape: RouteShape) -> str | None:
    """Return why an engine's routes are invalid for a model with ``shape``: out of range, or an expert twice.
    ``routes``: [tokens, layers, per_token], as stored. None if valid."""
    rows = routes.reshape(-1, shape.per_token)
    for start in range(0, len(rows), _BLOCK):
        columns = np.ascontiguousarray(rows[start : start + _BLOCK].T)
        wrong = columns.max(0) >= shape.experts
        for number in range(1, shape.per_token):
            for other in range(number):
                wrong |= columns[number] == columns[other]
        if wrong.any():
            token, layer = divmod(start + int(wrong.argmax()), shape.layers)
            experts = rows[start + int(wrong.argmax())].tolist()
            return (
                f"token {token} went to the experts {experts} of layer {layer}; a route has "
                f"{shape.per_token} different ones of 0 to {shape.experts - 1}"
            )
    return None


def write_routes(path: Path, parts: Sequence[np.ndarray]) -> list[int]:
    """Write a step's routes, response after response, atomically; return the CRC of each part. ``parts``:
    [tokens of the response, layers, per_token] each, of one dtype. Raises OSError if the disk fails."""
    header, first = BytesIO(), parts[0]
    shape = (sum(map(len, parts)), *first.shape[1:])
    described = {"descr": first.dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    buffers = [np.ascontiguousarray(part) for part in parts]
    write_atomically(path, [header.getvalue(), *(part.data for part in buffers if part.size)])
    return [zlib.crc32(part.data) for part in buffers]


def read_routes(stored: StoredRoutes, wait_s: float = WAIT_S) -> np.ndarray:
    """Return one response's routes [tokens, layers, per_token], mapped from its step's file.

    Waits at most ``wait_s`` for the file. Raises FailingDiskError, on this rank only, if it is missing or
    another file, or if rows differ from those written.
    """
    path, deadline = stored.file, time.monotonic() + wait_s
    while True:
        try:
            whole = np.load(path, mmap_mode="r", allow_pickle=False)
            break
        except (OSError, ValueError) as error:  # missing yet, or shorter than its header says
            if time.monotonic() > deadline:
                raise FailingDiskError(
                    f"{path}: the routes cannot be read after {wait_s:g} s: {error}; every rank must see the "
                    "run directory"
                ) from error
            time.sleep(0.05)
    rows: np.ndarray = whole[stored.first : stored.first + stored.tokens]
    wanted = (stored.tokens, stored.layers, stored.per_token)
    if rows.shape != wanted or rows.dtype.str != stored.dtype or zlib.crc32(rows.data) != stored.crc:
        raise FailingDiskError(
            f"{path}: rows {stored.first} to {stored.first + stored.tokens} are not the routes that were "
            "written there: the file is damaged; start the run again, which samples the step anew"
        )
    return rows
