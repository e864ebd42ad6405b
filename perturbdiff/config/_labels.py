"""Labels written on one line, as on a command line."""

from collections.abc import Sequence

import yaml

from perturbdiff._errors import ConfigError


def read_labels(pairs: Sequence[str] | None) -> dict[str, list[str]] | None:
    """Labels by column, from texts such as ``cell_type=NK``; None where there are none.

    Raises
    ------
    ConfigError
        When a text has another form.
    """
    found: dict[str, list[str]] = {}
    for text in pairs or ():
        key, _, label = text.partition("=")
        if not key.strip() or not label.strip():
            name = "label"
            raise ConfigError(name, text, rule="must look like cell_type=NK")
        found.setdefault(key.strip(), []).append(label.strip())
    return found or None


def read_context(text: str) -> dict[str, str]:
    """One context, from ``cell_type=NK,donor=1`` or, for labels with commas, from JSON.

    Raises
    ------
    ConfigError
        When the text has another form, or names a column twice.
    """
    if text.lstrip().startswith("{"):
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            name = "context"
            raise ConfigError(name, text, rule="cannot be read as JSON") from error
        return {str(key): str(label) for key, label in content.items()}
    found = read_labels(text.split(",")) or {}
    if twice := [key for key, labels in found.items() if len(labels) > 1]:
        raise ConfigError("context", text, rule=f"names {twice[0]!r} more than once")
    return {key: labels[0] for key, labels in found.items()}
