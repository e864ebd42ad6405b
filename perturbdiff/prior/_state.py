"""Summaries of conditions as arrays and plain values, to be kept with a model."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from perturbdiff.prior._summary import ConditionSummary, ContextSummary

State: TypeAlias = "dict[str, Any]"
"""Values are numpy arrays, or what JSON can hold."""


def summaries_to_state(conditions: Sequence[ConditionSummary]) -> State:
    """Arrays of means, variances and axes, and lists of labels; each context is kept once."""
    contexts = {c.context.covariates: c.context for c in conditions}
    keys = sorted(contexts)
    place = {key: i for i, key in enumerate(keys)}
    ordered = [contexts[key] for key in keys]
    return {
        "contexts": [list(key) for key in keys],
        "context.mean": np.stack([context.mean for context in ordered]),
        "context.var": np.stack([context.var for context in ordered]),
        "context.cells": [context.n_cells for context in ordered],
        "context.kept": [len(context.axes) for context in ordered],
        "context.axes": np.concatenate([context.axes for context in ordered]),
        "members": [list(c.members) for c in conditions],
        "numbers": [list(c.numbers) for c in conditions],
        "where": [place[c.context.covariates] for c in conditions],
        "cells": [c.n_cells for c in conditions],
        "mean": np.stack([c.mean for c in conditions]),
        "var": np.stack([c.var for c in conditions]),
    }


def summaries_from_state(state: Mapping[str, Any]) -> tuple[ConditionSummary, ...]:
    """Inverse of :func:`summaries_to_state`."""
    ends = np.cumsum([0, *state["context.kept"]])
    contexts = [
        ContextSummary(
            covariates=tuple(labels),
            mean=np.asarray(state["context.mean"][i]),
            var=np.asarray(state["context.var"][i]),
            n_cells=int(state["context.cells"][i]),
            axes=np.asarray(state["context.axes"][ends[i] : ends[i + 1]]),
        )
        for i, labels in enumerate(state["contexts"])
    ]
    return tuple(
        ConditionSummary(
            members=tuple(members),
            context=contexts[state["where"][i]],
            mean=np.asarray(state["mean"][i]),
            var=np.asarray(state["var"][i]),
            n_cells=int(state["cells"][i]),
            numbers=tuple(float(value) for value in state["numbers"][i]),
        )
        for i, members in enumerate(state["members"])
    )
