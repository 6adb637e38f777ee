"""The API key of a run: its file, and a challenge-response proof that a server has the key.

Clients and the servers' launchers share this file. A client must not send its key to another program that has
taken the server's port. So it first sends a random nonce, and the server answers with

    HMAC-SHA256(key, "bapo-megatron <nonce> <ip> <port>")

where ip and port are the server's end of the connection, which the client compares with its peer: an answer
relayed from another server has another address. Behind address translation (``docker -p``, ``ssh -L``) the
proof fails, too; such servers need a key file that the recipe names. Used by
``commands/doctor/servers.py``, ``rollout/engines/sglang/authorization.py`` and
``rollout/engines/sglang/server_process.py``.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import re
import secrets
import ssl
import stat
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

VARIABLE = "BAPO_SGLANG_API_KEY_FILE"
"""Environment variable that names a key file; a launched server reads its own key's file from it."""
PROOF_PATH = "/api_key_proof"

Proof = Literal["proved", "wrong", "none"]
"""The result of a proof. ``none``: the server cannot prove anything, such as SGLang without our launcher."""

_KEY = re.compile(r"[\x21-\x7e]{16,512}")
_NONCE = re.compile(r"[0-9a-f]{32}")
_PROOF = re.compile(rb"[0-9a-f]{64}")
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class ApiKey:
    """An API key and its file; ``repr`` does not show the key.

    Made by ``read_key_file``.
    """

    value: str = field(repr=False)
    path: Path


def make_key_file(path: Path) -> None:
    """Make a key file with 256 random bits, unless there is one: atomically, with mode 0600.

    If several processes try at once, one wins. OSError if the file cannot be written or kept private.
    """
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)  # a folder's default ACL may have added to it
            if os.fstat(descriptor).st_mode & 0o077:
                raise OSError(errno.EOPNOTSUPP, "its file system keeps no modes, so others could read it")
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _give_name(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink(missing_ok=True)


def _give_name(temporary: Path, path: Path) -> None:
    """Publish the file as ``path``; FileExistsError if there is one already."""
    try:
        os.link(temporary, path)  # unlike a rename, a link never replaces a file
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        if not path.exists():  # a file system without links: the last of two that try at once wins
            temporary.rename(path)


def read_key_file(path: Path) -> ApiKey:
    """The key in ``path``. ValueError, without the file's content, if it is invalid or others may read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"the API key file {path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"the API key file {path} is no regular file")
        if about.st_mode & 0o077:
            raise ValueError(
                f"the API key file {path} has mode {about.st_mode & 0o777:04o}, so others may read it: "
                f"chmod 600 {path}, and change the key if others had access"
            )
        text = file.read(1024).decode("latin-1").strip()
    if not _KEY.fullmatch(text):
        raise ValueError(
            f"the API key file {path} must hold one line of 16 to 512 printable characters without spaces; "
            "delete it to get a new key, or write one: openssl rand -hex 32"
        )
    return ApiKey(text, path)


def proof_of(key: str, nonce: str, address: str, port: int) -> str | None:
    """A server's proof for ``nonce``, in hexadecimal; None if the nonce is invalid.

    ``address``, ``port``: the server's end of the connection.
    """
    if not _NONCE.fullmatch(nonce):
        return None
    address = address.removeprefix("::ffff:")  # IPv4 at a server that listens on ::
    return hmac.new(key.encode(), f"bapo-megatron {nonce} {address} {port}".encode(), "sha256").hexdigest()


def is_same(given: str, key: str) -> bool:
    """Constant-time comparison of two keys."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), key.encode())


def is_loopback(url: str) -> bool:
    """Whether a URL is a loopback address."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


async def ask_proof(url: str, key: str, timeout_s: float) -> Proof:
    """Ask the server at ``url`` to prove that it has the key. OSError or TimeoutError without an answer."""
    nonce = secrets.token_hex(16)
    async with asyncio.timeout(timeout_s):
        status, body, peer = await _get(url, f"{PROOF_PATH}?nonce={nonce}")
    if status != 200 or not _PROOF.fullmatch(body):
        return "none"
    expected = proof_of(key, nonce, *peer)
    return "proved" if expected and hmac.compare_digest(body, expected.encode()) else "wrong"


async def answers_without_key(url: str, timeout_s: float) -> bool:
    """Whether the server at ``url`` needs no key. OSError or TimeoutError without an answer."""
    async with asyncio.timeout(timeout_s):
        status, _, _ = await _get(url, "/model_info")
    return status == 200


async def _get(url: str, path: str) -> tuple[int, bytes, tuple[str, int]]:
    """HTTP GET: status, body and peer address. Proxies and redirects are not followed."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    context = ssl.create_default_context() if secure else None
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
    try:
        address, peer_port, *_ = writer.get_extra_info("peername")
        target = f"{parts.path.rstrip('/')}{path}"
        head = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        answer = b""
        while len(answer) < _MOST_BYTES and (more := await reader.read(_MOST_BYTES)):
            answer += more
    finally:
        writer.close()
    found = re.match(rb"HTTP/1\.[01] ([0-9]{3})", answer)
    return int(found[1]) if found else 0, answer.partition(b"\r\n\r\n")[2], (str(address), int(peer_port))


def main() -> None:
    """``python -m ...api_key URL FILE``: exit code 0 if the server proves that it has the key, else 1."""
    url, file = sys.argv[1:]
    try:
        found: str = asyncio.run(ask_proof(url, read_key_file(Path(file)).value, 5.0))
    except (OSError, ValueError) as error:  # TimeoutError is an OSError
        found = str(error) or "no answer"
    if found != "proved":
        sys.exit(f"{url}: {found}")


if __name__ == "__main__":
    main()
