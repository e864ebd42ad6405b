"""One logger for the package. Nothing prints; users set the level the usual way.

Warnings are seen without any set-up, as a notebook needs it. As soon as anyone configures logging,
for the whole process or for this logger, the package only passes its records on.
"""

import logging
import sys


class _Unconfigured(logging.Handler):
    """Standard error, as long as nobody else listens."""

    def emit(self, record: logging.LogRecord) -> None:
        listening = [*logger.handlers, *(logging.getLogger().handlers if logger.propagate else [])]
        if listening == [self] and sys.stderr is not None:
            sys.stderr.write(f"{self.format(record)}\n")


logger = logging.getLogger("perturbdiff")
if not logger.handlers:
    _handler = _Unconfigured()
    _handler.setFormatter(logging.Formatter("%(name)s: %(levelname)s: %(message)s"))
    logger.addHandler(_handler)
