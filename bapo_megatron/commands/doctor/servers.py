"""SGLang server checks of ``bapo doctor``: whether the recipe's servers answer and match the recipe.

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

from bapo_megatron.commands.doctor.packages import SGLANG, pins
from bapo_megatron.commands.doctor.recipe import RecipeFacts, read_model_config
from bapo_megatron.commands.doctor.rows import DoctorRow, State, one_line
from bapo_megatron.rollout.engines.sglang.requirements import (
    CHOOSING_KERNELS,
    FP32_HEAD,
    NO_PREFILL_GRAPH,
    RESERVED_TOKENS,
    ROUTED_KERNEL,
    ROUTES,
    flag,
    install_command,
    prefill_graph,
    setting_problems,
)
from bapo_megatron.rollout.engines.sglang_launch.api_key import VARIABLE, read_key_file
from bapo_megatron.runtime.child_process import within
from bapo_megatron.runtime.device import environment_variable
from bapo_megatron.runtime.http import Answer, ask, is_loopback
from bapo_megatron.runtime.run_paths import RunPaths

SECTION = "servers"
DEADLINE_S = 10.0
"""Deadline for one answer, seconds."""
_SAME_SHAPE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
)
"""Fields of `config.json` that are equal in two versions of one model."""
_INPUT_RESERVE = 6
"""SGLang's `max_req_input_len` is its context length minus this many tokens."""


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
        return [_other_program(url, facts)]
    rows = [_ready_row(url, ready)]
    headers, key_row = key_check(url, facts)
    rows.append(key_row)
    if headers is not None:
        model = get(f"{url}/model_info", headers=headers).fields
        server = get(f"{url}/server_info", headers=headers).fields
        rows += [weight_version_row(url, model.get("weight_version")), model_row(url, model, facts)]
        rows += [*_context_rows(url, server, facts), *_setting_rows(url, server, facts)]
    return rows


def get(url: str, deadline_s: float = DEADLINE_S, *, headers: Mapping[str, str] | None = None) -> Answer:
    """Return the response of ``url`` within ``deadline_s`` in all. Never raises: errors become its reason."""
    try:
        return within(deadline_s, lambda: ask(url, headers=headers, timeout_s=deadline_s))
    except Exception as error:  # a server that does not speak HTTP raises various errors
        return Answer(None, one_line(getattr(error, "reason", error)))


def key_check(
    url: str, facts: RecipeFacts, path_asked: str = "/model_info"
) -> tuple[dict[str, str] | None, DoctorRow]:
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
    if get(f"{url}{path_asked}").status != 401:
        must = facts.require_api_key or not is_loopback(url)
        found = "asks for no API key: who reaches it can sample and replace its weights"
        fix = "start it with bapo rollout-server RECIPE --host HOST --port PORT"
        return {}, row("problem" if must else "optional", found, fix)
    if key is None:
        return None, row("problem", "asks for an API key, and none is known here", name_file)
    headers = {"Authorization": f"Bearer {key.value}"}
    if get(f"{url}{path_asked}", headers=headers).status == 401:
        found = f"asks for another API key than that in {key.path}"
        return None, row("problem", found, f"start it with that file, or {name_file}")
    return headers, row("ok", f"asks for the API key in {key.path}")


def weight_version_row(url: str, version: object) -> DoctorRow:
    """Return the row of a server's weight version, a number that the weight sync increments."""
    if str(version).isdecimal():
        return DoctorRow(SECTION, url, "ok", f"weight version {version}")
    fix = "start it with --weight-version 0, as bapo rollout-server does"
    return DoctorRow(SECTION, url, "problem", f"weight version {version!r}", "a number", fix)


def model_row(url: str, model: dict[str, Any], facts: RecipeFacts) -> DoctorRow:
    """Return the row of a server's model: whether type and, if its folder is readable, shape match."""
    folder = str(model.get("model_path", "unknown"))
    needed = "the recipe's model"
    fix = "start it with the recipe: bapo rollout-server RECIPE"
    served = read_model_config(Path(folder))
    ours = facts.model or {}
    differ = [_difference("model_type", model, ours)]
    if served is not None:
        differ += [_difference(name, served, ours) for name in _SAME_SHAPE]
    if different := [text for text in differ if text]:
        return DoctorRow(SECTION, url, "problem", f"model {folder}: {', '.join(different)}", needed, fix)
    seen = f"{served.get('vocab_size')} token ids" if served else "its folder is not seen from here"
    return DoctorRow(SECTION, url, "ok", f"model {folder}, {seen}", needed)


def longest_sequence(server: dict[str, Any]) -> int | None:
    """Return a server's longest sequence (prompt + response) in tokens; None without a context length."""
    context, prompt = server.get("context_length"), server.get("max_req_input_len")
    if not isinstance(context, int):
        context = prompt + _INPUT_RESERVE if isinstance(prompt, int) else None
    return None if context is None else context - RESERVED_TOKENS


def _ready_row(url: str, ready: Answer) -> DoctorRow:
    if ready.status == 200:
        return DoctorRow(SECTION, url, "ok", "ready")
    fix = (
        "wait until it has loaded its model; one that a run has left paused continues after "
        f"curl -X POST -H 'Content-Type: application/json' -d '{{}}' {url}/continue_generation"
    )
    found = f"not ready: status {ready.status}"
    return DoctorRow(SECTION, url, "problem", found, "status 200 from /ready", fix)


def _other_program(url: str, facts: RecipeFacts) -> DoctorRow:
    """Return the row of a server without ``/ready``: SGLang's router or another program."""
    headers, _ = key_check(url, facts, "/workers")
    workers = get(f"{url}/workers", headers=headers).fields.get("workers")
    if isinstance(workers, list):
        known = " ".join(str(worker.get("url")) for worker in workers if isinstance(worker, dict))
        fix = f"name its servers (docs/sglang.md#the-router): --rollout.sglang.urls {known}".rstrip()
        return DoctorRow(SECTION, url, "problem", "a router, which takes no weights", "an SGLang server", fix)
    fix = f"correct rollout.sglang.urls, or update SGLang there: {install_command()}"
    return DoctorRow(SECTION, url, "problem", "answers, and has no /ready", "an SGLang server", fix)


def _context_rows(url: str, server: dict[str, Any], facts: RecipeFacts) -> Iterator[DoctorRow]:
    if (longest := longest_sequence(server)) is None:
        return
    needed = f"{facts.longest_sequence} tokens, the run's longest sequence"
    context = facts.longest_sequence + RESERVED_TOKENS
    fix = f"start it with --context-length {context}, or lower rollout.max_response_tokens"
    state: State = "ok" if longest >= facts.longest_sequence else "problem"
    found = f"context for sequences of {longest} tokens"
    yield DoctorRow(SECTION, url, state, found, needed, fix)


def _setting_rows(url: str, server: dict[str, Any], facts: RecipeFacts) -> Iterator[DoctorRow]:
    """Yield rows of the SGLang version and of settings that break log-probs, weight sync or routes."""
    if (version := server.get("version")) is not None:
        tested = pins(SGLANG).get("sglang")
        fix = f"{install_command()} installs the tested version; the wire format may differ in others"
        state: State = "ok" if version == tested else "optional"
        yield DoctorRow(SECTION, url, state, f"SGLang {version}", f"tested: {tested}", fix)
    if (dtype := server.get("dtype")) not in (None, "auto", facts.dtype):
        fix = f"start it with --dtype {facts.dtype}: log-probs drift from the policy's otherwise"
        yield DoctorRow(SECTION, url, "optional", f"dtype {dtype}", f"model.dtype={facts.dtype}", fix)
    if facts.dtype == "bfloat16" and server.get(FP32_HEAD) is False:
        needed = "logits in float32, as the trainer's: log-probs differ by 0.02 nats otherwise"
        yield DoctorRow(
            SECTION, url, "optional", f"no {flag(FP32_HEAD)}", needed, f"start it with {flag(FP32_HEAD)}"
        )
    if prefill_graph(server) == "breakable":
        needed = "no graphs of the prefill: SGLang's default may sample wrong tokens"
        fix = f"start it with {' '.join(NO_PREFILL_GRAPH)}"
        yield DoctorRow(SECTION, url, "optional", "breakable prefill graphs", needed, fix)
    for problem in setting_problems(server, facts.sync, facts.on_update):
        needed = "settings that let new weights reach every token"
        yield DoctorRow(SECTION, url, "problem", "would be refused by the run", needed, problem)
    needed = "the routes that rollout.route_replay asks for"
    if facts.needs_routes and server.get(ROUTES) is False:
        yield DoctorRow(
            SECTION, url, "problem", f"no {flag(ROUTES)}", needed, f"start it with {flag(ROUTES)}"
        )
    if facts.needs_routes and (kernel := server.get("moe_runner_backend")) in CHOOSING_KERNELS:
        found, fix = f"a kernel that chooses experts itself, {kernel}", " ".join(ROUTED_KERNEL)
        yield DoctorRow(SECTION, url, "problem", found, needed, f"start it with {fix}")


def _difference(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    left, right = theirs.get(name), ours.get(name)
    return f"{name} {left}, the recipe's {right}" if None not in (left, right) and left != right else ""
