"""A configuration whose phases are a few steps long."""

from typing import Any

from cdrmix.config.load import load_config, shipped
from cdrmix.config.schema import Config

TINY = shipped("model_configs") / "cdrmix-reason-tiny.yaml"


def config(*training: str) -> Config:
    lengths = ("memory_steps=3", "adapter_steps=0", "joint_steps=2", "policy_steps=1")
    settings = [f"stage_b.training.{setting}" for setting in (*lengths, *training)]
    return load_config(TINY, settings)


def section(config: Config) -> Any:
    assert config.stage_b is not None
    return config.stage_b
