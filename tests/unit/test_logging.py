"""Warnings are seen by default, once, and whoever configures logging takes over."""

import subprocess
import sys

import pytest

from perturbdiff._logging import logger

SAY = "from perturbdiff._logging import logger\nlogger.warning('mind %d cells', 3)\n"


def said(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout
    return done.stderr


def test_a_warning_is_seen_where_nobody_configured_logging():
    assert said(SAY) == "perturbdiff: WARNING: mind 3 cells\n"


def test_less_than_a_warning_is_seen_only_when_asked_for():
    code = SAY.replace("warning", "info")
    assert not said(code)
    assert "mind 3" in said(
        f"import logging; logging.getLogger('perturbdiff').setLevel(10)\n{code}"
    )


@pytest.mark.parametrize(
    "configure",
    [
        "logging.basicConfig(format='mine: %(message)s')",
        "handler = logging.StreamHandler()\n"
        "handler.setFormatter(logging.Formatter('mine: %(message)s'))\n"
        "logging.getLogger('perturbdiff').addHandler(handler)",
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_configuration_takes_over_without_a_second_line(configure, first):
    parts = ["import logging", configure, "import perturbdiff._logging"]
    order = parts if first else [parts[0], parts[2], parts[1]]
    assert said("\n".join([*order, SAY])) == "mine: mind 3 cells\n"


@pytest.mark.parametrize(
    "quiet",
    [
        "logging.getLogger('perturbdiff').setLevel(logging.ERROR)",
        "logging.getLogger('perturbdiff').addHandler(logging.NullHandler())",
        "logging.getLogger('perturbdiff').disabled = True",
        "logging.disable()",
    ],
)
def test_it_can_be_silenced(quiet):
    assert not said(f"import logging\n{quiet}\n{SAY}")


def test_a_reloaded_module_says_nothing_twice():
    again = "import importlib, perturbdiff._logging as here\nimportlib.reload(here)\n"
    assert said(again + SAY) == "perturbdiff: WARNING: mind 3 cells\n"


def test_a_replaced_stream_is_written_to():
    """Notebooks put their own stream in the place of standard error."""
    code = f"import io, sys\nkept, sys.stderr = sys.stderr, io.StringIO()\n{SAY}"
    assert said(f"{code}kept.write(sys.stderr.getvalue().upper())") == (
        "PERTURBDIFF: WARNING: MIND 3 CELLS\n"
    )


def test_caplog_sees_it_and_standard_error_does_not(caplog, capsys):
    logger.warning("mind %d cells", 3)
    assert caplog.messages == ["mind 3 cells"]
    assert not capsys.readouterr().err
