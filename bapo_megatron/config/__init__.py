"""Run configuration: the dataclasses of recipes, their validation, and the recipe loader.

A recipe builds and returns a ``RunConfig`` from the sections exported here (or an ``SftConfig``). The
dataclasses are frozen and accept any value: ``check`` raises one ConfigError with every wrong type or, if
there is none, every broken range and rule.
"""

from bapo_megatron.algo.bounds import BoundsConfig as BoundsConfig
from bapo_megatron.algo.corrections import CorrectionsConfig as CorrectionsConfig
from bapo_megatron.algo.papo_schedule import PapoConfig
from bapo_megatron.algo.reference_kl_config import DistillationConfig as DistillationConfig
from bapo_megatron.algo.reference_kl_config import ReferenceKlConfig as ReferenceKlConfig
from bapo_megatron.config.engines import EngineConfig as EngineConfig
from bapo_megatron.config.engines import SglangConfig as SglangConfig
from bapo_megatron.config.parts import PartConfig as PartConfig
from bapo_megatron.config.recipe import load_recipe as load_recipe
from bapo_megatron.config.run import CheckpointConfig as CheckpointConfig
from bapo_megatron.config.run import EvaluationConfig as EvaluationConfig
from bapo_megatron.config.run import LoggingConfig as LoggingConfig
from bapo_megatron.config.run import ProfileConfig as ProfileConfig
from bapo_megatron.config.run import RunConfig as RunConfig
from bapo_megatron.config.run import SftConfig as SftConfig
from bapo_megatron.config.sections import AlgorithmConfig as AlgorithmConfig
from bapo_megatron.config.sections import BatchConfig as BatchConfig
from bapo_megatron.config.sections import DataConfig as DataConfig
from bapo_megatron.config.sections import ModelConfig as ModelConfig
from bapo_megatron.config.sections import OptimizerConfig as OptimizerConfig
from bapo_megatron.config.sections import ParallelConfig as ParallelConfig
from bapo_megatron.config.sections import RewardConfig as RewardConfig
from bapo_megatron.config.sections import RolloutConfig as RolloutConfig
from bapo_megatron.config.sources import EnvironmentConfig as EnvironmentConfig
from bapo_megatron.config.sources import SourceConfig as SourceConfig

PolarityConfig = PapoConfig
