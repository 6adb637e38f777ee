"""Run configuration: the dataclasses of recipes, their validation, and the recipe loader.

A recipe builds a ``RunConfig`` from the sections here. The dataclasses are frozen plain data, and check
nothing by themselves: ``RunConfig.check`` raises one ConfigError with all mistakes (of types, else of ranges
and rules), and so does ``SftConfig.check``.
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
