"""``python -m perturbdiff``."""

from perturbdiff.cli import main

main()
