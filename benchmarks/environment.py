"""What a result was made with: code, packages, machine."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "anndata", "lightning", "numpy", "POT", "scanpy", "scikit-learn", "scipy", "torch",
)  # fmt: skip
DECISIVE = ("numpy", "POT", "scanpy", "scikit-learn", "scipy", "torch")


def versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions of packages."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def environment() -> dict[str, Any]:
    """Commit, versions, machine and threads."""
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--", "perturbdiff", "benchmarks/*.py")
    return {
        "commit": commit or "unknown",
        "uncommitted_changes": bool(changed),
        "python": platform.python_version(),
        "packages": versions(),
        "cpu": cpu_name(),
        "n_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": f"{platform.system()} {platform.machine()}",
    }


def cpu_name() -> str:
    """Name of the processor as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
