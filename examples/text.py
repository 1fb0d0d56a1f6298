"""Text for the language-model examples: files to tokens and tokens to batches."""

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NO_TARGET = -100  # ignored by F.cross_entropy
END_OF_TEXT = "<|endoftext|>"
BPE_BYTES = 64_000_000  # of text from which the BPE vocabulary is learned


class Batch(NamedTuple):
    """Tokens and targets (B, T) int64, on the device of the data. Targets are NO_TARGET where no token follows."""

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None = None  # int32 (s + 1,): boundaries of the s packed sequences of a row (B = 1)

    def positions(self) -> Tensor:
        """Returns the position of each token in its sequence, (B, T) int64."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        if self.cu_seqlens is not None:
            sequence = torch.searchsorted(self.cu_seqlens, places, right=True, out_int32=True) - 1
            places = places - self.cu_seqlens[sequence]
        return places.expand(self.tokens.shape)


def load_documents(paths: Sequence[Path] | None = None) -> list[bytes]:
    """Reads files and the files of directories. Without paths it reads the Python sources of the standard library and of
    installed packages.

    The files of a directory are shuffled with a fixed seed, so that the last tenth of the text, which is used for validation,
    resembles the rest. Files that are empty or hold a zero byte, and hidden files and directories, are skipped.
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
    """Returns the bytes of the documents, each followed by a line break, as uint8 (N,)."""
    return byte_tokens(load_documents(paths)).tokens


class Text(NamedTuple):
    """Concatenated documents: tokens (N,), uint8 or int32, and the index of each document's first token, `starts` (s,) int64 on
    the CPU. `starts[0]` is 0."""

    tokens: Tensor
    starts: Tensor

    def split(self) -> tuple["Text", "Text"]:
        """Returns training and validation text: the first nine tenths of the tokens and the rest."""
        train, validation = split(self.tokens)
        of_train = int(torch.searchsorted(self.starts, len(train)))
        later = self.starts[of_train:] - len(train)
        if len(later) == 0 or later[0] > 0:
            later = torch.cat([torch.zeros(1, dtype=torch.int64), later])
        return Text(train, self.starts[:of_train]), Text(validation, later)


def byte_tokens(documents: Sequence[bytes]) -> Text:
    """Returns the bytes of the documents as uint8, each document followed by a line break."""
    tokens = torch.frombuffer(bytearray(b"\n".join([*documents, b""])), dtype=torch.uint8)
    return Text(tokens, _starts([len(document) + 1 for document in documents]))


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths[:-1]]).cumsum(0)


def train_bpe(documents: Sequence[bytes], vocab_size: int) -> "Tokenizer":
    """Trains a byte-level BPE tokenizer with `vocab_size` tokens on the first 64 MB. It can encode any text."""
    tokenizers = _import_tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(documents, BPE_BYTES), trainer)
    return tokenizer


def load_bpe(path: Path) -> "Tokenizer":
    """Reads a file that `Tokenizer.save` wrote."""
    return _import_tokenizers().Tokenizer.from_file(str(path))


def bpe_tokens(documents: Sequence[bytes], tokenizer: "Tokenizer") -> Text:
    """Returns the tokens of the documents as int32, each document followed by END_OF_TEXT."""
    end, pieces = tokenizer.token_to_id(END_OF_TEXT), []
    for first in range(0, len(documents), 256):
        texts = [document.decode(errors="replace") for document in documents[first : first + 256]]
        encodings = tokenizer.encode_batch_fast(texts)
        pieces += [torch.tensor([*encoding.ids, end], dtype=torch.int32) for encoding in encodings]
    return Text(torch.cat(pieces), _starts([len(piece) for piece in pieces]))


def _first(documents: Iterable[bytes], count: int) -> Iterator[str]:
    """Yields documents until their total length is at least `count` bytes."""
    for document in documents:
        yield document.decode(errors="replace")
        count -= len(document)
        if count <= 0:
            return


def _import_tokenizers():
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise SystemExit("BPE needs the package tokenizers: pip install tokenizers. Bytes, the default, do not") from None
    return tokenizers


def split(data: Tensor) -> tuple[Tensor, Tensor]:
    """Returns training and validation data: the first nine tenths and the rest."""
    first = 9 * len(data) // 10
    return data[:first], data[first:]


def random_windows(data: Tensor, block_size: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Returns batch_size windows of block_size tokens from random positions of data (N,)."""
    if len(data) <= block_size:
        raise SystemExit(f"{len(data)} tokens of text are too few for a block of {block_size}")
    start = torch.randint(len(data) - block_size, (batch_size, 1), generator=generator).to(data.device)
    window = data[start + torch.arange(block_size + 1, device=data.device)].long()
    return Batch(window[:, :-1], window[:, 1:])


def packed_windows(text: Text, block_size: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Returns one row of batch_size * block_size consecutive tokens from a random position, packed by document.

    Documents longer than block_size are cut into sequences of block_size tokens. The last token of a document has no target.
    cu_seqlens is padded with empty sequences to a power of two, so that compiled code sees few shapes.
    """
    data, starts = text
    n = batch_size * block_size
    if len(data) <= n:
        raise SystemExit(f"{len(data)} tokens of text are too few for a batch of {n}")
    first = int(torch.randint(len(data) - n, (1,), generator=generator))
    end = first + n
    of_first, after = torch.searchsorted(starts, torch.tensor([first, end]), right=True).tolist()
    documents = [*starts[of_first - 1 : after].tolist(), end]
    bounds = [first]
    for start, next_start in pairwise(documents):
        cut = start + max(0, -(-(first + 1 - start) // block_size)) * block_size  # first boundary after the row's first token
        bounds += range(cut, next_start, block_size)
    bounds += [end] * (max(16, 2 ** len(bounds).bit_length()) - len(bounds))
    cu_seqlens = torch.tensor(bounds).sub(first).to(data.device, torch.int32)

    row = data[first : end + 1].long()
    targets = row[1:].clone()
    targets[(starts[of_first:after] - 1 - first).to(data.device)] = NO_TARGET
    return Batch(row[None, :-1], targets[None], cu_seqlens)
