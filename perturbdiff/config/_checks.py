"""Checks of single values, by name: whole numbers, numbers, choices."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from inspect import Parameter, signature
from operator import index
from typing import (
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    Self,
    SupportsFloat,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from perturbdiff._errors import ConfigError, UnknownKeyError

T = TypeVar("T")
P = ParamSpec("P")
Result = TypeVar("Result")
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_OWN_AND_FIRST = 2  # self or class, and the AnnData, which nobody misspells


def whole_number(name: str, value: object, *, least: int | None = None) -> int:
    """The value as an integer, refused where it is none.

    Parameters
    ----------
    name
        What it is called, for the message.
    value
        Python's or NumPy's integer; neither a truth value, nor a fraction, nor text.
    least
        Smallest allowed.

    Returns
    -------
    A plain integer.

    Raises
    ------
    ConfigError
        When it is no whole number, or below the smallest allowed.
    """
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise ConfigError(name, value, rule="must be a whole number")
    if least is not None and number < least:
        raise ConfigError(name, value, rule=f"must be at least {least}")
    return number


def seed_number(value: object) -> int:
    """The value as a seed, which files and other languages hold in 64 bits with a sign.

    Raises
    ------
    ConfigError
        When it is no whole number, is below 0, or is 2**63 or more.
    """
    number = whole_number("seed", value, least=0)
    if number >= 2**63:
        raise ConfigError("seed", value, rule="must be below 2**63, which files can hold")
    return number


def finite_number(name: str, value: object) -> float:
    """The value as a float, refused where it is no finite number.

    Raises
    ------
    ConfigError
        When it is text, a truth value, several numbers, NaN or infinite.
    """
    single = isinstance(value, SupportsFloat) and getattr(value, "ndim", 0) == 0
    sound = single and not isinstance(value, bool | str)
    number = float(value) if sound else math.nan  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ConfigError(name, value, rule="must be a number")
    return number


def settings_of(kind: type[T], name: str, value: object, *, default: T | None = None) -> T:
    """Settings as given, the default ones for None; anything else is refused.

    Parameters
    ----------
    kind
        Class that they must be of.
    name
        What they are called, for the message.
    value
        As given.
    default
        What None stands for, if not the standard settings.

    Returns
    -------
    Settings of the class.

    Raises
    ------
    ConfigError
        When it is something else, such as a mapping or settings of another kind.
    """
    if value is None:
        return kind() if default is None else default
    if isinstance(value, kind):
        return value
    made = f"perturbdiff.{kind.__name__}"
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        made += f"({', '.join(f'{key}={entry!r}' for key, entry in value.items())})"
    else:
        made += "(...)"
    raise ConfigError(name, value, rule=f"must be {made}, or None for the usual settings")


def known_keywords(method: Callable[P, Result]) -> Callable[P, Result]:
    """A method of a class that refuses a keyword it does not take, with the nearest that it does.

    Parameters
    ----------
    method
        What is to be called with keywords.

    Returns
    -------
    The same, with the same signature.
    """
    named = [name for name, one in signature(method).parameters.items() if one.kind in _BY_NAME]

    @wraps(method)
    def checked(*args: P.args, **keywords: P.kwargs) -> Result:
        for name in keywords:
            if name not in named:
                owner: Any = args[0]
                where = f"{getattr(owner, '__name__', type(owner).__name__)}.{method.__name__}"
                raise UnknownKeyError(where, name, known=named[_OWN_AND_FIRST:])
        return method(*args, **keywords)

    return checked


class Settings:
    """Base of frozen dataclasses whose names and types are checked however they are made."""

    section: ClassVar[str]

    def __new__(cls, *_: Any, **values: Any) -> Self:
        """Refuse a name that is no setting, with the nearest that is."""
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in values:
            if name not in known:
                raise UnknownKeyError(cls.__name__, name, known=known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is ClassVar:
                continue
            value, place = getattr(self, name), f"{self.section}.{name}"
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise ConfigError(place, value, rule=f"must be one of {', '.join(get_args(kind))}")
            if kind is int:
                object.__setattr__(self, name, whole_number(place, value))
            elif kind is float:
                object.__setattr__(self, name, finite_number(place, value))
