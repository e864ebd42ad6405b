"""The documentation builds without a warning and describes everything that is public."""

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from sphinx.util.inventory import InventoryFile

import perturbdiff as ptd

ROOT = Path(__file__).resolve().parents[2]
ROOMS = sorted(
    ".".join(path.parent.relative_to(ROOT).parts)
    for path in (ROOT / "perturbdiff").rglob("__init__.py")
    if path.parent.name != "cli"  # described as commands
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    ignored = shutil.ignore_patterns("_build", "generated", "__pycache__")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=ignored)
    words = [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q"]
    done = subprocess.run(
        [*words, folder / "docs", folder / "html"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_everything_public_is_described_or_points_to_where_it_is(built):
    with (built / "objects.inv").open("rb") as file:
        objects = InventoryFile.load(file, "", lambda base, uri: uri)
    described = {name for kind, entries in objects.items() if kind[:3] == "py:" for name in entries}
    for room in ROOMS:
        module = import_module(room)
        page = (built / "generated" / f"{room}.html").read_text()
        for name in module.__all__:
            if isinstance(getattr(module, name), ModuleType):
                assert f"{room}.{name}" in described | {"perturbdiff.datasets"}, name
                continue
            own = f"{room}.{name}"
            assert own in described or f">{name}</" in page, own
    for name in ("SetDiffusion.predict", "SetDiffusion.save", "serve.Client.predict"):
        assert f"perturbdiff.{name}" in described


def test_equations_are_shown_without_a_script(built):
    page = (built / "method.html").read_text()
    assert page.count("<math") > 50
    assert "\\frac" not in page
    assert not {file.name for file in built.rglob("*athjax*")}


def test_commands_and_settings_are_those_of_the_code(built):
    commands, settings = ((built / f"{name}.html").read_text() for name in ("commands", "configs"))
    for option in ("--covariate-keys", "--include-controls", "--print-config", "--json"):
        assert option in commands
    for name in (*vars(ptd.TrainConfig()), *vars(ptd.SampleConfig())):
        assert f">{name}</span>" in settings, name
    assert "configs/runs/laptop.yaml" in settings
