"""Array types and the few aliases used across rooms. No heavy import."""

from typing import Literal, TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
Scale: TypeAlias = Literal["counts", "log1p_cp10k"]
PrecisionName: TypeAlias = Literal["float32", "bfloat16", "int8", "float8"]
SamplerName: TypeAlias = Literal["euler", "heun", "dpmpp_2m", "stochastic"]
OrderName: TypeAlias = Literal["vocabulary", "random", "coexpression", "descending"]
LikelihoodName: TypeAlias = Literal["bins", "negative_binomial"]
ModelKind: TypeAlias = Literal["set_diffusion", "causal_baseline"]
