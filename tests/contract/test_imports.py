"""What may import what, and what importing must not do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "perturbdiff"
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_every_layer_imports_only_from_lower_ones():
    # In a process of its own: import-linter switches off the loggers that are there.
    command = "from importlinter.cli import lint_imports as run; exit(run(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


LIGHT = {
    "perturbdiff": ("torch", "lightning", "matplotlib", "scanpy", "torchmetrics", "anndata"),
    "perturbdiff.data": ("torch", "lightning", "matplotlib", "scanpy"),
    "perturbdiff.pp": ("torch", "lightning", "matplotlib", "scanpy"),
    "perturbdiff.pl": ("torch", "lightning", "scanpy"),
    "perturbdiff.tl": ("matplotlib",),
    "perturbdiff.cli": ("torch", "lightning", "matplotlib", "scanpy", "anndata"),
}


def exists(module):
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@pytest.mark.parametrize("module", [name for name in LIGHT if exists(name)])
def test_importing_is_silent_and_light(module):
    code = f"import sys, {module}; print(*sorted(set({LIGHT[module]!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout.strip(), done.stderr) == ("", "")


INSIDE = [path for path in MODULES if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", INSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_imports_from_the_package_root(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import, line {node.lineno}"
            assert node.module != "perturbdiff", f"import from the root, line {node.lineno}"
        elif isinstance(node, ast.Import):
            assert "perturbdiff" not in {alias.name for alias in node.names}


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
