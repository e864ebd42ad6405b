"""YAML as one spelling of the settings: read, overridden, checked name by name.

An unknown key is an error that names the nearest known one; a value of the wrong type is one too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from perturbdiff._errors import ConfigError, UnknownKeyError

Settings = TypeVar("Settings")


def read_yaml(path: Path) -> dict[str, Any]:
    """Settings of one file.

    Raises
    ------
    ConfigError
        When the file is not there, is not YAML, or holds something else than named settings.
    """
    if not path.is_file():
        raise ConfigError("config", str(path), rule="is not a file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("config", str(path), rule=f"is not YAML ({reason})") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError("config", str(path), rule="must hold settings by name")
    return content


def with_overrides(settings: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The settings with ``section.name=value`` written over them; values are read as YAML.

    Raises
    ------
    ConfigError
        When an override has another form, or goes into something that is not a section.
    """
    changed = {**settings}
    for text in overrides:
        name, equals, value = text.partition("=")
        *sections, last = name.strip().split(".")
        if not equals or not last:
            raise ConfigError("override", text, rule="must look like train.max_steps=400")
        level = changed
        for section in sections:
            inner = level.get(section, {})
            if not isinstance(inner, Mapping):
                raise ConfigError(section, inner, rule=f"is no section, so {name} cannot be set")
            level[section] = level = {**inner}
        try:
            level[last] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(name, value, rule="cannot be read as YAML") from error
    return changed


def from_mapping(kind: type[Settings], settings: object, *, where: str) -> Settings:
    """A dataclass of settings from names and values.

    Parameters
    ----------
    kind
        Dataclass to make.
    settings
        Names and values, as YAML gives them.
    where
        Section, for messages.

    Returns
    -------
    The settings, checked by their own rules too.

    Raises
    ------
    UnknownKeyError
        When a name is unknown; names the nearest.
    ConfigError
        When a value has the wrong type or breaks a rule.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(where, settings, rule="must be settings by name")
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    values = {}
    for name, value in settings.items():
        if name not in known:
            section = f"The section {where!r}"
            raise UnknownKeyError(section, name, known=known)
        values[name] = _read(value, hints[name], f"{where}.{name}")
    return kind(**values)


def _read(value: object, kind: Any, name: str) -> Any:
    """The value as the type asks for it."""
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in options:
            return None
        (kind,) = (option for option in options if option is not NoneType)
        return _read(value, kind, name)
    if origin is Literal:
        if value not in options:
            raise ConfigError(name, value, rule=f"must be one of {', '.join(map(str, options))}")
        return value
    if origin is tuple:
        items = [value] if isinstance(value, str | int | float) else value
        if not isinstance(items, Sequence):
            raise ConfigError(name, value, rule="must be a list")
        return tuple(_read(item, options[0], name) for item in items)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(name, value, rule="must be names with values")
        return {str(key): _read(item, options[1], f"{name}.{key}") for key, item in value.items()}
    return _read_scalar(value, kind, name)


def _read_scalar(value: object, kind: Any, name: str) -> Any:
    if kind is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)  # a label such as 3 is text
    if kind is float and isinstance(value, str):
        try:
            return float(value)  # YAML takes 1e-3, without a dot, for text
        except ValueError:
            pass
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(name, value, rule=f"must be {_NAMES.get(kind, kind.__name__)}")
    return value


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
