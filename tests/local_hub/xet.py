"""Xet storage: files as sequences of chunks of xorbs, in the formats that hf_xet reads and writes."""

import json
import re
import secrets
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from .errors import HubError
from .files import read, receive, write
from .lfs import LargeFiles


LIFETIME = 3600  # seconds, of a token
# of a shard: its header, and each of the records behind it
HEADER = RECORD = 48  # bytes
HAS_VERIFICATION, HAS_SHA256 = 1 << 31, 1 << 30


@dataclass
class Segment:
    """The chunks `start` to `end` (exclusive) of a xorb, and their bytes when unpacked."""

    xorb: str
    size: int
    start: int
    end: int


@dataclass
class Recipe:
    """What a file is made of."""

    hash: str
    sha256: str
    segments: list[Segment]

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)


def read_hash(data: bytes) -> str:
    """Returns the 32 bytes of a hash as Xet spells them: four little-endian numbers."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", data))


def read_shard(data: bytes) -> list[Recipe]:
    """Returns the files of a shard: each has a head, segments, their verification and a sha256."""
    recipes, position = [], HEADER
    while position + RECORD <= len(data) and data[position : position + 32] != b"\xff" * 32:
        name = read_hash(data[position : position + 32])
        flags, count = struct.unpack("<II", data[position + 32 : position + 40])
        position += RECORD
        segments = [
            Segment(
                read_hash(data[start : start + 32]), *struct.unpack("<III", data[start + 36 : start + 48])
            )
            for start in range(position, position + RECORD * count, RECORD)
        ]
        position += RECORD * count * (2 if flags & HAS_VERIFICATION else 1)
        if flags & HAS_SHA256:
            recipes.append(Recipe(name, read_hash(data[position : position + 32]), segments))
            position += RECORD
    return recipes


def chunk_offsets(path: Path) -> list[int]:
    """Returns where in a xorb each chunk starts, and where the last one ends, in bytes."""
    offsets, size = [0], path.stat().st_size
    with path.open("rb") as file:
        while offsets[-1] + 8 <= size:
            file.seek(offsets[-1])
            head = file.read(8)
            if head[0] != 0 or head[:7] == b"XETBLOB":  # the footer, which is optional
                break
            offsets.append(offsets[-1] + 8 + int.from_bytes(head[1:4], "little"))
    return offsets


class XetStorage:
    """Xorbs and recipes in a folder; `sign` makes the URL from which clients load a path of the storage."""

    def __init__(self, folder: Path, large_files: LargeFiles, endpoint: str, sign: Callable[[str, str], str]):
        self.large_files = large_files
        self.endpoint = endpoint
        self._sign = sign
        self._tokens: set[str] = set()
        self._xorbs, self._recipes, self._verified = (
            folder / name for name in ("xorbs", "recipes", "verified")
        )
        for part in (self._xorbs, self._recipes, self._verified):
            part.mkdir(parents=True, exist_ok=True)

    def new_token(self) -> str:
        token = secrets.token_hex(16)
        self._tokens.add(token)
        return token

    def knows(self, token: str) -> bool:
        return token in self._tokens

    def xorb(self, name: str) -> Path:
        return self._xorbs / name

    def add_xorb(self, name: str, chunks: Iterable[bytes]) -> bool:
        """Returns whether the xorb is new."""
        is_new = not self.xorb(name).exists()
        file, _ = receive(chunks, self.large_files.incoming)
        file.replace(self.xorb(name))
        return is_new

    def add_shard(self, data: bytes) -> None:
        for recipe in read_shard(data):
            for segment in recipe.segments:
                path = self.xorb(segment.xorb)
                if not path.exists() or len(chunk_offsets(path)) <= segment.end:
                    raise HubError(400, f"Shard refers to a missing xorb or chunk: {segment.xorb}")
            for name in (recipe.hash, recipe.sha256):
                write(self._recipes / f"{name}.json", json.dumps(asdict(recipe)).encode())

    def _recipe(self, name: str) -> Recipe | None:
        """Returns the recipe of a file by its Xet hash or its sha256."""
        path = self._recipes / f"{name}.json"
        if not path.exists():
            return None
        fields = json.loads(path.read_text())
        return Recipe(**{**fields, "segments": [Segment(**segment) for segment in fields["segments"]]})

    def reconstruction(self, name: str, byte_range: str) -> dict[str, Any]:
        """Returns where the bytes of a file lie; `byte_range` is a Range header."""
        recipe = self._recipe(name)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", byte_range)
        if recipe is None or match is None:
            raise HubError(404, f"No such file: {name}")
        start, end = int(match[1]), int(match[2]) + 1 if match[2] else recipe.size
        if start >= recipe.size:
            raise HubError(416, f"Only {recipe.size} bytes, not {byte_range}")
        begins = [0, *accumulate(segment.size for segment in recipe.segments)]
        parts = [
            (begin, segment)
            for begin, segment in zip(begins, recipe.segments, strict=False)
            if begin < end and begin + segment.size > start
        ]
        places: dict[str, list[dict[str, Any]]] = {}
        for segment in {(part.xorb, part.start, part.end): part for _, part in parts}.values():
            places.setdefault(segment.xorb, []).append(self._place(segment))
        terms = [
            {"hash": part.xorb, "unpacked_length": part.size, "range": {"start": part.start, "end": part.end}}
            for _, part in parts
        ]
        return {"offset_into_first_range": start - parts[0][0], "terms": terms, "fetch_info": places}

    def _place(self, segment: Segment) -> dict[str, Any]:
        """Returns where a segment lies, in bytes of its xorb (`end` inclusive)."""
        offsets = chunk_offsets(self.xorb(segment.xorb))
        return {
            "range": {"start": segment.start, "end": segment.end},
            "url": self._sign("GET", f"/xorb/{segment.xorb}"),
            "url_range": {"start": offsets[segment.start], "end": offsets[segment.end] - 1},
        }

    def verified_hash(self, oid: str) -> str | None:
        """Returns the Xet hash of a large file that came through Xet."""
        path = self._verified / oid
        return path.read_text() if path.exists() else None

    def rebuild(self, oid: str) -> None:
        """
        Makes a file of its chunks, which proves that they have the promised sha256.

        It loads them as any client would, so these requests too are in the log, and faults can strike them.
        """
        recipe = self._recipe(oid)
        if recipe is None:
            return
        import hf_xet

        target = self.large_files.incoming / f"xet-{secrets.token_hex(8)}"
        expiry = int(time.time()) + LIFETIME
        with hf_xet.XetSession().new_file_download_group(
            endpoint=self.endpoint, token=self.new_token(), token_expiry_unix_secs=expiry
        ) as group:
            group.start_download_file(hf_xet.XetFileInfo(recipe.hash, recipe.size), str(target))
        try:
            self.large_files.add(oid, read(target))
        finally:
            target.unlink()
        write(self._verified / oid, recipe.hash.encode())
