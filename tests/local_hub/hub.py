"""A local stand-in for the Hugging Face Hub, with both of its origins on 127.0.0.1."""

import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

from . import read_routes, storage_routes, write_routes
from .access import Signer
from .errors import HubError
from .faults import Fault, Record
from .lfs import LargeFiles
from .repos import Repos
from .server import Server
from .xet import XetStorage


@dataclass
class LocalHub:
    """
    A Hub that keeps everything in the folder `root`, from `start` to `stop` or inside a `with` block.

    `tokens` names the user of each token; one of "alice:read" only reads. With `xet` clients upload as they
    do by default, otherwise they need HF_HUB_DISABLE_XET=1, and files of more than `multipart_over` bytes
    travel in parts of `part_size` bytes.
    """

    root: Path
    tokens: dict[str, str]
    port: int = 0
    xet: bool = False
    multipart_over: int | None = None
    part_size: int = 16 << 20
    log: list[Record] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.large_files = LargeFiles(self.root / "lfs")
        self.repos = Repos(self.root / "repos", self.large_files)
        self._fault_lock = threading.Lock()

    def start(self) -> "LocalHub":
        self._servers = [
            Server(self, self.port, read_routes.ROUTES + write_routes.ROUTES, is_storage=False),
            Server(self, 0, storage_routes.ROUTES, is_storage=True),
        ]
        self.url, self.storage_url = (server.url for server in self._servers)
        self.signer = Signer(self.storage_url)
        self.xet_storage = (
            XetStorage(self.root / "xet", self.large_files, self.storage_url, self.signer.sign)
            if self.xet
            else None
        )
        for server in self._servers:
            server.start()
        return self

    def stop(self) -> None:
        for server in self._servers:
            server.stop()

    __enter__ = start

    def __exit__(self, *error: object) -> None:
        self.stop()

    def fault_for(self, method: str, path: str) -> Fault:
        """Uses up one time of the first fault that matches a request; returns a harmless one otherwise."""
        with self._fault_lock:
            fault = next((fault for fault in self.faults if fault.matches(method, path)), Fault(method, path))
            fault.times -= 1
            return fault

    def require_xet(self) -> XetStorage:
        if self.xet_storage is None:
            raise HubError(404, "This Hub has no Xet storage: set HF_HUB_DISABLE_XET=1")
        return self.xet_storage

    def requests(self, pattern: str) -> list[Record]:
        """Returns the requests so far whose "METHOD path" contains a regular expression."""
        return [record for record in self.log if re.search(pattern, f"{record.method} {record.path}")]
