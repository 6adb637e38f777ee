"""Client of the frozen teacher of on-policy distillation: log-probs of sampled tokens, from SGLang servers.

``group_log_probs`` returns a complete group's log-probs, an array per response or branch. They go into the
write-ahead log and from there into the step file, so a resumed or replayed run does not request them again.
SGLang returns log-probs of input tokens only at temperature 1, so ``rollout.temperature`` must be 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from bapo_megatron.algo.reference_kl_config import DistillationConfig
from bapo_megatron.config import RunConfig
from bapo_megatron.errors import ConfigError, RunStopped
from bapo_megatron.reward.endpoint_client import (
    EndpointError,
    JsonClient,
    key_of,
    key_problem,
    redacted,
    shown,
    url_problem,
)
from bapo_megatron.rollout.engines.requests import Dataset
from bapo_megatron.rollout.sampler.branches import Branch
from bapo_megatron.rollout.sampler.state import OpenGroup

FIELD = "algorithm.distillation"
_PROBES = 4  # dataset prompts that the servers must tokenize as the policy does
_BYTES_A_TOKEN = 128  # answer bytes allowed per token; log-prob, id and punctuation take 40


class Teacher:
    """Async client of the teacher servers, in the sampler process: ``open``, concurrent ``log_probs`` calls,
    ``close``. A response goes to the least loaded server, after a failure to the others in turn; the last is
    retried for ``give_up_s`` seconds, then RunStopped is raised."""

    def __init__(self, config: DistillationConfig, longest: int) -> None:
        """``longest``: maximum sequence length in tokens."""
        self._config = config
        self._key = key = key_of(config.api_key_env)
        most = 4096 + _BYTES_A_TOKEN * longest
        limits = (config.timeout_s, config.give_up_s, config.concurrency, key)
        self._servers = [JsonClient(f"{url.rstrip('/')}/generate", *limits, most) for url in config.urls]
        self._tokenizers = [JsonClient(f"{url.rstrip('/')}/tokenize", *limits, most) for url in config.urls]
        self._load = [0] * len(self._servers)

    async def open(self, dataset: Dataset) -> None:
        """Wait for the servers and compare vocabularies. Raises RunStopped if one is unreachable, ConfigError
        if its vocabulary differs."""
        texts = [
            dataset.tokenizer.decode(prompt.token_ids_P.tolist()) for prompt in dataset.prompts[:_PROBES]
        ]
        for client in self._tokenizers:
            try:
                await client.connect()
                for text in texts:
                    body = {"prompt": text, "add_special_tokens": False}
                    self._check_vocabulary(client.address, text, dataset.tokenizer, await client.ask(body))
            except EndpointError as error:
                raise RunStopped(
                    f"{FIELD}.urls: {error}; start the teacher there (with its tokenizer), or correct the "
                    "address, then give the same command"
                ) from None

    async def log_probs(self, prompt_ids: np.ndarray, response_ids: np.ndarray) -> np.ndarray:
        """Return the response's log-probs, nats, float32 [R]. Raises RunStopped if no server answers."""
        ids = np.concatenate([prompt_ids, response_ids])
        body = {
            "input_ids": ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": max(0, len(prompt_ids) - 1),
        }
        problems = []
        places = sorted(range(len(self._servers)), key=self._preference)
        for place in places:
            server = self._servers[place]
            self._load[place] += 1
            try:
                # Only the last server is retried, so that a dead server delays nothing while others answer.
                answer = await (server.ask(body) if place == places[-1] else server.ask_once(body))
                return self._read(server.address, answer, response_ids)
            except EndpointError as error:
                problems.append(str(error))
            finally:
                self._load[place] -= 1
        raise RunStopped(
            f"{FIELD}.urls: the teacher gives no log-probs of a sequence of {len(ids)} tokens: "
            f"{'; '.join(problems)}. What is sampled is kept; mend the servers, then give the same command"
        )

    def _read(self, address: str, answer: Any, response_ids: np.ndarray) -> np.ndarray:
        """Return an answer's log-probs, float32 [R]; raises EndpointError for invalid values or other ids."""
        try:
            rows: Sequence[Sequence[Any]] = answer["meta_info"]["input_token_logprobs"]
            rows = rows[len(rows) - len(response_ids) :]
            ids = [row[1] for row in rows]
            values_R = np.fromiter((row[0] for row in rows), np.float32, len(rows))
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            why = f"{address}: {error!r} in its answer {self._shown(answer)}"
            raise EndpointError("no log-probs", why) from None
        if ids != response_ids.tolist():
            raise EndpointError(
                "other tokens", f"{address}: its log-probs are of other tokens than were sent"
            )
        if not np.isfinite(values_R).all() or (values_R > 1e-4).any():
            raise EndpointError("broken log-probs", f"{address}: log-probs above 0 or not finite")
        return values_R

    def _check_vocabulary(self, address: str, text: str, tokenizer: Any, answer: Any) -> None:
        ours = tokenizer.encode(text, add_special_tokens=False)
        theirs = answer.get("tokens") if isinstance(answer, dict) else None
        if theirs != list(ours):
            raise ConfigError(
                f"{FIELD}.urls: {address} has another vocabulary than the policy: it has "
                f"{self._shown(theirs)} for the tokens {list(ours)!r:.200}. Take a teacher of the policy's "
                "family: its log-probs are of ids"
            )

    def _shown(self, answer: Any) -> str:
        """Return an answer shortened for a message, without the key, which a server may echo."""
        return redacted(repr(answer), self._key)[:200]

    def _preference(self, place: int) -> tuple[bool, int]:
        """Return the sort key: servers whose last call succeeded first, then by load."""
        return self._servers[place].has_failed, self._load[place]

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in (*self._servers, *self._tokenizers)))


async def group_log_probs(teacher: Teacher, ids_P: np.ndarray, group: OpenGroup) -> list[np.ndarray]:
    """Return the log-probs of each response (each branch, if there are several), float32 [R], in order, from
    concurrent requests. ``ids_P``: the dataset's prompt. Raises RunStopped as ``Teacher`` does."""

    async def of_branch(branch: Branch, ids_R: np.ndarray) -> np.ndarray:
        if branch.has_prompt and len(ids_P):
            return await teacher.log_probs(ids_P, ids_R)
        # No position predicts the first token, which was given, so servers return no log-prob for it.
        return np.append(np.float32(0), await teacher.log_probs(ids_R[:1], ids_R[1:]))

    return await asyncio.gather(
        *(
            of_branch(branch, branch.of(response.so_far.token_ids_R))
            for response in group.responses
            for branch in response.tree.branches
        )
    )


def check_teacher(config: RunConfig) -> None:
    """Preflight check of distillation, without network. Raises ConfigError for a bad address or key."""
    distillation = config.algorithm.distillation
    if not distillation.enabled or config.rollout.replay is not None:  # a replay has stored log-probs
        return
    for url in distillation.urls:
        if problem := url_problem(url):
            raise ConfigError(f"{FIELD}.urls={shown(url)} {problem}")
    if problem := key_problem(distillation.api_key_env):
        raise ConfigError(f"{FIELD}.api_key_env: {problem}")
    if distillation.api_key_env and not key_of(distillation.api_key_env):
        raise ConfigError(f"{FIELD}.api_key_env: the environment variable is not set: export the key in it")
