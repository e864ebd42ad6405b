"""What tables call a condition."""

import numpy as np

from perturbdiff.data import Condition, Registry, label_of


def condition_labels(registry: Registry, condition: Condition) -> dict[str, str | float]:
    """Labels of a condition by the names that their columns have in ``obs``."""
    label = label_of(condition.members, separator=registry.separator)
    labels: dict[str, str | float] = {registry.perturbation_key: label}
    labels |= dict(zip(registry.covariate_keys, condition.context, strict=True))
    if registry.dose_key is not None:
        labels[registry.dose_key] = "+".join(f"{dose:g}" for dose in condition.doses)
    if registry.time_key is not None:
        labels[registry.time_key] = np.nan if condition.time is None else condition.time
    return labels
