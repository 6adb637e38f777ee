"""Evaluation run: samples and scores the missing responses of each suite, and writes the summaries.

``evaluate`` is ``bapo eval``. It starts the engines and the reward workers and ends them; the same call goes
on where an earlier one stopped. Used by ``command.py`` and ``text.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron import __version__
from bapo_megatron.config import RewardConfig, RunConfig
from bapo_megatron.config.validation import settings_of_scores
from bapo_megatron.data.suites import REWARD_FUNCTION, Suite, load_suite
from bapo_megatron.errors import ConfigError
from bapo_megatron.evaluation.model import Model, find_checkpoint, hf_model, output_of
from bapo_megatron.evaluation.options import EvalOptions
from bapo_megatron.evaluation.responses import (
    FORMAT,
    Responses,
    open_folder,
    read_responses,
    write_summary,
)
from bapo_megatron.evaluation.sampling import SuiteSampler
from bapo_megatron.evaluation.scoring import score
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.policy.device import has_cuda, select_device
from bapo_megatron.reward.code_tests import is_tests
from bapo_megatron.reward.functions import check_function
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.reward.sandbox.requirements import checked_sandbox
from bapo_megatron.rollout.engines.registry import engine_backend, open_pool
from bapo_megatron.rollout.engines.requests import Dataset, limits_of
from bapo_megatron.rollout.sampler.environment_start import check_environment, open_environment
from bapo_megatron.rollout.sampler.response import Sampling
from bapo_megatron.rollout.sampler.scoring import RobustScorer
from bapo_megatron.rollout.sampler.turns import TurnTaker
from bapo_megatron.runtime.jsonl_log import Row
from bapo_megatron.runtime.written_folders import is_run
from bapo_megatron.types import Metrics

_VERSION = 1
"""Weight version of the model in the engines; 0 is the version that they start with."""

Results = dict[str, tuple[Path, Metrics]]
"""Folder and metrics of each suite, by its name."""


@dataclass(frozen=True)
class _Task:
    """One suite of an evaluation, and the responses that it lacks."""

    suite: Suite
    folder: Path
    settings: Row
    log: Responses
    places: list[tuple[int, int]]
    """Problem and sample of each missing response."""


def evaluate(options: EvalOptions) -> Results:
    """Evaluate: sample and score the missing responses, and compute the metrics.

    ConfigError, before anything is sampled, for bad options. RunStopped if the engines are gone or the disk
    is full: the same call continues it later.
    """
    options.check()
    if options.reward is not None:
        check_function(RewardConfig(function=options.reward, settings=options.reward_settings))
    location = find_checkpoint(options.checkpoint, options.step)
    engine_backend(options.engine, "--engine").check(options.rollout)
    output = options.output or output_of(location)
    if is_run(output):
        raise ConfigError(
            f"output={output} is the directory of a run, "
            "which keeps its own logs and keys: name another folder"
        )
    model = hf_model(location, options.hf_reference, output)
    engine_backend(options.engine, "--engine").check_weights(model.folder)
    tokenizer = load_tokenizer(model.folder)
    check_environment(options.environment, model.folder, tokenizer)
    function, most_tokens = options.reward or REWARD_FUNCTION, options.max_prompt_tokens
    suites = [load_suite(name, tokenizer, most_tokens, options.suites, function) for name in options.names]
    longest = max(len(prompt.token_ids_P) for suite in suites for prompt in suite.prompts)
    _check_suites(suites, options, longest, limits_of(model.folder).context)
    with ExitStack() as opened:
        tasks = [_task(opened, suite, options, model, output) for suite in suites]
        results: Results = {}

        def finish(task: _Task) -> None:
            results[task.suite.name] = task.folder, _finish(task, options)

        for task in tasks:
            if not task.places:
                finish(task)
        if missing := [task for task in tasks if task.places]:
            programs = any(is_tests(prompt.ground_truth) for suite in suites for prompt in suite.prompts)
            if programs and options.reward is None and options.sandbox_url is None:
                checked_sandbox(options.allow_weak_sandbox)
            config = options.run_config(model.folder, output, longest, programs)
            _sample(missing, config, tokenizer, finish)
    return {suite.name: results[suite.name] for suite in suites}


def _check_suites(suites: Sequence[Suite], options: EvalOptions, longest: int, room: int) -> None:
    names = [suite.name for suite in suites]
    if len(set(names)) < len(names):
        raise ConfigError(f"suite={options.suite}: two of them have one name ({', '.join(names)})")
    if longest + options.max_response_tokens > room:
        raise ConfigError(
            f"max_response_tokens={options.max_response_tokens} and the longest prompt ({longest} tokens) "
            f"are more than the model's context of {room}: set --max-response-tokens {max(1, room - longest)}"
        )


def _task(opened: ExitStack, suite: Suite, options: EvalOptions, model: Model, output: Path) -> _Task:
    reward: dict[str, Any] = {}
    if options.reward is not None:
        reward = {"function": options.reward, "correct": options.reward_correct}
        asked = settings_of_scores(options.reward, options.reward_settings)
        reward |= {"settings": asked} if asked else {}
    settings = {
        "format": FORMAT,
        "suite": {
            "name": suite.name,
            "path": str(suite.path.resolve()),
            "sha256": suite.sha256,
            "problems": len(suite.prompts),
        },
        "model": {"checkpoint": model.checkpoint, "sha256": model.sha256},
        "sampling": options.sampling(),
        **({"reward": reward} if reward else {}),  # evaluations without one were stored before there was any
        "samples": options.samples,
        "code_version": __version__,
    }
    folder = output / suite.name
    log = opened.enter_context(open_folder(folder, settings))
    there = {(one.problem, one.sample) for one in read_responses(log.path, options.samples)}
    every = [(problem, sample) for sample in range(options.samples) for problem in range(len(suite.prompts))]
    places = [place for place in every if place not in there]
    if there:
        print(f"{suite.name}: {len(there)} of {len(every)} responses are there", flush=True)
    return _Task(suite, folder, settings, log, places)


def _finish(task: _Task, options: EvalOptions) -> Metrics:
    responses = read_responses(task.log.path, options.samples)
    metrics = score(responses, options.wanted_pass_at, seed=options.seed, boxed=options.reward is None)
    write_summary(task.folder, task.settings, metrics)
    return metrics


def _sample(
    tasks: Sequence[_Task], config: RunConfig, tokenizer: Any, finish: Callable[[_Task], None]
) -> None:
    """``finish`` is called with each suite as soon as all of its responses are there."""
    backend = engine_backend(config.rollout.engine)
    with backend.serve(config, has_cuda(), lambda event: print(event, flush=True)) as servers:
        asyncio.run(_ask(tasks, config, tokenizer, servers.urls, finish))


async def _ask(
    tasks: Sequence[_Task],
    config: RunConfig,
    tokenizer: Any,
    urls: Sequence[str],
    finish: Callable[[_Task], None],
) -> None:
    """Sample and score all suites, one after the other, with the same engines."""
    rollout, folder = config.rollout, config.model.hf_path
    async with AsyncExitStack() as opened:
        scorer = RewardPool(config.reward, rollout.max_response_tokens)
        await scorer.start()
        opened.push_async_callback(scorer.close)
        robust, right_from = RobustScorer(scorer, config.reward.failed, _report), config.reward.correct
        pool = await open_pool(config, urls, str(select_device()), _report, opened)
        await pool.update(folder, _VERSION)
        stops, stepping = await open_environment(config.environment, folder, tokenizer, opened)
        most, max_turns = rollout.max_response_tokens, config.environment.max_turns
        turns = stepping and TurnTaker(stepping, Dataset((), tokenizer, stops), max_turns, most)
        sampling = Sampling(rollout.temperature, most, config.seed, stops, in_environment=turns is not None)
        for task in tasks:
            lost_minutes = rollout.engine_config.lost_minutes
            sampler = SuiteSampler(
                *(task.suite.prompts, tokenizer, pool, robust, sampling, _VERSION, lost_minutes),
                right_from,
                turns,
                task.suite.name,
            )
            await sampler.ask(task.places, _Progress(task))
            await asyncio.to_thread(finish, task)


class _Progress:
    """Progress of a suite: stores responses, and prints a progress line now and then."""

    def __init__(self, task: _Task) -> None:
        self._task, self._done, self._right, self._shown = task, 0, 0, 0

    def __call__(self, rows: Sequence[Row]) -> None:
        self._task.log.append_all(rows)
        self._done += len(rows)
        self._right += sum(row["correct"] for row in rows)
        total = len(self._task.places)
        if self._done == total or self._done - self._shown >= max(1, total // 20):
            self._shown = self._done
            right = self._right / self._done
            print(
                f"{self._task.suite.name}: {self._done} of {total} responses, {right:.1%} right", flush=True
            )


def _report(kind: str, **fields: Any) -> None:
    text = ", ".join(f"{name}={value}" for name, value in fields.items())
    print(f"{kind.replace('_', ' ')}: {text}", flush=True)
