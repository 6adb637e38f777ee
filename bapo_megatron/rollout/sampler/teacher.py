"""Frozen teacher of on-policy distillation: log-probs of sampled tokens, by SGLang servers.

A complete group is scored by the teacher once it has its rewards and is kept; its log-probs go to the
write-ahead log before they count, and from there into the step's file. So a resumed or replayed run does not
ask for those again. SGLang gives the log-probs of given tokens at temperature 1 alone, which
``rollout.temperature`` must therefore be.
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
from bapo_megatron.rollout.sampler.state import OpenGroup

FIELD = "algorithm.distillation"

_PROBES = 4
"""Prompts of the dataset that the servers must tokenize as the policy does."""

_BYTES_A_TOKEN = 128
"""Room in an answer for one token: its log-prob, its id and punctuation take 40."""


class Teacher:
    """Client of the teacher's servers, async: ``open``, ``log_probs`` any number at once, ``close``.

    A response goes to the server with the fewest; where that fails to the others, and the last of them is
    asked again until ``give_up_s``.
    """

    def __init__(self, config: DistillationConfig, longest: int) -> None:
        """``longest``: tokens of the longest sequence."""
        self._config = config
        self._key = key = key_of(config.api_key_env)
        most = 4096 + _BYTES_A_TOKEN * longest
        limits = (config.timeout_s, config.give_up_s, config.concurrency, key)
        self._servers = [JsonClient(f"{url.rstrip('/')}/generate", *limits, most) for url in config.urls]
        self._tokenizers = [JsonClient(f"{url.rstrip('/')}/tokenize", *limits, most) for url in config.urls]
        self._load = [0] * len(self._servers)

    async def open(self, dataset: Dataset) -> None:
        """Wait for the servers, and compare vocabularies. RunStopped if one is not there, ConfigError if one
        has another vocabulary."""
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
        """Log-probs of the response's tokens under the teacher, nats, float32 [R].

        RunStopped if no server gives them.
        """
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
                # Patience with the last one alone: while others answer, a dead server holds nothing up.
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
        """The log-probs in an answer, float32 [R]. EndpointError unless they are finite, and those of these
        ids."""
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
        """An answer in a message, shortened: a server may send the key back."""
        return redacted(repr(answer), self._key)[:200]

    def _preference(self, place: int) -> tuple[bool, int]:
        """Order of servers: those whose last call succeeded, of them first the one with fewest responses."""
        return self._servers[place].has_failed, self._load[place]

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in (*self._servers, *self._tokenizers)))


class GroupTeacher:
    """The teacher of complete groups: asks for all responses of one at once."""

    def __init__(self, dataset: Dataset, teacher: Teacher) -> None:
        self._dataset, self._teacher = dataset, teacher

    async def of_group(self, group: OpenGroup) -> list[np.ndarray]:
        """Log-probs of the tokens of each response, float32 [R], in order; of each branch in an episode with
        several. RunStopped as of ``Teacher``."""
        prompt = self._dataset.prompts[group.index].token_ids_P
        asked = [
            (prompt if branch.has_prompt else prompt[:0], branch.of(response.so_far.token_ids_R))
            for response in group.responses
            for branch in response.tree.branches
        ]
        return await asyncio.gather(*(self._of_branch(*arguments) for arguments in asked))

    async def _of_branch(self, prompt: np.ndarray, ids_R: np.ndarray) -> np.ndarray:
        if len(prompt):
            return await self._teacher.log_probs(prompt, ids_R)
        # No position predicts the first token, which was given, and servers have no number for it.
        return np.append(np.float32(0), await self._teacher.log_probs(ids_R[:1], ids_R[1:]))


def check_teacher(config: RunConfig) -> None:
    """Preflight of a distillation: ConfigError for an address or a key that cannot be used."""
    distillation = config.algorithm.distillation
    if not distillation.enabled or config.rollout.replay is not None:  # a replay has the log-probs
        return
    for url in distillation.urls:
        if problem := url_problem(url):
            raise ConfigError(f"{FIELD}.urls={shown(url)} {problem}")
    if problem := key_problem(distillation.api_key_env):
        raise ConfigError(f"{FIELD}.api_key_env: {problem}")
    if distillation.api_key_env and not key_of(distillation.api_key_env):
        raise ConfigError(f"{FIELD}.api_key_env: the environment variable is not set: export the key in it")
