"""Authorization at SGLang servers: the run's API key, and the decision which servers may be sent it.

Used in this folder.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.config import RunConfig, SglangConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.sglang_launch.api_key import (
    VARIABLE,
    ApiKey,
    answers_without_key,
    ask_proof,
    is_loopback,
    make_key_file,
    read_key_file,
)
from bapo_megatron.runtime.device import environment_variable
from bapo_megatron.runtime.run_paths import RunPaths

_PROOF_S = 5.0


@dataclass(frozen=True)
class KnownKey:
    """The API key of a run, and whether the user gave it."""

    key: ApiKey
    is_given: bool
    """Whether it is in a file that the user names: it is sent to every server in `urls`. A run's own key is
    sent only to servers that prove that they have it, and so is every key to servers that the run starts."""


def known_key(sglang: SglangConfig, directory: Path) -> KnownKey | None:
    """The key in the file that the recipe or the environment names, else the run's own; None without either.
    ConfigError, without the file's content, if the file holds no key or others may read it."""
    given = _given_file(sglang)
    path = given or RunPaths(directory).api_key
    if given is None and not os.path.lexists(path):
        return None
    try:
        return KnownKey(read_key_file(path), is_given=given is not None)
    except ValueError as error:
        where = "" if given is None else f" (named by {_name_of_given(sglang)})"
        raise ConfigError(f"{error}{where}") from None


def servers_key_file(config: RunConfig) -> Path:
    """The file of the key that the run's servers require; the run's own is made if there is none yet."""
    sglang, directory = config.rollout.sglang, config.directory
    if _given_file(sglang) is None:
        path = RunPaths(directory).api_key
        try:
            directory.mkdir(parents=True, exist_ok=True)
            make_key_file(path)
        except OSError as error:
            raise ConfigError(
                f"the API key file {path} cannot be made: {error}; write one elsewhere "
                "(openssl rand -hex 32, mode 0600) and name it with rollout.sglang.api_key_file"
            ) from None
    known = known_key(sglang, directory)
    assert known is not None
    return known.key.path.absolute()


def check_keys_asked(sglang: SglangConfig) -> None:
    """Check ``require_api_key``: ConfigError if a server of ``urls`` needs no key. One that does not answer
    now is checked again before it gets requests."""
    if not (sglang.require_api_key and sglang.urls):
        return

    async def ask_all() -> list[bool | BaseException]:
        return await asyncio.gather(
            *(answers_without_key(url, _PROOF_S) for url in sglang.urls), return_exceptions=True
        )

    open_ = [url for url, found in zip(sglang.urls, asyncio.run(ask_all()), strict=True) if found is True]
    if open_:
        raise ConfigError(
            f"rollout.sglang.require_api_key is set, and {', '.join(open_)} asks for no key: start it with "
            "bapo rollout-server, or leave the field out"
        )


class Authorization:
    """The authorization headers of calls to one server. Lives in one event loop.

    The run's own key is sent only after the server has proved that it has it (``api_key.ask_proof``). The
    proof is repeated after a failed connection: another program may have taken the address. It must not pass
    for the server by asking for no key: who has proved the key once must always, and so must a server that
    the run has started. EngineError for a server that must not be called.
    """

    def __init__(
        self,
        url: str,
        look: Callable[[], KnownKey | None],
        is_required: bool = False,
        is_own: bool = False,
    ) -> None:
        """``look`` finds the key, now or later: a server of the run may make it first.
        ``is_required``: refuse a server that needs no key, by the recipe. ``is_own``: the run has started the
        server, with the key."""
        self._url, self._look, self._is_required = url.rstrip("/"), look, is_required
        self._is_own, self._has_proved = is_own, False
        self._known = look()
        self._lock = asyncio.Lock()
        self._headers: dict[str, str] | None = None
        self._is_warned = False

    async def headers(self) -> dict[str, str]:
        """The headers of a call. EngineError if the server must not be called, OSError without an answer."""
        if self._headers is None:
            async with self._lock:
                if self._headers is None:
                    self._headers = await self._find()
        return self._headers

    def forget(self) -> None:
        """Discard the proof after a failed connection: another program may answer next."""
        self._headers = None

    def without_key(self, text: str) -> str:
        """``text`` with the key redacted, for a log or an error: a server may send the key back."""
        return text.replace(self._known.key.value, "***") if self._known else text

    def refusal(self) -> str:
        """The error text for a server's status 401, with the fix."""
        if self._known is None:
            return f"it asks for an API key; name its file with rollout.sglang.api_key_file or {VARIABLE}"
        return (
            f"it asks for another API key than that in {self._known.key.path}; start it with that file, or "
            f"name its own with rollout.sglang.api_key_file or {VARIABLE}"
        )

    async def _find(self) -> dict[str, str]:
        if await self._is_trusted():
            assert self._known is not None
            sent = {"Authorization": f"Bearer {self._known.key.value}"}
            if not (self._known.is_given and await self._is_open()):
                return sent
        elif not await self._is_open():
            return {}  # it needs a key that this run does not have: its 401 is reported
        else:
            sent = {}
        if self._is_own or self._has_proved:
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
        self._warn()
        return sent

    async def _is_trusted(self) -> bool:
        try:
            self._known = self._known or self._look()
        except ConfigError as error:
            raise EngineError(str(error)) from error
        if self._known is None or (self._known.is_given and not self._is_own):
            return self._known is not None
        proof = await ask_proof(self._url, self._known.key.value, _PROOF_S)
        if proof == "wrong":
            raise EngineError(
                f"{self._url}: has another API key than the run's ({self._known.key.path}), or is no server "
                "of this run: start it with bapo rollout-server and the same --run-dir. Behind a forwarded "
                "port (ssh -L, docker -p, a Kubernetes service) no server can prove its address: name its "
                f"key file with rollout.sglang.api_key_file or {VARIABLE}"
            )
        self._has_proved |= proof == "proved"
        return proof == "proved"

    async def _is_open(self) -> bool:
        return await answers_without_key(self._url, _PROOF_S)

    def _warn(self) -> None:
        if not self._is_warned:
            self._is_warned = True
            reach = "of this machine" if is_loopback(self._url) else "who reaches it"
            print(
                f"warning: {self._url} asks for no API key: everybody {reach} can sample from it and replace "
                "its weights; start it with bapo rollout-server",
                flush=True,
            )


def _given_file(sglang: SglangConfig) -> Path | None:
    named = environment_variable(VARIABLE)
    return sglang.api_key_file or (Path(named) if named else None)


def _name_of_given(sglang: SglangConfig) -> str:
    return "rollout.sglang.api_key_file" if sglang.api_key_file else VARIABLE
