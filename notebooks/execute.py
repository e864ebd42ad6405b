"""Run notebooks in fresh kernels and keep what they show.

``python -m notebooks.execute`` runs all of them in place; names such as ``01`` choose some.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import matplotlib as mpl
import nbformat
from matplotlib import font_manager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = tuple(sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")))
LIMIT_S = 240
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path: Path) -> NotebookNode:
    """Run a notebook in a fresh kernel, in an empty folder, with caches of its own.

    Parameters
    ----------
    path
        Notebook; it is not changed.

    Returns
    -------
    The same cells with new outputs.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        When a cell raises; names the cell and shows the traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as place:
        client = NotebookClient(
            notebook,
            timeout=LIMIT_S,
            kernel_name=KERNEL["name"],
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": place}},
        )
        client.execute(env=_environment(place))
    return _tidied(notebook)


def _environment(place: str) -> dict[str, str]:
    """What a kernel is told: where the package is, pictures in the page, caches in the folder."""
    assert font_manager.fontManager  # made here, so that no kernel says that it makes it
    kept = {k: v for k, v in os.environ.items() if k not in ("MPLBACKEND", "PYTHONWARNINGS")}
    threads = kept.get("OMP_NUM_THREADS", "1")  # scanpy's numba would set torch to all cores
    return kept | {
        "OMP_NUM_THREADS": threads,
        "NUMBA_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")])),
        "MPLCONFIGDIR": mpl.get_cachedir(),
        "XDG_CACHE_HOME": place,
        "IPYTHONDIR": place,
    }


def _tidied(notebook: NotebookNode) -> NotebookNode:
    """Without what differs from run to run and says nothing."""
    notebook.metadata = NotebookNode(kernelspec=KERNEL, language_info={"name": "python"})
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number:02d}"
        cell.metadata = NotebookNode()
    return notebook


def main() -> None:
    """Run and rewrite the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of file names; all where left out")
    wanted = tuple(parser.parse_args().names) or ("",)
    for path in NOTEBOOKS:
        if path.name.startswith(wanted):
            started = time.perf_counter()
            nbformat.write(execute(path), path)
            sys.stdout.write(f"{path.name}: {time.perf_counter() - started:.0f} s\n")


if __name__ == "__main__":
    main()
