"""Text for the language-model examples: files to tokens, tokens to batches."""

import sysconfig
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

NO_TARGET = -100  # what F.cross_entropy ignores


class Batch(NamedTuple):
    """tokens and targets (B, T) int64, on the device of the data; targets are NO_TARGET where no token follows."""

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None = None  # int32 (s + 1,): the row's s sequences, for B = 1

    def positions(self) -> Tensor:
        """(B, T) int64, where each token stands in its sequence."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        if self.cu_seqlens is not None:
            sequence = torch.searchsorted(self.cu_seqlens, places, right=True, out_int32=True) - 1
            places = places - self.cu_seqlens[sequence]
        return places.expand(self.tokens.shape)


def load_documents(paths: Sequence[Path] | None = None) -> list[bytes]:
    """The files given, and those in the directories given; without paths the Python sources of this interpreter, its standard
    library and what is installed.

    Files of directories are shuffled by a fixed seed, so that the last tenth of the text is like the rest. Those with a zero
    byte are no text and left out, as are empty ones and what is in hidden directories.
    """
    if paths is None:
        roots = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
        files = _shuffled({path for root in roots for path in _files(root, "*.py")})
    else:
        files = []
        for path in map(Path, paths):
            if not path.exists():
                raise SystemExit(f"there is no file or directory {path}")
            files += _shuffled(_files(path, "*")) if path.is_dir() else [path]
    documents = [document for document in (file.read_bytes() for file in files) if document and b"\0" not in document]
    if not documents:
        where = "this Python's sources" if paths is None else ", ".join(map(str, paths))
        raise SystemExit(f"there is no text in {where}")
    return documents


def _files(root: Path, pattern: str) -> set[Path]:
    found = (path for path in root.rglob(pattern) if path.is_file())
    return {path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)}


def _shuffled(files: set[Path]) -> list[Path]:
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    files = sorted(files)
    return [files[i] for i in order]


def load_bytes(paths: Sequence[Path] | None = None) -> Tensor:
    """The documents with a line break between them, (N,) uint8."""
    return torch.frombuffer(bytearray(b"\n".join(load_documents(paths))), dtype=torch.uint8)


def split(data: Tensor) -> tuple[Tensor, Tensor]:
    """Training and validation: the first nine tenths and the rest."""
    first = 9 * len(data) // 10
    return data[:first], data[first:]


def random_windows(data: Tensor, block_size: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Windows of block_size tokens at random places of data (N,)."""
    if len(data) <= block_size:
        raise SystemExit(f"{len(data)} tokens of text are too few for a block of {block_size}")
    start = torch.randint(len(data) - block_size, (batch_size, 1), generator=generator).to(data.device)
    window = data[start + torch.arange(block_size + 1, device=data.device)].long()
    return Batch(window[:, :-1], window[:, 1:])


def packed_windows(data: Tensor, starts: Tensor, block_size: int, batch_size: int, generator: torch.Generator) -> Batch:
    """One row of batch_size * block_size tokens from a random place of data (N,), as the sequences that lie there.

    A document begins at each of `starts` (s,) int64 on the CPU, sorted, the first at 0; it is cut into sequences of block_size
    tokens. The last of its tokens has no target. cu_seqlens is filled up with empty sequences to a power of two, so that
    compiled code sees few shapes of it.
    """
    n = batch_size * block_size
    if len(data) <= n:
        raise SystemExit(f"{len(data)} tokens of text are too few for a batch of {n}")
    first = int(torch.randint(len(data) - n, (1,), generator=generator))
    end = first + n
    of_first, after = torch.searchsorted(starts, torch.tensor([first, end]), right=True).tolist()
    documents = [*starts[of_first - 1 : after].tolist(), end]
    bounds = [first]
    for start, next_start in pairwise(documents):
        cut = start + max(0, -(-(first + 1 - start) // block_size)) * block_size  # the first one after the row's first token
        bounds += range(cut, next_start, block_size)
    bounds += [end] * (max(16, 2 ** len(bounds).bit_length()) - len(bounds))
    cu_seqlens = torch.tensor(bounds).sub(first).to(data.device, torch.int32)

    row = data[first : end + 1].long()
    targets = row[1:].clone()
    targets[(starts[of_first:after] - 1 - first).to(data.device)] = NO_TARGET
    return Batch(row[None, :-1], targets[None], cu_seqlens)
