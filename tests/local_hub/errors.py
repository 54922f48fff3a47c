"""The errors that the Hub answers with."""

from typing import Any


class HubError(Exception):
    """An answer with a status of 400 or more; clients tell its reasons apart by `code` (X-Error-Code)."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.body = {"error": message, **(body or {})}
        self.headers = headers or {}


def not_found(what: str, commit: str) -> HubError:
    """Returns the error of a missing file; without the commit clients do not remember that it is missing."""
    return HubError(404, f"Entry not found: {what}", "EntryNotFound", headers={"X-Repo-Commit": commit})
