"""Executes the notebooks beside this script and stores them with their outputs.

    python examples/notebooks/execute.py                            # all of them, in place
    python examples/notebooks/execute.py 01_online_softmax.ipynb --out out

What would differ from one machine to the next is left out: timestamps, the versions of Python and of the kernel. A cell
tagged `varies` prints what differs all the same (times, rounding errors); everything else should come out as it is stored.
Each notebook runs in a temporary directory. One that ends by raising `Stop`, because the machine lacks what it needs, is
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
    """The notebook at `path` with fresh outputs; a cell that raises or takes longer than `timeout` seconds is an error."""
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
    parser.add_argument("notebooks", nargs="*", help="file names here, or paths; all here when none is given")
    parser.add_argument("--timeout", type=int, default=120, help="seconds a cell may take")
    parser.add_argument("--out", type=Path, default=DIRECTORY, help="where to store them; in place by default")
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
