"""Large files by their sha256, as git-lfs keeps them beside a repository, and the pointers inside it."""

import fnmatch
import re
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

from .errors import HubError
from .files import read, receive


LARGEST_REGULAR = 10 << 20  # bytes
PATTERNS = (
    *(
        "*.arrow",
        "*.bin",
        "*.ckpt",
        "*.gguf",
        "*.gz",
        "*.h5",
        "*.model",
        "*.msgpack",
        "*.npy",
        "*.npz",
        "*.onnx",
    ),
    *("*.parquet", "*.pickle", "*.pkl", "*.pt", "*.pth", "*.safetensors", "*.tar", "*.zip", "*.zst"),
)
GITATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in PATTERNS)
POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\noid sha256:([0-9a-f]{64})\nsize (\d+)\n"
)


def make_pointer(oid: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()


def read_pointer(blob: bytes) -> tuple[str, int] | None:
    """Returns the sha256 and the bytes of the file that a blob points to, if it is a pointer."""
    match = POINTER.fullmatch(blob) if len(blob) < 300 else None
    return (match[1].decode(), int(match[2])) if match else None


def is_large(name: str, size: int, sample: bytes) -> bool:
    """Decides as the Hub does, by name, size and first bytes, whether git would suffer from a file."""
    named = any(fnmatch.fnmatch(name, pattern) for pattern in PATTERNS)
    return named or size > LARGEST_REGULAR or b"\0" in sample


class LargeFiles:
    """Files in a folder, named by their sha256; what arrives waits in `incoming` until it is whole."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.incoming = folder / "incoming"
        self._joining = threading.Lock()
        shutil.rmtree(self.incoming, ignore_errors=True)  # of uploads that ended with the hub before this one
        self.incoming.mkdir(parents=True)

    def path(self, oid: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{64}", oid):
            raise HubError(400, f"Not a sha256: {oid}")
        return self.folder / oid[:2] / oid

    def has(self, oid: str) -> bool:
        return self.path(oid).exists()

    def size(self, oid: str) -> int:
        return self.path(oid).stat().st_size

    def add(self, oid: str, chunks: Iterable[bytes]) -> None:
        file, digest = receive(chunks, self.incoming)
        if digest != oid:
            file.unlink()
            raise HubError(400, f"Content has the sha256 {digest}, not {oid}")
        self.path(oid).parent.mkdir(exist_ok=True)
        file.replace(self.path(oid))

    def add_part(self, oid: str, number: int, chunks: Iterable[bytes]) -> str:
        """Keeps a part, in place of one that an upload left which was given up; returns its sha256."""
        folder = self.incoming / f"parts-{oid}"
        folder.mkdir(exist_ok=True)
        file, digest = receive(chunks, self.incoming)
        file.replace(folder / str(number))
        return digest

    def join_parts(self, oid: str, numbers: list[int]) -> None:
        """Makes a file of its parts, and clears them, also those of other uploads of the same file."""
        folder = self.incoming / f"parts-{oid}"
        with self._joining:
            if not self.has(oid):
                missing = [number for number in numbers if not (folder / str(number)).exists()]
                if missing:
                    raise HubError(400, f"Parts {missing} of {oid} are missing")
                self.add(oid, (chunk for number in numbers for chunk in read(folder / str(number))))
            shutil.rmtree(folder, ignore_errors=True)
