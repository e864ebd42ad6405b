"""What the README shows runs as it stands, in order, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)
SHELL = [
    line.split(" #")[0].strip()
    for language, block in BLOCKS
    if language == "bash"
    for line in block.splitlines()
]


@pytest.fixture
def place(tmp_path):
    """An empty folder with the command line in its path, and the environment to run in."""
    command = tmp_path / "bin" / "perturbdiff"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m perturbdiff.cli "$@"\n')
    command.chmod(0o755)
    folder = tmp_path / "empty"
    folder.mkdir()
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    return folder, os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}


def test_every_block_has_a_language_that_is_run():
    assert {language for language, _ in BLOCKS} == {"python", "bash"}
    assert README.count("\n```") == 2 * len(BLOCKS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_python_blocks_run_in_order(place):
    folder, environment = place
    script = "\n".join(block for language, block in BLOCKS if language == "python")
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name for path in folder.iterdir()} == {
        "response.png", "embedding.png", "constraints.png", "bundle", "bundle_with_controls",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_run_in_order(place):
    folder, environment = place
    ours = [line for line in SHELL if line.startswith("perturbdiff ")]
    assert len(ours) >= 3
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(ours)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name for path in folder.iterdir()} == {
        "nk_bundle", "nk.h5ad", "nk_scores.csv", "nk_pictures", "nk_profile",
    }  # fmt: skip


def test_other_commands_are_run_by_the_ci_script():
    script = (ROOT / ".ci" / "run").read_text()
    others = [line for line in SHELL if line and not line.startswith("perturbdiff ")]
    assert "make demo" in others
    for line in others:
        assert line.replace("make ", 'make PYTHON="$python" ') in script, line


def test_it_says_what_it_is_not():
    assert "arXiv 2602.19685" in README
    assert "not the release of the paper of the same name" in " ".join(README.split())
