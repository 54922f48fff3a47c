"""Files that are whole or absent, whatever interrupts the writer."""

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path


CHUNK = 1 << 20  # bytes


def receive(chunks: Iterable[bytes], folder: Path) -> tuple[Path, str]:
    """Writes a new file, of which nothing stays if the chunks break off; returns it and its sha256."""
    digest = hashlib.sha256()
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".")
    try:
        with os.fdopen(descriptor, "wb") as file:
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
        os.chmod(name, 0o644)
    except BaseException:
        os.unlink(name)
        raise
    return Path(name), digest.hexdigest()


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    received, _ = receive([data], path.parent)
    received.replace(path)


def read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    for chunk in read(path):
        digest.update(chunk)
    return digest.hexdigest()
