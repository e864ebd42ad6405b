"""Whether an answer fits into this machine's memory."""

import os

from perturbdiff._errors import ConfigError
from perturbdiff.config._checks import whole_number

_LEAST_SHARE = 0.02  # of a cell's genes that are not zero, in the sparsest data
_ENTRY_BYTES = 16  # of a value that is not zero: X and counts, each with its column
_CELL_BYTES = 200  # names and labels


def require_room(n_cells: int, n_genes: int) -> None:
    """Refuse a number of cells whose answer alone is larger than the memory of this machine.

    Raises
    ------
    ConfigError
        When it is, or is no whole number of at least 1.
    """
    each = _LEAST_SHARE * n_genes * _ENTRY_BYTES + _CELL_BYTES
    needed = whole_number("n_cells", n_cells, least=1) * each
    if (there := _memory_bytes()) is not None and needed > there:
        rule = (
            f"the answer alone needs some {needed / 1e9:,.0f} GB and this machine has "
            f"{there / 1e9:.0f}; ask for fewer cells at a time, under other seeds"
        )
        raise ConfigError("n_cells", n_cells, rule=rule)


def _memory_bytes() -> int | None:
    """Memory of this machine; None where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
