"""What counts as a model."""

from pathlib import Path

from anndata import AnnData

from perturbdiff._errors import ConfigError


def require_model(model: object) -> None:
    """Refuse what cannot be asked anything, such as the path of a saved model.

    Raises
    ------
    ConfigError
        When it is no model.
    """
    if isinstance(model, type) or not callable(getattr(model, "predict", None)):
        short = model is None or isinstance(model, str | Path | type)
        rule = "is no model; a saved one is opened with perturbdiff.load"
        if isinstance(model, AnnData):
            rule = "is no model: cells come first, and then the model"
        raise ConfigError("model", model if short else type(model).__name__, rule=rule)
