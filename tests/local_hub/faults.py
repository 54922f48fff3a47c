"""What a test may do to requests, and what it can read about them afterwards."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from .errors import HubError
from .files import CHUNK


@dataclass
class Record:
    """A request; `status` is 0 until an answer is sent, and `received` counts the bytes of its body."""

    method: str
    path: str
    storage: bool  # whether it went to the storage's origin
    token: str  # that it carried, "" without one
    status: int = 0
    received: int = 0


@dataclass
class Fault:
    """
    What happens to the next `times` requests of a `method` whose path contains the regular expression `path`.

    A fault strikes after `delay` seconds and before the request is read; with `after_bytes` once so many
    bytes of it or its answer have passed and more are to come; with `lose_answer` when all work is done. It
    then calls `hook`, which can wait, change the repository or kill the client. Then a `status` is answered,
    the other two drop the connection, and otherwise the request goes on as if nothing had happened.
    """

    method: str
    path: str
    status: int = 0
    after_bytes: int = 0
    lose_answer: bool = False
    delay: float = 0.0
    hook: Callable[[], object] = lambda: None
    times: int = 1

    def matches(self, method: str, path: str) -> bool:
        return self.times > 0 and self.method == method and re.search(self.path, path) is not None

    def before(self) -> None:
        time.sleep(self.delay)
        if not (self.after_bytes or self.lose_answer):
            self.hook()
        if self.status:
            raise HubError(self.status, "Injected fault")

    def next_chunk(self, passed: int) -> int:
        """Returns how many bytes may pass next, after those that have."""
        if not self.after_bytes:
            return CHUNK
        if passed >= self.after_bytes:
            self.hook()
            raise ConnectionError("Injected fault: connection dropped")
        return min(CHUNK, self.after_bytes - passed)

    def answered(self) -> None:
        if self.lose_answer:
            self.hook()
            raise ConnectionError("Injected fault: answer lost")
