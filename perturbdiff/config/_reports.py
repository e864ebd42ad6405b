"""Reports of profiles, as they are or as the file that they were written to."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perturbdiff._errors import ConfigError

_FILE = "profile.json"
_GIVE = "give what profiling.compare returns"


def profile_report(report: object, *parts: str) -> Mapping[str, Any]:
    """A report with the parts that are needed of it.

    Parameters
    ----------
    report
        From ``profiling.compare``, or the ``profile.json`` or folder that it was written to.
    *parts
        What it must have.

    Returns
    -------
    The report.

    Raises
    ------
    ConfigError
        When it is none, cannot be read, or lacks a part.
    """
    found = _read(Path(report)) if isinstance(report, str | Path) else report
    if not isinstance(found, Mapping):
        shown = found if found is None or isinstance(found, int) else type(found).__name__
        rule = f"is no report of a profile: {_GIVE}, or the folder that it was written to"
        raise ConfigError("report", shown, rule=rule)
    if lacking := set(parts) - set(found):
        rule = f"lacks {', '.join(sorted(lacking))}: {_GIVE}"
        raise ConfigError("report", sorted(map(str, found)), rule=rule)
    return found


def _read(path: Path) -> Any:
    file = path / _FILE if path.is_dir() else path
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        rule = f"holds no report of a profile: name a folder with a {_FILE}, or that file"
        raise ConfigError("report", str(path), rule=rule) from error
