"""What counts as a model."""

from perturbdiff._errors import ConfigError


def require_model(model: object) -> None:
    """Refuse what cannot be asked anything, such as the path of a saved model.

    Raises
    ------
    ConfigError
        When it is no model.
    """
    if isinstance(model, type) or not callable(getattr(model, "predict", None)):
        rule = "is no model; a saved one is opened with perturbdiff.load"
        raise ConfigError("model", model, rule=rule)
