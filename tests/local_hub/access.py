"""Who may do what: tokens of users on the Hub's origin, signatures on the storage's."""

import hmac
import secrets
import time
from dataclasses import dataclass, field
from email.message import Message

from .errors import HubError
from .repos import Repo, owner_of


LIFETIME = 3600  # seconds, of a signed URL


@dataclass(frozen=True)
class User:
    """Who sent a token, and whether it is one to write with."""

    name: str
    writes: bool

    @property
    def role(self) -> str:
        return "write" if self.writes else "read"


def token_of(headers: Message) -> str:
    """Returns the token that a request carries, "" without one."""
    return headers.get("Authorization", "").removeprefix("Bearer ")


def user_of(token: str, tokens: dict[str, str]) -> User | None:
    """Returns the user of a token, None without one."""
    if not token:
        return None
    if (name := tokens.get(token)) is None:
        # clients recognise a wrong token by this sentence
        raise HubError(401, "Invalid credentials in Authorization header")
    return User(name.removesuffix(":read"), not name.endswith(":read"))


def signed_in(user: User | None) -> User:
    if user is None:
        raise HubError(401, "Invalid username or password.")
    return user


def visible(repo: Repo | None, repo_id: str, user: User | None) -> Repo:
    """Returns the repository; strangers learn nothing about private ones, not even that they exist."""
    is_owner = user is not None and owner_of(repo_id) == user.name
    if repo is not None and (is_owner or not repo.metadata.private):
        return repo
    raise HubError(401 if user is None else 404, "Repository not found", "RepoNotFound")


def check_gate(repo: Repo, user: User | None) -> None:
    if repo.metadata.gated and (user is None or user.name != repo.owner):
        raise HubError(
            401 if user is None else 403, f"Access to {repo.kind} {repo.id} is restricted", "GatedRepo"
        )


def check_writes(owner: str, user: User) -> None:
    if user.name != owner or not user.writes:
        raise HubError(403, f"A token with write access to {owner}'s repositories is needed")


@dataclass
class Signer:
    """Makes the URLs of the storage, each good for one method and an hour."""

    endpoint: str
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def _signature(self, method: str, path: str, expiry: str) -> str:
        return hmac.new(self.secret, f"{method} {path} {expiry}".encode(), "sha256").hexdigest()

    def sign(self, method: str, path: str) -> str:
        expiry = str(int(time.time()) + LIFETIME)
        return f"{self.endpoint}{path}?expiry={expiry}&signature={self._signature(method, path, expiry)}"

    def check(self, method: str, path: str, query: dict[str, str]) -> None:
        expiry, given = query.get("expiry", "0"), query.get("signature", "")
        is_good = hmac.compare_digest(given, self._signature(method, path, expiry))
        if not is_good or int(expiry) < time.time():
            raise HubError(403, "Bad or expired signature")
