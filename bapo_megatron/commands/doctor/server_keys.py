"""API key check of ``bapo doctor``: whether a server requires a key, and whether it is the run's.

As in a run, the run's own key is sent only to a server that has proved that it has the same one. Used by
``servers.py``.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from bapo_megatron.commands.doctor.http import DEADLINE_S, get
from bapo_megatron.commands.doctor.recipe import RecipeFacts
from bapo_megatron.commands.doctor.rows import DoctorRow, State
from bapo_megatron.rollout.engines.sglang_launch.api_key import (
    VARIABLE,
    ApiKey,
    ask_proof,
    is_loopback,
    read_key_file,
)
from bapo_megatron.runtime.run_paths import RunPaths

_SECTION = "servers"
_NEEDED = "a server that asks for the run's API key"
_SERVE = "start it with bapo rollout-server RECIPE --host HOST --port PORT"
_NAME = f"name its file with rollout.sglang.api_key_file or {VARIABLE}"


def key_check(url: str, facts: RecipeFacts) -> tuple[dict[str, str] | None, DoctorRow]:
    """Request headers for the server at ``url``, None if no known key opens it; and the row of its key."""
    named = facts.api_key_file or os.environ.get(VARIABLE)
    path = Path(named) if named else RunPaths(Path(facts.directory)).api_key
    try:
        key = read_key_file(path) if named or os.path.lexists(path) else None
    except ValueError as error:
        return None, _row(url, "problem", str(error), "correct the file, " + _NAME)
    if get(f"{url}/model_info").status != 401:
        must = facts.require_api_key or not is_loopback(url)
        found = "asks for no API key: who reaches it can sample and replace its weights"
        return {}, _row(url, "problem" if must else "optional", found, _SERVE)
    if key is None:
        return None, _row(url, "problem", "asks for an API key, and none is known here", _NAME)
    # As in a run: the run's own key goes only to a server that has proved that it has the same key.
    if not named and (reason := _key_proof_problem(url, key)):
        return None, _row(url, "problem", reason, f"{_SERVE} and the run's --run-dir; or {_NAME}")
    headers = {"Authorization": f"Bearer {key.value}"}
    if get(f"{url}/model_info", headers=headers).status == 401:
        found = f"asks for another API key than that in {key.path}"
        return None, _row(url, "problem", found, f"start it with that file, or {_NAME}")
    return headers, _row(url, "ok", f"asks for the API key in {key.path}", "")


def _key_proof_problem(url: str, key: ApiKey) -> str | None:
    """Problem of the server's proof that it has the run's key; None if the proof is right."""
    try:
        proof = asyncio.run(ask_proof(url, key.value, DEADLINE_S))
    except OSError as error:
        return f"does not answer whether it has the API key in {key.path}: {error}"
    if proof == "proved":
        return None
    kind = "has another API key than" if proof == "wrong" else "does not prove that it has"
    return f"{kind} the run's, {key.path}"


def _row(url: str, state: State, found: str, fix: str) -> DoctorRow:
    return DoctorRow(_SECTION, url, state, found, _NEEDED, fix)
