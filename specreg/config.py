"""What a run is configured with: `EngineConfig` and its part `SpeculativeConfig`.

Both are frozen and refuse what they do not know. Whatever is wrong with a configuration, in
whatever shape it arrives, is a `ConfigError`.
"""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from typing_extensions import Self

from specreg.errors import ConfigError
from specreg.memory import DTYPE_BYTES
from specreg.speculative_keys import SPECULATIVE_KEYS, KeyUse
from specreg.spelling import known_names

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["EngineConfig", "SpeculativeConfig", "config_error"]

DEVICES = ("cpu", "cuda")
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def config_error(error: ValidationError, where: str) -> ConfigError:
    """A pydantic error as a `ConfigError`: every field that is wrong, with what it got."""
    problems = []
    for item in error.errors(include_url=False):
        field = ".".join([where, *(str(part) for part in item["loc"])])
        problems.append((field, f"{item['input']!r}: {item['msg']}"))
    return ConfigError(
        "the configuration is not valid",
        where=", ".join(dict.fromkeys(field for field, _ in problems)),
        got="; ".join(got for _, got in problems),
        fix="correct the value, or remove the key to get its default",
    )


def _normalised(data: Any, where: str) -> dict[str, Any]:
    """`data` as a dictionary whose keys use underscores; JSON text is parsed."""
    if isinstance(data, str | bytes):
        try:
            data = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                "the configuration is not JSON",
                where=where,
                got=f"{type(error).__name__}: {error}; allowed: a JSON object",
                fix='write it like \'{"method": "...", "num_speculative_tokens": 5}\'',
            ) from error
    if not isinstance(data, Mapping):
        raise ConfigError(
            "the configuration is not a mapping",
            where=where,
            got=f"{type(data).__name__}; allowed: a mapping of keys to values",
            fix="write it as key: value pairs",
        )
    normalised: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_") if isinstance(key, str) else None
        if name is None or name in normalised:
            raise ConfigError(
                "a configuration key is given twice"
                if name
                else "a configuration key is no string",
                where=where,
                got=f"{key!r}; allowed: each key once, as a string",
                fix="keep one spelling of the key",
            )
        normalised[name] = value
    return normalised


class _Config(BaseModel):
    """Frozen, strict, and failing only with `ConfigError`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    _where: ClassVar[str]

    @classmethod
    @abstractmethod
    def _prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The fields in `data`: aliases resolved, nulls dropped, foreign keys refused."""

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, cls):
            return handler(data)
        try:
            return handler(cls._prepare(_normalised(data, cls._where)))
        except ValidationError as error:
            raise config_error(error, cls._where) from None

    @classmethod
    def parse(cls, data: Mapping[str, Any] | str) -> Self:
        """The configuration in a mapping or in JSON text. Raises `ConfigError`."""
        return cls.model_validate(data)


class SpeculativeConfig(_Config):
    """How to speculate: the JSON that `vllm serve --speculative-config` takes.

    Attributes:
        method: value under which a speculator is registered; None detects it from the draft config.
        model: draft checkpoint, a directory or a known name.
        num_speculative_tokens: K; None takes what the draft config says.
        draft_sample_method: `greedy` takes the drafter's argmax, `probabilistic` draws from it.
        rejection_sample_method: how drafts are verified.
        synthetic_acceptance_rates: probability that drafts 0..i are all accepted (`synthetic`).
        synthetic_acceptance_length: mean tokens a step in [1, K+1] (`synthetic`).
        max_model_len: longest request that is drafted for; None is the run's.
        draft_tensor_parallel_size: accepted when equal to the run's.
        parallel_drafting: accepted when it says what the speculator does.
        enforce_eager: drafting is not captured in CUDA graphs, though the rest of the run may be.
        plugin: distribution that the speculator must come from.
        options: keys that the core does not know, for the selected speculator's `options_model`.
    """

    _where: ClassVar[str] = "speculative_config"

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = Field(None, gt=0)
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "block", "synthetic"] = "standard"
    synthetic_acceptance_rates: (
        Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(strict=False)] | None
    ) = None
    synthetic_acceptance_length: float | None = Field(None, ge=1)
    max_model_len: int | None = Field(None, gt=0)
    draft_tensor_parallel_size: int | None = Field(None, gt=0)
    parallel_drafting: bool | None = None
    enforce_eager: bool | None = None
    plugin: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def _prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        options: dict[str, Any] = {}
        for key, value in data.items():
            if value is None:
                continue
            row = SPECULATIVE_KEYS.get(key)
            if key in cls.model_fields:
                fields[key] = value
            elif row is None or row.use is KeyUse.PLUGIN_OPTION:
                options[key] = value
            else:
                row.admit(key, value)
        given = fields.get("options", {})
        if isinstance(given, Mapping):
            fields["options"] = {**given, **options}
        if fields.get("rejection_sample_method") == "fly":
            raise ConfigError(
                f"'fly' verification is not offered: {SPECULATIVE_KEYS['fly_window_size'].reason}",
                where="speculative_config.rejection_sample_method",
                got="'fly'; allowed: 'standard', 'block', 'synthetic'",
                fix="choose a lossless method",
            )
        return fields

    @model_validator(mode="after")
    def _check_synthetic(self) -> Self:
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        k = self.num_speculative_tokens
        if self.rejection_sample_method != "synthetic":
            if rates is not None or length is not None:
                raise _synthetic_error(
                    f"method {self.rejection_sample_method!r}; allowed: 'synthetic'",
                    "set rejection_sample_method to 'synthetic', or remove the key",
                )
        elif (rates is None) == (length is None):
            raise _synthetic_error(
                f"rates={rates}, length={length}; allowed: exactly one of the two",
                "give synthetic_acceptance_rates or synthetic_acceptance_length",
            )
        elif rates is not None and list(rates) != sorted(rates, reverse=True):
            raise _synthetic_error(
                f"{rates}; allowed: rates that do not increase",
                "rate i is the probability that the first i+1 drafts are all accepted",
            )
        elif rates is not None and (not rates or (k is not None and len(rates) != k)):
            raise _synthetic_error(
                f"{len(rates)} rates; allowed: num_speculative_tokens = {k}",
                "give one rate a draft token",
            )
        elif length is not None and k is not None and length > k + 1:
            raise _synthetic_error(
                f"length {length}; allowed: 1 to num_speculative_tokens + 1 = {k + 1}",
                "lower synthetic_acceptance_length",
            )
        return self


def _synthetic_error(got: str, fix: str) -> ConfigError:
    return ConfigError(
        "synthetic acceptance cannot be configured like this",
        where="speculative_config.synthetic_acceptance_rates, synthetic_acceptance_length",
        got=got,
        fix=fix,
    )


class EngineConfig(_Config):
    """A run: the target, the ranks, the limits and how to speculate.

    Attributes:
        target: directory of the target model, its `config.json`, or a known name.
        speculative: how to speculate (`speculative_config` is the same key); None does not.
        tensor_parallel_size: ranks.
        max_num_seqs: requests that run at once, which is the number of slots.
        max_model_len: longest request in tokens; None takes the target's limit.
        max_num_batched_tokens: tokens a step.
        enable_batch_sharded_sampling: each rank samples and verifies the requests it owns.
        draft_logits_sharding: `require` refuses to run unsharded, `off` keeps the replicated cache.
        draft_logits_layout: `auto` takes the smallest possible layout.
        draft_watermarker, rejection_sampler: names that plugins registered; None is the stock one.
        dtype: of weights and activations; `auto` takes the target config's.
        vocab_size: overrides the target config's.
        device: `cpu` or `cuda` (ROCm as well).
        memory_budget_gib: memory of a rank for weights, caches and KV, on CPU.
        gpu_memory_utilization: share of a device's memory for the same, on GPU.
        block_size: tokens a KV block.
        num_kv_blocks: overrides the number of KV blocks that memory would give.
        enforce_eager: nothing is captured in CUDA graphs; no token changes.
        cuda_graph_sizes: numbers of requests that batches are padded to, each with graphs of its
            own; larger batches run unpadded and eagerly. None is powers of two and max_num_seqs on
            GPUs, and no size elsewhere.
        seed: of requests that bring none.
    """

    _where: ClassVar[str] = "config"

    target: str = ""
    speculative: SpeculativeConfig | None = None
    tensor_parallel_size: int = Field(1, gt=0)
    max_num_seqs: int = Field(8, gt=0)
    max_model_len: int | None = Field(None, gt=0)
    max_num_batched_tokens: int = Field(512, gt=0)
    enable_batch_sharded_sampling: bool = False
    draft_logits_sharding: Literal["auto", "require", "off"] = "auto"
    draft_logits_layout: Literal["auto", "dense", "draft_vocab", "top_k"] = "auto"
    draft_watermarker: str | None = None
    rejection_sampler: str | None = None
    dtype: str = "auto"
    vocab_size: int | None = Field(None, gt=0)
    device: str = "cpu"
    memory_budget_gib: float = Field(4.0, gt=0)
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    block_size: int = Field(16, gt=0)
    num_kv_blocks: int | None = Field(None, gt=0)
    enforce_eager: bool = False
    cuda_graph_sizes: (
        Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(strict=False)] | None
    ) = None
    seed: int = 0

    @classmethod
    def _prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        if "speculative_config" in data:
            if "speculative" in data:
                raise ConfigError(
                    "a configuration key is given twice",
                    where="config.speculative",
                    got="both 'speculative' and 'speculative_config'; allowed: one of them",
                    fix="remove one",
                )
            data["speculative"] = data.pop("speculative_config")
        for key in data:
            if key not in cls.model_fields:
                raise ConfigError(
                    f"there is no configuration key {key!r}",
                    where=f"config.{key}",
                    got=f"{key!r}; {known_names(key, cls.model_fields)}",
                    fix="correct the spelling or remove the key",
                )
        return {key: value for key, value in data.items() if value is not None}

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if device not in DEVICES:
            raise ConfigError(
                "there is no such device",
                where="config.device",
                got=f"{device!r}; {known_names(device, DEVICES)}",
                fix="name a kind of device; each rank takes the one of its own number",
            )
        return device

    @field_validator("dtype")
    @classmethod
    def _check_dtype(cls, dtype: str) -> str:
        dtype = _DTYPE_ALIASES.get(dtype, dtype)
        allowed = ["auto", *DTYPE_BYTES]
        if dtype not in allowed:
            raise ConfigError(
                "there is no such dtype",
                where="config.dtype",
                got=f"{dtype!r}; {known_names(dtype, allowed)}",
                fix="name one of the known types, or 'auto' for the checkpoint's",
            )
        return dtype

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        largest = max(self.cuda_graph_sizes or (0,))
        if largest > self.max_num_seqs:
            raise ConfigError(
                "a CUDA graph would be for more requests than run at once",
                where="config.cuda_graph_sizes",
                got=f"{largest}; allowed: at most max_num_seqs = {self.max_num_seqs}",
                fix="remove the size, or raise max_num_seqs",
            )
        speculative = self.speculative
        if speculative is None:
            return self
        ranks = speculative.draft_tensor_parallel_size
        if ranks is not None and ranks != self.tensor_parallel_size:
            raise ConfigError(
                "the drafter cannot have a tensor-parallel size of its own",
                where="speculative_config.draft_tensor_parallel_size",
                got=f"{ranks}; allowed: null or tensor_parallel_size = {self.tensor_parallel_size}",
                fix="remove the key: every rank drafts every request",
            )
        draft_len, run_len = speculative.max_model_len, self.max_model_len
        if draft_len is not None and run_len is not None and draft_len > run_len:
            raise ConfigError(
                "the drafter's longest request is longer than the run's",
                where="speculative_config.max_model_len",
                got=f"{draft_len}; allowed: at most max_model_len = {run_len}",
                fix="lower it or remove the key",
            )
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Self:
        """Read a configuration file.

        Args:
            path: a `.yaml`, `.yml`, `.toml` or `.json` file.
            overrides: values that replace those of the file; None leaves a key as it is.

        Raises:
            ConfigError: the file cannot be read, or what it says cannot be honoured.
        """
        path = Path(path)
        readers: dict[str, Callable[[str], Any]] = {
            ".yaml": yaml.safe_load,
            ".yml": yaml.safe_load,
            ".toml": tomllib.loads,
            ".json": json.loads,
        }
        if path.suffix not in readers:
            raise ConfigError(
                "a configuration file of this kind cannot be read",
                where=str(path),
                got=f"suffix {path.suffix!r}; allowed: {', '.join(readers)}",
                fix="rename the file after the format that it is written in",
            )
        try:
            data = readers[path.suffix](path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(
                "the configuration file cannot be read",
                where=str(path),
                got=f"{type(error).__name__}: {error}",
                fix=f"check that the file exists and is valid {path.suffix[1:].upper()}",
            ) from error
        merged = cls._prepare(_normalised({} if data is None else data, str(path)))
        return cls.model_validate(merged | cls._prepare(dict(overrides or {})))
