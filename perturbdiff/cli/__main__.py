"""``python -m perturbdiff.cli``."""

from perturbdiff.cli._app import main

main()
