"""What clients may send: checked in shape here, in meaning by the model."""

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, EncodedBytes, Field, ValidationError
from pydantic.types import Base64Encoder
from pydantic_core import PydanticCustomError

from perturbdiff._errors import ConfigError, PerturbDiffError
from perturbdiff.config import DecodeConfig, SampleConfig
from perturbdiff.config._yaml import from_mapping
from perturbdiff.guidance import Constraint
from perturbdiff.guidance._enforcement import Way
from perturbdiff.guidance._json import from_json, way_from_json

FORMATS = ("json", "h5ad", "arrow")
MOST_NESTED = 16
_LABELS = 4096

Label = Annotated[str, Field(max_length=1024)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Base64(Base64Encoder):
    """Base64 without anything else in it; pydantic's own leaves out what is none."""

    @classmethod
    def decode(cls, data: bytes) -> bytes:
        try:
            content = base64.b64decode(b"".join(data.split()), validate=True)
        except binascii.Error as error:
            said = "is no base64 ({error})"
            raise PydanticCustomError("base64_decode", said, {"error": str(error)}) from error
        if not content:
            said = "is empty; leave it out to start from the model's own control cells"
            raise PydanticCustomError("base64_empty", said)
        return content


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class Question(_Body):
    """What every question may name."""

    contexts: list[dict[Label, Label]] | None = Field(
        None, max_length=_LABELS, description="Levels of the covariates; all where left out."
    )
    n_cells: int = Field(256, ge=1, strict=True, description="Cells of each condition.")
    seed: int = Field(0, ge=0, lt=2**63, strict=True, description="Seed of all noise.")
    doses: list[Number] | None = Field(
        None, max_length=_LABELS, description="Every perturbation at every dose."
    )
    times: list[Number] | None = Field(
        None, max_length=_LABELS, description="Every perturbation at every time."
    )
    sample: dict[str, Any] | None = Field(
        None, description="Settings of sampling, such as n_steps and guidance_scale."
    )
    control_cells: Annotated[bytes, EncodedBytes(encoder=_Base64)] | None = Field(
        None,
        description="An .h5ad file with control cells, in base64; needed where the model was saved "
        "without any.",
        repr=False,
    )
    deadline_s: float | None = Field(None, gt=0, description="Give up after so many seconds.")

    @property
    def sampling(self) -> SampleConfig | None:
        """Settings of sampling."""
        return (
            None if self.sample is None else from_mapping(SampleConfig, self.sample, where="sample")
        )


class PredictRequest(Question):
    """Cells of every perturbation in every context."""

    perturbations: list[Label] = Field(min_length=1, max_length=_LABELS)
    decode: dict[str, Any] | None = Field(None, description="Of an autoregressive model.")
    decoding: Literal["raw", "transport"] | None = None
    missing_genes: Literal["refuse", "infer"] = "refuse"
    constraints: list[dict[str, Any]] = Field(default=[], max_length=64)
    enforce: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    answer_as: Literal["json", "h5ad", "arrow"] = Field(
        "h5ad", description="Form of the answer at the end of a stream of events."
    )

    @property
    def options(self) -> dict[str, Any]:
        """What was said, as the model's ``predict`` takes it."""
        said: dict[str, Any] = {
            "doses": self.doses,
            "times": self.times,
            "sample": self.sampling,
            "decode": None
            if self.decode is None
            else from_mapping(DecodeConfig, self.decode, where="decode"),
            "decoding": self.decoding,
            "missing_genes": None if self.missing_genes == "refuse" else self.missing_genes,
            "constraints": [constraint_of(entry) for entry in self.constraints] or None,
            "enforce": None if self.enforce is None else list(self.ways),
        }
        return {name: value for name, value in said.items() if value is not None}

    @property
    def ways(self) -> tuple[Way, ...]:
        """Ways of enforcing constraints that were named."""
        if self.enforce is None:
            return ()
        listed = self.enforce if isinstance(self.enforce, list) else [self.enforce]
        return tuple(way_from_json(way) for way in listed)


class RankRequest(Question):
    """Perturbations, the one whose cells meet the wish best first."""

    target: list[dict[str, Any]] = Field(min_length=1, max_length=64)
    perturbations: list[Label] | None = Field(None, min_length=1, max_length=_LABELS)
    n_cells: int = Field(128, ge=1, strict=True)

    def wishes(self) -> list[Constraint]:
        """The target as constraints."""
        return [constraint_of(entry) for entry in self.target]


def constraint_of(entry: Mapping[str, Any]) -> Constraint:
    """The constraint of a declared form in JSON, and of no other: clients send no code.

    Raises
    ------
    ConfigError, UnknownKeyError
        When it is none, or constraints are nested too deeply.
    """
    if (depth := _depth(entry)) > MOST_NESTED:
        rule = f"is nested {depth} deep; at most {MOST_NESTED}"
        raise ConfigError("constraints", "...", rule=rule)
    try:
        return from_json(entry)
    except PerturbDiffError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        rule = f"has a value that no constraint takes ({error})"
        raise ConfigError("constraints", dict(entry), rule=rule) from error


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list):
        return 0
    return 1 + max((_depth(item) for item in inner), default=0)  # type: ignore[attr-defined]


def problems(error: ValidationError) -> list[dict[str, Any]]:
    """What is wrong with a body, without repeating it."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return [
        {"where": ".".join(map(str, item["loc"])) or "body", "what": item["msg"]} for item in found
    ]
