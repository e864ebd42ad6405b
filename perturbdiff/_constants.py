"""Numbers and names that more than one room needs."""

from typing import Final

VERSION: Final = "0.1.0"

DEPTH: Final = 1e4
"""Counts a cell is scaled to: user space is ``log1p(counts / library_size * DEPTH)``."""

UNS_KEY: Final = "perturbdiff"
"""Where a prediction keeps its provenance in ``.uns``."""

SCALES: Final = ("counts", "log1p_cp10k")
"""Scales that an AnnData may declare for its expression."""

PSEUDO_COUNT: Final = 0.1
"""Counts per 10,000 added to both sides of a log-ratio."""

LAST_CHECKPOINT: Final = "last.ckpt"
CHOICE: Final = "choice.json"
"""Files that a training run leaves in its ``checkpoint_dir``."""
