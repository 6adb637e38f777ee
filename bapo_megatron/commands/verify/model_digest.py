"""Model fingerprints: SHA-256 of config.json, and of samples of the weight files.

A second at any size, since most bytes are not read: a small change of weights can be missed. A layout
reference holds them, so that a comparison notices another model. Used by ``check.py``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_PLACES = 64
_PLACE_BYTES = 4096


def model_digests(folder: Path) -> dict[str, str]:
    """SHA-256 (the first 16 digits) of ``config.json``, and of the weight files.

    Of each ``model*.safetensors`` file the digest covers the name, the size, and 64 places of 4 KiB, evenly
    spaced from the first byte (the header: tensor names, types, shapes) to the last. So any other training
    run's weights differ, and a 60 GB model takes a second. A change of a few single numbers can be missed,
    and the same weights in differently cut files count as another model.
    """
    weights = hashlib.sha256()
    for path in sorted(folder.glob("model*.safetensors")):
        _add_places(weights, path)
    config = hashlib.sha256((folder / "config.json").read_bytes())
    return {"config_sha256": config.hexdigest()[:16], "weights_sha256": weights.hexdigest()[:16]}


def _add_places(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}\n".encode())
    with path.open("rb") as file:
        for place in range(_PLACES):
            file.seek(max(0, size - _PLACE_BYTES) * place // (_PLACES - 1))
            digest.update(file.read(_PLACE_BYTES))
