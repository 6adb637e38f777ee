"""Evaluation of a checkpoint: samples and scores the missing responses of each suite, writes the summaries.

``evaluate(options)`` starts and ends the same engines and reward workers as training uses (``rollout/``,
``reward/``) and returns each suite's folder and metrics; a repeated call continues an interrupted one. A
model that is not a Hugging Face folder is first converted to one in the output folder, for later evaluations.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bapo_megatron.config import RewardConfig, RunConfig
from bapo_megatron.data.problem_sets import REWARD_FUNCTION, load_suite, programs_of
from bapo_megatron.errors import ConfigError, RunStopped, printable
from bapo_megatron.evaluation.options import EvalOptions
from bapo_megatron.evaluation.responses import (
    read_responses,
    write_summary,
)
from bapo_megatron.evaluation.scoring import score, vote_for
from bapo_megatron.evaluation.suite_task import Progress, SuiteTask, open_task
from bapo_megatron.evaluation.unjudged import score_again
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.hf.weight_files import files_left_out
from bapo_megatron.policy.device import has_cuda, select_device
from bapo_megatron.reward.code_tests import is_tests
from bapo_megatron.reward.functions import check_function
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.reward.sandbox.sandbox import checked_sandbox
from bapo_megatron.rollout.engines.backend import engine_backend
from bapo_megatron.rollout.engines.colocated_pool import open_pool
from bapo_megatron.rollout.engines.pool import EnginePool, EnginesGone
from bapo_megatron.rollout.engines.requests import Dataset, limits_of, stop_token_ids
from bapo_megatron.rollout.sampler.held_out import judged_row, whole_response
from bapo_megatron.rollout.sampler.response import Sampling
from bapo_megatron.rollout.sampler.scoring import Scorer
from bapo_megatron.rollout.sampler.turns import TurnTaker, check_environment, open_environment, within
from bapo_megatron.runtime.files import check_files_inside, open_lock, sha256_of, write_atomically
from bapo_megatron.runtime.jsonl_log import Row
from bapo_megatron.runtime.written_folders import is_run
from bapo_megatron.types import Metrics, Prompt
from checkpoints_tools.formats.locate import Format, Location, locate
from checkpoints_tools.megatron_to_hf import to_hf

Keep = Callable[[Sequence[Row]], None]  # stores responses durably; may block

_LOOK_S = 1.0


class SuiteSampler:
    """Sampler of one suite's responses, on a started engine pool and reward pool: ``ask`` samples and scores
    one response per given (problem, sample), and passes its row to a callback that stores it."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: Any,
        pool: EnginePool,
        scorer: Scorer,
        sampling: Sampling,
        version: int,
        lost_minutes: float,
        right_from: float = 1.0,
        turns: TurnTaker | None = None,
        name: str = "",
    ) -> None:
        """``version``: version of the weights; tokens of other versions are refused. ``lost_minutes``:
        maximum wait without any engine. ``right_from``: lowest score of a right response. ``turns``: turn
        taker of the environment, if any. ``name``: suite name, part of episode names."""
        self._prompts, self._tokenizer = prompts, tokenizer
        self._pool, self._scorer, self._sampling, self._version = pool, scorer, sampling, version
        self._turns, self._name = turns, name
        self._lost_minutes, self._right_from = lost_minutes, right_from

    async def ask(self, places: Iterable[tuple[int, int]], keep: Keep) -> None:
        """Sample and score a response for every (problem, sample), and store its row with ``keep``. Raises
        RunStopped if no engine works for ``lost_minutes``, or one problem kills engine after engine."""
        waiting, storing = iter(places), asyncio.Lock()

        async def answer() -> None:
            for place in waiting:
                row = await self._row(*place)
                async with storing:
                    await asyncio.to_thread(keep, [row])

        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch_engines())
                await asyncio.wait([group.create_task(answer()) for _ in range(self._pool.capacity)])
                watching.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _watch_engines(self) -> None:
        while True:
            try:
                self._pool.check(self._lost_minutes)
            except EnginesGone as gone:
                raise RunStopped(str(gone)) from gone
            await asyncio.sleep(_LOOK_S)

    async def _row(self, problem: int, sample: int) -> Row:
        prompt, turns = self._prompts[problem], self._turns
        name = f"{problem}-{sample}" if turns is None else f"{self._name}-{problem}-{sample}"
        place = (0, problem, sample)
        response = await whole_response(self._pool, self._sampling, self._version, prompt, name, place, turns)
        row, text = await judged_row(self._scorer, self._tokenizer, prompt, response, self._right_from)
        return {"problem": problem, "sample": sample, **row, "answer": vote_for(row["answer"]), "text": text}


_FILES = (".safetensors", ".json", ".jinja", ".model")
"""Suffixes of files in the model's digest: weights, configuration, tokenizer, chat template."""


@dataclass(frozen=True)
class Model:
    """Model of an evaluation: Hugging Face folder, original checkpoint, and SHA-256 (``model_digest``)."""

    folder: Path
    checkpoint: str
    """Path of the original checkpoint or HF folder."""
    sha256: str


def output_of(location: Location) -> Path:
    """Return the default output folder: ``evaluations/`` and a name derived from the checkpoint path."""
    folder = location.folder.resolve()
    if folder.name == "policy" and location.format is not Format.HF:  # RUN/checkpoints/step_000120/policy
        return Path("evaluations") / f"{folder.parents[2].name}_{folder.parent.name}"
    return Path("evaluations") / f"{folder.parent.name}_{folder.name}"


def find_checkpoint(path: Path, step: str) -> Location:
    """Return the checkpoint at ``path`` and ``step``. Raises CheckpointError or ConfigError without one."""
    location = locate(path, step)
    if location.format is Format.HF:
        check_files_inside(location.folder)
        if not (location.folder / "config.json").is_file():
            raise ConfigError(f"checkpoint={location.folder} holds no config.json; give a whole model folder")
    return location


def hf_model(location: Location, reference: Path | None, output: Path) -> Model:
    """Return the checkpoint's Hugging Face model: the folder itself, or its conversion in ``output/model``.
    Reuses an existing conversion. Raises ConfigError if that was made from another checkpoint."""
    source = str(location.folder.resolve())
    if location.format is Format.HF:
        return Model(location.folder, source, model_digest(location.folder))
    folder, note = output / "model", output / "model.json"
    output.mkdir(parents=True, exist_ok=True)
    with open_lock(output / ".model.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # array jobs share it: the first converts
        if folder.exists():
            made_of = json.loads(note.read_text())["checkpoint"]
            if made_of != source:
                raise ConfigError(f"{folder} was made of {made_of}, not of {source}: give another --output")
        else:
            print(f"converting {source} to {folder}", flush=True)
            write_atomically(note, json.dumps({"checkpoint": source}) + "\n")
            to_hf(location.folder, folder, reference)
    return Model(folder, source, model_digest(folder))


def model_digest(folder: Path) -> str:
    """Return the SHA-256 over the names and SHA-256 of weights, configuration and tokenizer files. Ignores
    safetensors files that are not part of the model (``hf/weight_files.py``)."""
    others = files_left_out(folder)
    paths = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.name.endswith(_FILES) and path.name not in others
    )
    with ThreadPoolExecutor(8) as threads:
        digests = list(threads.map(sha256_of, paths))
    lines = "".join(f"{digest}  {path.name}\n" for digest, path in zip(digests, paths, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


_VERSION = 1  # weight version of the model in the engines; 0 is their initial version

Results = dict[str, tuple[Path, Metrics]]
"""Folder and metrics of each suite, by name."""


def evaluate(options: EvalOptions) -> Results:
    """Sample and score the missing responses, rescore unjudged ones, write the summaries, and return folder
    and metrics of each suite. Raises ConfigError for bad options before sampling, RunStopped if the engines
    are gone or the disk is full (resumable)."""
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
    # begun=True: evaluate a model as trained, even by a run of an earlier version.
    tools = check_environment(options.environment, model.folder, tokenizer, begun=True)
    function, most_tokens = options.reward or REWARD_FUNCTION, options.max_prompt_tokens
    suites = [
        load_suite(name, tokenizer, most_tokens, options.suites, function, tools_of=lambda _: tools)
        for name in options.names
    ]
    longest = max(len(prompt.token_ids_P) for suite in suites for prompt in suite.prompts)
    _check_room(options, longest, limits_of(model.folder).context)
    with ExitStack() as opened:
        about = {"checkpoint": model.checkpoint, "sha256": model.sha256}
        tasks = [open_task(opened, suite, options, about, output) for suite in suites]
        results: Results = {}

        def finish(task: SuiteTask) -> None:
            results[task.suite.name] = task.folder, _finish(task, options)

        for task in tasks:
            if not task.places and not task.unjudged:
                finish(task)
        if missing := [task for task in tasks if task.places or task.unjudged]:
            programs = any(is_tests(prompt.ground_truth) for suite in suites for prompt in suite.prompts)
            samples = any(task.places for task in missing)
            if samples and programs and options.reward is None and options.sandbox_url is None:
                checked_sandbox(options.allow_weak_sandbox)
            config = options.run_config(model.folder, output, longest, programs)
            _sample(missing, config, tokenizer, finish)
    return {suite.name: results[suite.name] for suite in suites}


def _check_room(options: EvalOptions, longest: int, room: int) -> None:
    if longest + options.max_response_tokens > room:
        raise ConfigError(
            f"max_response_tokens={options.max_response_tokens} and the longest prompt ({longest} tokens) "
            f"are more than the model's context of {room}: set --max-response-tokens {max(1, room - longest)}"
        )


def _finish(task: SuiteTask, options: EvalOptions) -> Metrics:
    programs = programs_of(task.suite, options.reward or REWARD_FUNCTION)
    stored = read_responses(task.log.path, options.samples)
    responses = [
        replace(response, answer=None) if response.problem in programs else response for response in stored
    ]
    boxed = options.reward is None and not programs
    metrics = score(responses, options.wanted_pass_at, seed=options.seed, boxed=boxed)
    write_summary(task.folder, task.settings, metrics)
    return metrics


def _sample(
    tasks: Sequence[SuiteTask], config: RunConfig, tokenizer: Any, finish: Callable[[SuiteTask], None]
) -> None:
    """Rescore unjudged responses, sample the missing ones, and call ``finish`` with each complete suite."""
    for task in tasks:
        if task.unjudged:
            prompts, log = task.suite.prompts, task.log
            score_again(task.suite.name, task.unjudged, prompts, config, log, _report)
    for task in tasks:
        if not task.places:
            finish(task)
    tasks = [task for task in tasks if task.places]
    if not tasks:
        return
    backend = engine_backend(config.rollout.engine)
    with backend.serve(config, has_cuda(), lambda event: print(event, flush=True)) as servers:
        asyncio.run(_ask(tasks, config, tokenizer, servers.urls, finish))


async def _ask(
    tasks: Sequence[SuiteTask],
    config: RunConfig,
    tokenizer: Any,
    urls: Sequence[str],
    finish: Callable[[SuiteTask], None],
) -> None:
    rollout, folder = config.rollout, config.model.hf_path
    async with AsyncExitStack() as opened:
        rewards = RewardPool(config.reward, rollout.max_response_tokens)
        await rewards.start()
        opened.push_async_callback(rewards.close)
        scorer, right_from = Scorer(rewards, config.reward.failed, _report), config.reward.correct
        pool = await open_pool(config, urls, str(select_device()), _report, opened)
        await pool.update(folder, _VERSION)
        stepping = await open_environment(config.environment, folder, tokenizer, _report, opened)
        stops, most = stop_token_ids(folder, tokenizer), rollout.max_response_tokens
        turns = TurnTaker(stepping, Dataset((), tokenizer, stops), most) if stepping else None
        sampling = within(Sampling(rollout.temperature, most, config.seed, stops), stepping)
        for task in tasks:
            lost_minutes = rollout.engine_config.lost_minutes
            sampler = SuiteSampler(
                task.suite.prompts,
                tokenizer,
                pool,
                scorer,
                sampling,
                _VERSION,
                lost_minutes,
                right_from,
                turns,
                task.suite.name,
            )
            await sampler.ask(task.places, Progress(task))
            await asyncio.to_thread(finish, task)


def _report(kind: str, **fields: Any) -> None:
    text = ", ".join(f"{name}={value}" for name, value in fields.items())
    print(printable(f"{kind.replace('_', ' ')}: {text}"), flush=True)
