"""The published study's YAML files: one model, where its vectors are, what to compute, where results go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from qkscope.analyses.options import AnalysisOptions, PcaOptions, RotationOptions
from qkscope.config import Count, StrictModel, load_yaml, options_model
from qkscope.errors import ConfigError
from qkscope.runs.selection import DatasetOptions, Selection


class _Dataset(StrictModel):
    dataset: Annotated[str, Field(min_length=1)]
    """Hub id, ``hf://`` URL or local folder."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    rope: dict[str, Any] | None = None
    """Rotary encoding, such as {theta: 500000}; by default what the dataset's card says."""


class _Ordered(StrictModel):
    @model_validator(mode="after")
    def _ordered(self) -> Any:
        low, high = vars(self)["low"], vars(self)["high"]
        if low > high:
            raise ValueError(f"low ({low}) must not exceed high ({high})")
        return self


if TYPE_CHECKING:
    DataConfig: TypeAlias = Any
    PcaConfig: TypeAlias = Any
    RotationConfig: TypeAlias = Any
else:
    DataConfig = options_model("DataConfig", DatasetOptions, Selection, AnalysisOptions, base=_Dataset)
    PcaConfig = options_model("PcaConfig", PcaOptions, base=_Ordered)
    RotationConfig = options_model("RotationConfig", RotationOptions)


class OutputConfig(StrictModel):
    """The folder for tables."""

    results_dir: Path = Path("results")


class Config(StrictModel):
    """One model's analysis."""

    model: Annotated[str, Field(min_length=1)]
    """Label of the model in tables."""
    family: str = ""
    """Label of its family."""
    data: DataConfig
    pca: PcaConfig = PcaConfig()
    rotation: RotationConfig = RotationConfig()
    output: OutputConfig = OutputConfig()
    workers: Count | Literal["auto"] = "auto"


def load_configs(paths: list[Path]) -> list[Config]:
    """Read config files; a folder stands for every ``*.yaml`` in it, by name."""
    files: list[Path] = []
    for argument in paths:
        path = _existing_path(argument)
        in_path = sorted([*path.glob("*.yaml"), *path.glob("*.yml")]) if path.is_dir() else [path]
        if not in_path:
            raise ConfigError(f"{path} holds no .yaml file")
        files += in_path
    return [load_config(file) for file in files]


def load_config(path: Path) -> Config:
    """Read one config file; errors name the file, the key and, for a misspelt key, the nearest valid one."""
    return load_yaml(path, Config)


def _existing_path(path: Path) -> Path:
    """An existing path; - and _ in folder names may be swapped, since the published notes spell both."""
    if path.exists():
        return path
    for old, new in (("_", "-"), ("-", "_")):
        alternative = Path(*(part.replace(old, new) if part != path.name else part for part in path.parts))
        if alternative.exists():
            return alternative
    raise ConfigError(f"{path} does not exist")
