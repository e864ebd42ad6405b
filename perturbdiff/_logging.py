"""One logger for the package. Nothing prints; users set the level the usual way."""

import logging

logger = logging.getLogger("perturbdiff")
logger.addHandler(logging.NullHandler())
