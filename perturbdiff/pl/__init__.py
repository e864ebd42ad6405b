"""Plots of predictions beside the measured cells. matplotlib is loaded when a plot is drawn."""

from perturbdiff.pl._constraints import constraints
from perturbdiff.pl._embedding import embedding
from perturbdiff.pl._response import response
from perturbdiff.pl._roofline import roofline
from perturbdiff.pl._scores import scores
from perturbdiff.pl._trajectory import trajectory
from perturbdiff.pl._uncertainty import uncertainty

__all__ = [
    "constraints",
    "embedding",
    "response",
    "roofline",
    "scores",
    "trajectory",
    "uncertainty",
]
