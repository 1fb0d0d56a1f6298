"""Executes the notebooks beside this script and stores them with their outputs.

    python examples/notebooks/execute.py                            # all of them, in place
    python examples/notebooks/execute.py 01_online_softmax.ipynb --out out

Timestamps and the versions of Python and of the kernel are not stored, so the files do not depend on the machine. Cells tagged
`varies` print times or rounding errors, which differ between machines; all other outputs should be the same as those stored.
Each notebook runs in a temporary directory. A notebook that raises `Stop`, because the machine lacks something it needs, is
reported and not stored.
"""

import argparse
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from tqdm import tqdm

DIRECTORY = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path, timeout: int) -> nbformat.NotebookNode:
    """Executes the notebook at `path` and returns it. A cell that raises or exceeds `timeout` seconds is an error."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as directory:
        client = NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": directory}},
        )
        client.execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    nbformat.validate(notebook)
    return notebook


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", help="file names in this directory, or paths (default: all notebooks here)")
    parser.add_argument("--timeout", type=int, default=120, help="limit for a cell, in seconds")
    parser.add_argument("--out", type=Path, default=DIRECTORY, help="directory of the results (default: in place)")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    paths = [DIRECTORY / name for name in args.notebooks] or sorted(DIRECTORY.glob("*.ipynb"))
    for path in tqdm(paths, unit="notebook"):
        try:
            notebook = execute(path, args.timeout)
        except CellExecutionError as error:
            if error.ename != "Stop":
                raise
            tqdm.write(f"{path.name} stopped: {error.evalue}")
        else:
            nbformat.write(notebook, args.out / path.name)


if __name__ == "__main__":
    main()
