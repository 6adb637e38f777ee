"""API key file of a run: ``make_key_file`` writes a random key, ``read_key_file`` returns a file's key."""

from __future__ import annotations

import os
import re
import secrets
import stat
import uuid
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "BAPO_SGLANG_API_KEY_FILE"
"""Environment variable with the path of a key file, from which a launched server reads its key."""

_KEY = re.compile(r"[\x21-\x7e]{16,512}")


@dataclass(frozen=True)
class ApiKey:
    """An API key, hidden in ``repr``, and its file."""

    value: str = field(repr=False)
    path: Path


def make_key_file(path: Path) -> None:
    """Write a key file with 256 random bits, atomically and with mode 0600, unless one exists. Of several
    concurrent processes one wins. Raises OSError if the file cannot be written."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)  # a folder's default ACL may have added permissions
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, a link never replaces a file
    except FileExistsError:
        pass
    finally:
        temporary.unlink(missing_ok=True)


def read_key_file(path: Path) -> ApiKey:
    """Read a key file. Raises ValueError, without its content, if it is invalid or others may read it."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(1024).decode("latin-1").strip()
    except OSError as error:
        raise ValueError(f"the API key file {path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise ValueError(
            f"the API key file {path} has mode {mode:04o}, so others may read it: chmod 600 {path}, and "
            "change the key if others had access; where the file system keeps no modes name a file "
            "elsewhere with rollout.sglang.api_key_file"
        )
    if not _KEY.fullmatch(text):
        raise ValueError(
            f"the API key file {path} must hold one line of 16 to 512 printable characters without spaces; "
            "delete it to get a new key, or write one: openssl rand -hex 32"
        )
    return ApiKey(text, path)
