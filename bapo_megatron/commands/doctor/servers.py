"""SGLang server checks of ``bapo doctor``: whether a run could use the recipe's servers.

``server_rows`` yields the rows of the servers in ``rollout.sglang.urls``. It only sends GET requests (SGLang
0.5.23's `/ready`, `/model_info`, `/server_info`), each with a deadline. A server that does not answer gets
one `problem` row, not an exception. As in a run, only servers that ask for the API key are sent it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bapo_megatron.commands.doctor.recipe import RecipeFacts
from bapo_megatron.commands.doctor.rows import DoctorRow, State, one_line
from bapo_megatron.rollout.engines.sglang.requirements import install_command, setting_problems
from bapo_megatron.rollout.engines.sglang_launch.api_key import VARIABLE, read_key_file
from bapo_megatron.runtime.child_process import within
from bapo_megatron.runtime.device import environment_variable
from bapo_megatron.runtime.http import Answer, ask, is_loopback
from bapo_megatron.runtime.run_paths import RunPaths

SECTION = "servers"
DEADLINE_S = 10.0
"""Deadline for one answer, seconds."""


def server_rows(facts: RecipeFacts) -> Iterator[DoctorRow]:
    """Yield the rows of every server in ``rollout.sglang.urls``, asking all servers in parallel."""
    urls = [url for url in facts.urls if "://" in url]  # the recipe check reports the others
    if not urls:
        return
    with ThreadPoolExecutor(len(urls)) as pool:
        for rows in pool.map(lambda url: rows_of(url.rstrip("/"), facts), urls):
            yield from rows


def rows_of(url: str, facts: RecipeFacts) -> list[DoctorRow]:
    """Return the rows of one server: a single one if it does not answer or is not an SGLang server."""
    ready = get(f"{url}/ready")
    if ready.status is None:
        fix = "start it (bapo rollout-server RECIPE --host HOST --port PORT), or correct rollout.sglang.urls"
        found = f"no answer: {ready.reason}"
        return [DoctorRow(SECTION, url, "problem", found, "an SGLang server", fix)]
    if ready.status == 404:
        fix = (
            "correct rollout.sglang.urls (for a router its servers, docs/sglang.md#the-router), or update "
            f"SGLang there: {install_command()}"
        )
        return [DoctorRow(SECTION, url, "problem", "answers, and has no /ready", "an SGLang server", fix)]
    rows = [_ready_row(url, ready)]
    headers, key_row = key_check(url, facts)
    rows.append(key_row)
    if headers is not None:
        model = get(f"{url}/model_info", headers=headers).fields
        server = get(f"{url}/server_info", headers=headers).fields
        rows += [weight_version_row(url, model.get("weight_version")), *_setting_rows(url, server, facts)]
    return rows


def get(url: str, deadline_s: float = DEADLINE_S, *, headers: Mapping[str, str] | None = None) -> Answer:
    """Return the response of ``url`` within ``deadline_s`` in all. Never raises: errors become its reason."""
    try:
        return within(deadline_s, lambda: ask(url, headers=headers, timeout_s=deadline_s))
    except Exception as error:  # a server that does not speak HTTP raises various errors
        return Answer(None, one_line(getattr(error, "reason", error)))


def key_check(url: str, facts: RecipeFacts) -> tuple[dict[str, str] | None, DoctorRow]:
    """Return the headers that the server at ``url`` accepts, None if it needs an unknown key, and its row."""

    def row(state: State, found: str, fix: str = "") -> DoctorRow:
        return DoctorRow(SECTION, url, state, found, "a server that asks for the run's API key", fix)

    named = facts.api_key_file or environment_variable(VARIABLE)
    path = Path(named) if named else RunPaths(Path(facts.directory)).api_key
    name_file = f"name its file with rollout.sglang.api_key_file or {VARIABLE}"
    try:
        key = read_key_file(path) if named or os.path.lexists(path) else None
    except ValueError as error:
        return None, row("problem", str(error), f"correct the file, {name_file}")
    if get(f"{url}/model_info").status != 401:
        must = facts.require_api_key or not is_loopback(url)
        found = "asks for no API key: who reaches it can sample and replace its weights"
        fix = "start it with bapo rollout-server RECIPE --host HOST --port PORT"
        return {}, row("problem" if must else "optional", found, fix)
    if key is None:
        return None, row("problem", "asks for an API key, and none is known here", name_file)
    headers = {"Authorization": f"Bearer {key.value}"}
    if get(f"{url}/model_info", headers=headers).status == 401:
        found = f"asks for another API key than that in {key.path}"
        return None, row("problem", found, f"start it with that file, or {name_file}")
    return headers, row("ok", f"asks for the API key in {key.path}")


def weight_version_row(url: str, version: object) -> DoctorRow:
    """Return the row of a server's weight version, a number that the weight sync increments."""
    if str(version).isdecimal():
        return DoctorRow(SECTION, url, "ok", f"weight version {version}")
    fix = "start it with --weight-version 0, as bapo rollout-server does"
    return DoctorRow(SECTION, url, "problem", f"weight version {version!r}", "a number", fix)


def _ready_row(url: str, ready: Answer) -> DoctorRow:
    if ready.status == 200:
        return DoctorRow(SECTION, url, "ok", "ready")
    fix = (
        "wait until it has loaded its model; one that a run has left paused continues after "
        f"curl -X POST -H 'Content-Type: application/json' -d '{{}}' {url}/continue_generation"
    )
    found = f"not ready: status {ready.status}"
    return DoctorRow(SECTION, url, "problem", found, "status 200 from /ready", fix)


def _setting_rows(url: str, server: dict[str, Any], facts: RecipeFacts) -> Iterator[DoctorRow]:
    """Yield a row for each setting that a run refuses at its start."""
    for problem in setting_problems(server, facts.sync, facts.on_update):
        needed = "settings that let new weights reach every token"
        yield DoctorRow(SECTION, url, "problem", "would be refused by the run", needed, problem)
