"""The container file and the systemd unit say what the command line and the settings say."""

import json
import re
import shlex
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from perturbdiff.cli import app
from perturbdiff.serve import ServeConfig

typer_main = pytest.importorskip("typer.main")
ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
INSTRUCTIONS = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN",
    "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip


def understood(words):
    """Whether ``perturbdiff`` takes these words, without running anything."""
    command = typer_main.get_command(app).commands["serve"]
    command.make_context("serve", list(words))


def instructions():
    text = (DEPLOY / "Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    return [line.split(maxsplit=1) for line in lines if line.strip()]


def unit():
    parsed = RawConfigParser(strict=False)
    parsed.optionxform = str
    parsed.read(DEPLOY / "perturbdiff.service")
    return parsed


def test_the_container_file_is_one():
    found = instructions()
    assert found[0][0] == "FROM"
    assert {name for name, _ in found} <= INSTRUCTIONS
    for name, rest in found:
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
    named = dict(found)
    start = json.loads(named["ENTRYPOINT"])
    assert start == ["perturbdiff", "serve"]
    understood(json.loads(named["CMD"]))
    assert named["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(named["HEALTHCHECK"].partition("CMD")[2])[0] == "python"
    assert "torch==2.13.0" in named["ARG"]
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()


def test_the_unit_stops_as_the_server_wants_to_be_stopped():
    service = unit()["Service"]
    words = shlex.split(service["ExecStart"])
    assert Path(words[0]).name == "perturbdiff"
    assert words[1] == "serve"
    understood(words[2:])
    assert service["KillMode"] == "mixed"
    assert service["KillSignal"] == "SIGTERM"
    assert float(service["TimeoutStopSec"]) > ServeConfig().grace_s


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_unit(tmp_path):
    text = (DEPLOY / "perturbdiff.service").read_text()
    here = tmp_path / "perturbdiff.service"
    here.write_text(text.replace("/opt/perturbdiff/bin/perturbdiff", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(here)], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if "perturbdiff.service" in line]
    assert not [line for line in ours if "Unknown" in line or "Failed" in line], done.stderr
