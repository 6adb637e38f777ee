"""Run configuration: the dataclasses of recipes, their validation, and the recipe loader.

A recipe builds and returns a ``RunConfig`` from the sections exported here (or an ``SftConfig``). The
dataclasses are frozen and accept any value: ``check`` raises one ConfigError with every wrong type or, if
there is none, every broken range and rule.
"""

from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.algo.corrections import CorrectionsConfig
from bapo_megatron.algo.papo_schedule import PapoConfig as PolarityConfig
from bapo_megatron.algo.reference_kl_config import DistillationConfig, ReferenceKlConfig
from bapo_megatron.config.engines import EngineConfig, SglangConfig
from bapo_megatron.config.parts import PartConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.config.run import (
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    ProfileConfig,
    RunConfig,
    SftConfig,
)
from bapo_megatron.config.sections import (
    AlgorithmConfig,
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
)
from bapo_megatron.config.sources import EnvironmentConfig, SourceConfig

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "BoundsConfig",
    "CheckpointConfig",
    "CorrectionsConfig",
    "DataConfig",
    "DistillationConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PartConfig",
    "PolarityConfig",
    "ProfileConfig",
    "ReferenceKlConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SftConfig",
    "SglangConfig",
    "SourceConfig",
    "load_recipe",
]
