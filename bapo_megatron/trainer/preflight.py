"""Preflight checks of a run: model, layout, dataset, reward and engine, before any process group exists.

``check_run(config)`` returns None or raises ConfigError with the problem and the fix; nothing writes to the
run directory. `bapo train` calls it before it starts ranks, or under a launcher on every rank (dataset checks
on rank 0 only); `bapo doctor` calls the checks one by one (``run_checks``). ``check_sft`` is the same for
supervised fine-tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from bapo_megatron.algo.advantages import check_advantage
from bapo_megatron.algo.losses import build_loss
from bapo_megatron.algo.masks import check_masks
from bapo_megatron.algo.terms import check_terms
from bapo_megatron.checkpoint.export import WRITER
from bapo_megatron.checkpoint.fork import check_fork
from bapo_megatron.checkpoint.fork_record import ForkSource
from bapo_megatron.checkpoint.run_directory import check_same_run, has_steps
from bapo_megatron.config import (
    CheckpointConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
)
from bapo_megatron.config.validation import new_run_problems, raise_problems
from bapo_megatron.data.prepare.options import SUITES
from bapo_megatron.data.problem_sets import load_problems, missing_files, suite_path
from bapo_megatron.data.prompts import Tools
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape, carried_files, read_model_shape
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.hf.tokenizer import load_tokenizer, read_vocabulary
from bapo_megatron.policy.device import has_cuda
from bapo_megatron.policy.layout import data_parallel_size, layout_problems
from bapo_megatron.reward.functions import check_functions, needs_sandbox
from bapo_megatron.reward.sandbox.sandbox import checked_sandbox
from bapo_megatron.rollout.engines.backend import engine_backend
from bapo_megatron.rollout.sampler.step_batches import routes_path, step_path
from bapo_megatron.rollout.sampler.teacher import check_teacher
from bapo_megatron.rollout.sampler.turns import check_environments
from bapo_megatron.runtime.child_process import missing_program
from bapo_megatron.runtime.distributed import launched_world_size
from bapo_megatron.runtime.event_targets import target_problems
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.runtime.written_folders import check_replaceable
from bapo_megatron.trainer.reference import FIELD as REFERENCE_FIELD
from bapo_megatron.trainer.suites import load_suites


def check_run(
    config: RunConfig, read_dataset: bool = True, fork: ForkSource | None = None, samples_only: bool = False
) -> None:
    """Preflight of a run: raise ConfigError with the first problem (fields, model, fork, data).
    ``samples_only``: of a ``--rollout-only`` run, which has no layout."""
    for check in run_checks(config, read_dataset, fork, samples_only):
        check()


def run_checks(
    config: RunConfig,
    read_dataset: bool = True,
    fork: ForkSource | None = None,
    samples_only: bool = False,
    of_job: bool = False,
) -> Iterator[Callable[[], object]]:
    """Yield the checks of ``check_run``, dataset reads last; do not call the others if the first fails.
    ``samples_only``: as in ``check_run``. ``of_job``: servers that do not share the trainer's
    GPUs may get nodes of their own, as in a job."""

    @cache
    def tokenizer() -> Any:
        return check_model(config.model, ParallelConfig() if samples_only else config.parallel)

    @cache
    def tools() -> dict[str, Tools]:
        return check_environments(config, tokenizer(), has_steps(config.directory))

    yield config.check
    yield lambda: check_new_run(config)
    yield lambda: check_logging(config.logging)
    yield lambda: check_functions(config, config.reward_functions)
    yield lambda: check_advantage(config.algorithm, config.rollout.group_size)
    if not samples_only:
        yield lambda: build_loss(config.algorithm)
        yield lambda: check_masks(config.algorithm)
        yield lambda: check_terms(config.algorithm)
    yield lambda: check_teacher(config)
    yield tokenizer
    yield lambda: _check_context(config)
    if not samples_only:
        yield lambda: check_reference(config, tokenizer())
        yield lambda: check_fork(config, fork)
    yield lambda: check_same_run(config, samples_only)
    yield lambda: _check_engine(config, samples_only, of_job)
    yield lambda: check_route_replay(config.rollout, config.model)
    if read_dataset:
        yield lambda: check_hooks(config.checkpoint, config.logging)
        yield lambda: raise_problems(list(_missing_files(config)))
    if config.rollout.replay is not None:
        yield lambda: _check_replay(config)
    else:
        yield lambda: _check_weights(config)
    if config.rollout.replay is None and read_dataset:
        yield lambda: _check_sandbox(config)
        yield tools
        yield lambda: load_problems(
            config.data, config.reward.function, tokenizer(), tools(), has_steps(config.directory)
        )
        yield lambda: load_suites(config, tokenizer(), tools())


def check_new_run(config: RunConfig) -> None:
    """Raise ConfigError for ``new_run_problems``, unless the run has a finished step."""
    if not has_steps(config.directory):
        raise_problems(list(new_run_problems(config)))


def check_hooks(checkpoint: CheckpointConfig, logging: LoggingConfig) -> None:
    """Raise ConfigError if a hook (after_export, on_event) lacks its program or environment variable."""
    problems = list(target_problems(logging.on_event))
    command = checkpoint.after_export
    if command is not None and (problem := missing_program(command)):
        problems.append(f"checkpoint.after_export={command!r}: {problem}; install it, or name another")
    raise_problems(problems)


def _missing_files(config: RunConfig) -> Iterator[str]:
    """Yield an error for each missing data or suite file. The tokenizer checks read the rows."""
    if config.rollout.replay is None:
        yield from missing_files(config.data)
    for suite in config.evaluation.suites if config.evaluation.every else ():
        try:
            suite_path(suite, SUITES)
        except ConfigError as error:
            yield str(error)


def _check_weights(config: RunConfig) -> None:
    """Let the engine check the weights. For a folder without a model the trainer's error suffices."""
    read_model_shape(config.model.hf_path)
    engine_backend(config.rollout.engine).check_weights(config.model.hf_path)


def _check_sandbox(config: RunConfig) -> None:
    if needs_sandbox(config.reward, config.reward_functions):
        checked_sandbox(config.reward.allow_weak_sandbox)


def check_sft(config: SftConfig) -> None:
    """Preflight of supervised fine-tuning: raise ConfigError for the first problem."""
    config.check()
    tokenizer = check_model(config.model, config.parallel)
    check_replaceable(config.output, WRITER)
    from bapo_megatron.trainer.sft import load_solutions  # imports megatron-core, which takes seconds

    load_solutions(config, tokenizer)


def check_model(model: ModelConfig, parallel: ParallelConfig) -> Any:
    """Check a model folder and a layout; return the tokenizer. Raises ConfigError if the weights
    (``check_weights``), the tokenizer or the layout does not fit."""
    shape = check_weights(model, parallel)
    carried_files(model.hf_path)  # exports copy them, and engines read them
    tokenizer = load_tokenizer(model.hf_path)
    largest = max(tokenizer.get_vocab().values())
    if largest >= shape.vocab:
        raise ConfigError(
            f"model.hf_path={model.hf_path}: the tokenizer has ids up to {largest}, but the model's "
            f"vocab_size is {shape.vocab}: tokenizer and model do not belong together"
        )
    return tokenizer


def check_weights(model: ModelConfig, parallel: ParallelConfig) -> ModelShape:
    """Check a model's weights and the device; return the model's shape. Raises ConfigError if the HF folder
    lacks a tensor, the layout cannot split it, or torch cannot use this machine's GPU."""
    has_cuda()
    shape = read_model_shape(model.hf_path)
    problems = []
    try:
        HfReader(model.hf_path).check(shape)
    except ConfigError as error:
        problems.append(str(error))
    replicas = data_parallel_size(parallel, launched_world_size())
    problems += layout_problems(replace(parallel, data=replicas), shape)
    raise_problems(problems)
    return shape


def check_reference(config: RunConfig, tokenizer: Any) -> None:
    """Check the frozen reference's folder, if any: tensors, shape and vocabulary. Raises ConfigError unless
    shape and token ids equal the policy's, whose place the reference takes."""
    folder = config.algorithm.reference_kl.model
    if not config.algorithm.reference_kl.enabled or folder is None:
        return
    ours = read_model_shape(config.model.hf_path)
    try:
        theirs = read_model_shape(folder)
        HfReader(folder).check(theirs)
        vocabulary = read_vocabulary(folder)
    except ConfigError as error:  # the folder readers name the policy's field
        raise ConfigError(str(error).replace("model.hf_path=", f"{REFERENCE_FIELD}=")) from None
    if replace(theirs, max_positions=ours.max_positions) != ours:
        raise ConfigError(
            f"{REFERENCE_FIELD}={folder} has another shape than the policy {config.model.hf_path}: the "
            "reference takes the policy's place in its own model, so give one of the same shape"
        )
    if vocabulary != tokenizer.get_vocab():
        raise ConfigError(
            f"{REFERENCE_FIELD}={folder} has another tokenizer vocabulary than the policy "
            f"{config.model.hf_path}: their log-probs would be of different tokens; give a reference with "
            "the policy's vocabulary"
        )


def _check_context(config: RunConfig) -> None:
    positions = read_model_shape(config.model.hf_path).max_positions
    longest = {"rollout": config.rollout.max_response_tokens}
    if config.evaluation.every:
        longest["evaluation"] = config.evaluation_sampling[1]
    for section, response in longest.items():
        asked = config.data.max_prompt_tokens + response
        if asked > positions:
            raise ConfigError(
                f"data.max_prompt_tokens + {section}.max_response_tokens = {asked} is more than the model's "
                f"max_position_embeddings ({positions}): lower one of them"
            )


def _check_engine(config: RunConfig, samples_only: bool = False, of_job: bool = False) -> None:
    if config.rollout.replay is None:
        gpus, training = gpus_and_ranks(config)
        apart = samples_only or (of_job and not config.rollout.sglang.colocated)
        engine_backend(config.rollout.engine).check(config.rollout, gpus, 0 if apart else training)


def gpus_and_ranks(config: RunConfig) -> tuple[int, int]:
    """Return the number of this machine's GPUs, and of the processes that train on GPUs."""
    gpus = torch.cuda.device_count() if has_cuda() else 0
    ranks = data_parallel_size(config.parallel, launched_world_size()) * config.parallel.model_size
    return gpus, ranks if gpus else 0


def check_route_replay(rollout: RolloutConfig, model: ModelConfig) -> None:
    """Raise ConfigError if ``rollout.route_replay`` is on and model experts or engine routes are missing."""
    asked = f"rollout.route_replay={rollout.route_replay}"
    if rollout.route_replay == "off":
        return
    if read_model_shape(model.hf_path).experts is None:
        raise ConfigError(
            f"{asked}: model.hf_path={model.hf_path} has no experts, so no routes; set it to off"
        )
    if rollout.replay is None and not engine_backend(rollout.engine).returns_routes:
        raise ConfigError(
            f"{asked}: rollout.engine={rollout.engine} returns no routes (its returns_routes is false); set "
            "it to off, or use an engine that returns them"
        )


def _check_replay(config: RunConfig) -> None:
    replayed = config.rollout.replay
    assert replayed is not None
    journal = RunPaths(replayed).journal
    if not journal.is_dir():
        raise ConfigError(f"rollout.replay={replayed} holds no journal; give the directory of a run")
    if replayed.resolve() == config.directory.resolve():
        raise ConfigError(f"rollout.replay={replayed} is this run itself; give it another --run-dir")
    for step in range(1, config.steps + 1):
        if not step_path(journal, step).is_file():
            raise ConfigError(
                f"rollout.replay={replayed} has no rollouts of step {step}, but steps={config.steps}: lower "
                "--steps, or replay a run that was made with --rollout.keep-steps None"
            )
        if config.rollout.route_replay != "off" and not routes_path(journal, step).is_file():
            raise ConfigError(
                f"rollout.route_replay={config.rollout.route_replay}: rollout.replay={replayed} has no "
                f"routes of step {step}, because that run asked for none; set it to off"
            )


def check_logging(logging: LoggingConfig) -> None:
    """Raise ConfigError if a chosen tracker is not installed."""
    raise_problems(
        [
            f"logging.trackers: {name} is not installed: "
            "`pip install 'bapo-megatron[trackers]'`, or take it out"
            for name in logging.chosen
            if not _is_installed(name)
        ]
    )


def _is_installed(module: str) -> bool:
    """Return whether ``module`` can be imported; a folder of that name in the working directory is none."""
    spec = find_spec(module)
    return spec is not None and spec.has_location
