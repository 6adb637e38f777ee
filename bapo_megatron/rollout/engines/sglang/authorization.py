"""API key of a run's SGLang servers: where it is, and headers that send it only to servers that require one.

``known_key`` returns the run's key; ``Authorization(url, look).headers()``, the HTTP headers of a call.

    python -m bapo_megatron.rollout.engines.sglang.authorization URL FILE

exits with 0 if the server requires a key and accepts the one in FILE (``slurm/task.sh`` then registers it).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from bapo_megatron.config import RunConfig, SglangConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.sglang_launch.api_key import (
    VARIABLE,
    ApiKey,
    make_key_file,
    read_key_file,
)
from bapo_megatron.runtime.device import environment_variable
from bapo_megatron.runtime.http import ask
from bapo_megatron.runtime.run_paths import RunPaths

_LIMIT_S = 5.0

_PROBE_THREADS = ThreadPoolExecutor(32, "authorization")
"""Threads of their own: on the event loop's, probes of silent servers would block the sampler's log."""


def status_with(url: str, key: str | None = None) -> int | None:
    """Return the HTTP status of /model_info, called with ``key`` or without. Raises OSError if unanswered."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return ask(f"{url}/model_info", headers=headers, timeout_s=_LIMIT_S).status
    except (HTTPException, TimeoutError, ValueError) as error:
        raise OSError(f"no HTTP answer: {error!r}") from None


def known_key(sglang: SglangConfig, directory: Path) -> ApiKey | None:
    """Return the key in the file that the recipe or environment names, else in the run's own, else None.
    Raises ConfigError, without the content, if a named file is missing, or if a file is invalid or public."""
    key_file = _given_file(sglang)
    path = key_file or RunPaths(directory).api_key
    if key_file is None and not path.exists():
        return None
    try:
        return read_key_file(path)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def servers_key_file(config: RunConfig) -> Path:
    """Return the key file of the run's servers; create the run's own if no other is named."""
    sglang, directory = config.rollout.sglang, config.directory
    if _given_file(sglang) is None:
        directory.mkdir(parents=True, exist_ok=True)
        make_key_file(RunPaths(directory).api_key)
    known = known_key(sglang, directory)
    assert known is not None
    return known.path.absolute()


def check_keys_asked(sglang: SglangConfig) -> None:
    """Raise ConfigError if ``require_api_key`` is set and a server of ``urls`` asks for no key."""
    for url in sglang.urls if sglang.require_api_key else ():
        with suppress(OSError):  # it may start later
            if status_with(url) == 200:
                raise ConfigError(
                    f"rollout.sglang.require_api_key is set, and {url} asks for no key: start it with "
                    "bapo rollout-server, or leave the field out"
                )


class Authorization:
    """HTTP headers of calls to one server, in one event loop, with the API key if the server requires one.

    ``headers`` probes the server at the first call and after ``forget``. It raises EngineError for a
    server that requires no key if the run started it, it required one before, or the recipe demands keys;
    otherwise it prints a warning and returns no key. A program that took over a server's port could ask for
    the key, so ports belong on loopback or a private network (docs/security.md).
    """

    def __init__(
        self,
        url: str,
        look: Callable[[], ApiKey | None],
        is_required: bool = False,
        is_own: bool = False,
    ) -> None:
        """``look``: returns the key; called again after None, as a server of the run may create it first.
        ``is_required``: the recipe refuses servers without keys. ``is_own``: the run started the server."""
        self._url, self._look, self._is_required = url.rstrip("/"), look, is_required
        self._is_own, self._has_asked = is_own, False
        self._key = look()
        self._lock = asyncio.Lock()
        self._headers: dict[str, str] | None = None
        self._is_warned = False

    async def headers(self) -> dict[str, str]:
        """Return a call's headers. Raises EngineError for a refused server, OSError if it does not answer."""
        if self._headers is None:
            async with self._lock:
                if self._headers is None:
                    self._headers = await self._find()
        return self._headers

    def forget(self) -> None:
        """Probe again at the next call. Called after a failed connection, as another program may answer."""
        self._headers = None

    def without_key(self, text: str) -> str:
        """Redact the key in ``text`` for logs and errors: a server may echo it."""
        return text.replace(self._key.value, "***") if self._key else text

    def refusal(self) -> str:
        """Return the error text, with the fix, for status 401."""
        asked = f"another API key than that in {self._key.path}" if self._key else "an API key"
        return f"it asks for {asked}; name its file with rollout.sglang.api_key_file or {VARIABLE}"

    async def _find(self) -> dict[str, str]:
        status = await asyncio.get_running_loop().run_in_executor(_PROBE_THREADS, status_with, self._url)
        if status == 401:
            self._has_asked = True
            try:
                self._key = self._key or self._look()
            except ConfigError as error:
                raise EngineError(str(error)) from error
            # Without a key the call gets a 401, which is reported.
            return {"Authorization": f"Bearer {self._key.value}"} if self._key else {}
        if status != 200:
            raise EngineError(
                f"{self._url}: is not SGLang server, or not ready: /model_info has status {status}"
            )
        if self._is_own or self._has_asked:
            raise EngineError(
                f"{self._url}: asks for no API key, and the server that was there does: another program has "
                "taken its port, or it was started again without the run's key. Free the port, or start it "
                "with bapo rollout-server and the same --run-dir"
            )
        if self._is_required:
            raise EngineError(
                f"{self._url}: asks for no API key, and rollout.sglang.require_api_key is set: start it with "
                "bapo rollout-server"
            )
        if not self._is_warned:
            self._is_warned = True
            print(
                f"warning: {self._url} asks for no API key: everybody who reaches it can sample from it and "
                "replace its weights; start it with bapo rollout-server",
                flush=True,
            )
        return {}


def _given_file(sglang: SglangConfig) -> Path | None:
    named = environment_variable(VARIABLE)
    return sglang.api_key_file or (Path(named) if named else None)


def main(url: str, file: str) -> None:
    """Exit with an error unless ``url`` refuses calls without a key and accepts the key in ``file``."""
    try:
        key = read_key_file(Path(file)).value
        without, with_key = status_with(url), status_with(url, key)
    except (OSError, ValueError) as error:
        sys.exit(f"{url}: {error or 'no answer'}")
    if without == 200:
        sys.exit(f"{url}: asks for no key")
    if with_key != 200:
        sys.exit(f"{url}: does not take the key in {file}: status {with_key}")


if __name__ == "__main__":
    main(*sys.argv[1:])
