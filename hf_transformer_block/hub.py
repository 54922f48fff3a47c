"""Pushes a staged model to the Hub in one commit, and says what has become of it whatever fails."""

import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from .staging import MODEL_FILES, Staged


WAITS = (1, 2, 4, 8)  # seconds before the commit is asked for again
PASSING = (408, 429, 500, 502, 503, 504)  # statuses of a Hub that may recover
INTERRUPTED = "interrupted; nothing was pushed"
# of the Hub and of the network; the client wraps those of uploads, and reads an error's page as JSON
ERRORS = (HTTPError, OSError, RuntimeError, json.JSONDecodeError)


@dataclass(frozen=True)
class Place:
    """Where a model goes, or a Space with it."""

    repo_id: str
    branch: str = "main"
    create_pr: bool = False
    private: bool = False
    tag: str | None = None
    is_space: bool = False

    @property
    def repo_type(self) -> str:
        return "space" if self.is_space else "model"


def check_names(place: Place) -> None:
    """
    Raises ValueError for what cannot be names.

    That is an address or an impossible id of a repository, and a branch or a tag that git would refuse or
    others mix up.
    """
    pasted = re.match(r"(https?://[^/]+|[\w-]+(\.[\w-]+)+)/(?:spaces/)?([\w.-]+/[\w.-]+)", place.repo_id)
    if pasted:
        raise ValueError(f"{place.repo_id} is an address: give the repository's name alone, {pasted[3]}")
    try:
        validate_repo_id(place.repo_id)
    except HFValidationError as error:
        raise ValueError(f"{place.repo_id!r} is no name of a repository, as user/name: {error}") from error
    for kind, name in (("branch", place.branch), ("tag", place.tag)):
        if name is None:
            continue
        is_plain = re.fullmatch(r"[A-Za-z0-9][\w./-]{0,99}", name, flags=re.ASCII)
        if not is_plain or re.search(r"\.\.|//|[./]$|\.lock$|^refs/|^[0-9a-f]{40}$", name):
            raise ValueError(f"--{kind} {name[:40]!r} is no name of a {kind}: take letters, digits and . _ -")
    if place.tag in ("main", place.branch):
        raise ValueError(f"--tag {place.tag} is the name of a branch, which moves: take another, as in v1")


@dataclass(frozen=True)
class Pushed:
    """What a push came to."""

    commit: str  # 40 hexadecimal digits
    revision: str  # branch, or refs/pr/N
    is_new: bool  # else everything was there already


def cause_of(error: BaseException) -> BaseException:
    """Returns the error itself, or what the client wrapped in a RuntimeError."""
    return error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status behind an error, None if there was no answer."""
    return getattr(getattr(cause_of(error), "response", None), "status_code", None)


def reason(error: BaseException) -> str:
    """Returns what the Hub said, in a line."""
    cause, status = cause_of(error), status_of(error)
    text = getattr(cause, "server_message", None) or str(cause) or type(cause).__name__
    message = text.strip().splitlines()[0]
    return f"{message} (HTTP {status})" if status and str(status) not in message else message


def unproven(repo_id: str, commit: str) -> str:
    """Returns the words of a push that Ctrl-C ended late."""
    return f"interrupted, but {repo_id} has commit {commit} with all files, which is not proven yet"


@contextmanager
def adding(note: str) -> Iterator[None]:
    """Adds to the words with which a push ends early; Ctrl-C has none of its own before the commit."""
    try:
        yield
    except (ValueError, KeyboardInterrupt) as error:
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ValueError
        raise kind("; ".join([str(error) or INTERRUPTED, note])) from error


@contextmanager
def told(doing: str, remedy: str) -> Iterator[None]:
    """Turns the errors of the Hub and of the network into a ValueError of one sentence."""
    try:
        yield
    except ERRORS as error:
        raise ValueError(f"{doing}: {reason(error)}; {remedy}") from error


@contextmanager
def making(what: str, repo_id: str) -> Iterator[None]:
    """Turns the errors of a request into words: a repository or a branch may be made although it failed."""
    try:
        with told(f"cannot write to {repo_id}", "nothing was pushed: check what the token may do"):
            yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"{INTERRUPTED}; {what} may have been made") from error
    except ValueError as error:
        status = status_of(error.__cause__)
        if status is None or status in PASSING:
            raise ValueError(f"{error}; {what} may have been made") from error
        raise


def full_name(repo_id: str, user: str) -> str:
    """Returns the id of a repository, of which a bare name is the user's."""
    return repo_id if "/" in repo_id else f"{user}/{repo_id}"


def login(api: HfApi, place: Place) -> str:
    """Returns the full id of the repository, whose namespace the token may write to; raises ValueError."""
    if constants.HF_HUB_OFFLINE:
        raise ValueError("HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set: unset it to push")
    if not (api.token or get_token()):
        raise ValueError("no token: `hf auth login`, or set HF_TOKEN to one that may write")
    try:
        user = api.whoami()
    except ERRORS as error:
        if status_of(error) in (401, 403):
            remedy = "`hf auth login` with one that may write"
            raise ValueError(f"the Hub refuses the token: {reason(error)}; {remedy}") from error
        raise ValueError(f"cannot reach the Hub: {reason(error)}; nothing was pushed: try again") from error
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(
            f"the token of {user['name']} may only read: `hf auth login` with one that may write"
        )
    repo_id = full_name(place.repo_id, user["name"])
    namespaces = [user["name"], *(organization["name"] for organization in user.get("orgs", []))]
    if repo_id.split("/")[0] not in namespaces and not place.create_pr:
        raise ValueError(
            f"{repo_id}: {user['name']} may write to {', '.join(namespaces)}; push there, or --create-pr"
        )
    return repo_id


def check_access(api: HfApi, place: Place) -> tuple[Place, bool]:
    """
    Returns the place with its full id, and whether the repository is there; sends nothing.

    Raises:
        ValueError: no push to it can succeed; in one sentence.
    """
    check_names(place)
    place = replace(place, repo_id=login(api, place))
    with told(f"cannot read {place.repo_id}", "nothing was pushed: try again"):
        try:
            info = api.repo_info(place.repo_id, repo_type=place.repo_type)
        except RepositoryNotFoundError:
            if place.create_pr:
                raise ValueError(
                    f"{place.repo_id} does not exist, or is private: --create-pr needs it"
                ) from None
            return place, False
    if place.private and not info.private:
        raise ValueError(
            f"{place.repo_id} is there and public: make it private in its settings, or push elsewhere"
        )
    return place, True


def find_model(api: HfApi, repo_id: str) -> str:
    """Returns the full id of a model to which a Space is to link; raises ValueError if it is not there."""
    with told(f"cannot read {repo_id}", "nothing was pushed: try again"):
        repo_id = full_name(repo_id, api.whoami()["name"])
        if api.repo_exists(repo_id):
            return repo_id
    raise ValueError(
        f"{repo_id}, to which the Space would link, is not on the Hub, or is private: push it first, or "
        "leave it out"
    )


def digests(file: Path) -> set[str]:
    """Returns the two names that a file may have on the Hub: of a large file, and of a git blob."""
    large, blob = hashlib.sha256(), hashlib.sha1(f"blob {file.stat().st_size}\0".encode())
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            large.update(block)
            blob.update(block)
    return {large.hexdigest(), blob.hexdigest()}


class Push:
    """One commit of staged files on a branch or a pull request of a repository that is there."""

    def __init__(self, api: HfApi, staged: Staged, place: Place):
        self.api, self.staged, self.place, self.repo_id = api, staged, place, place.repo_id
        self.wanted = {name: digests(staged.folder / name) for name in staged.files}

    def read(self, revision: str) -> tuple[str, dict[str, str]]:
        """Returns a revision's commit, and the digest of each file: of a model's, at the top of its tree."""
        repo_type = self.place.repo_type
        commit = self.api.repo_info(self.repo_id, revision=revision, repo_type=repo_type).sha
        is_deep = self.place.is_space
        entries = self.api.list_repo_tree(
            self.repo_id, revision=commit, repo_type=repo_type, recursive=is_deep
        )
        files = [entry for entry in entries if isinstance(entry, RepoFile)]
        return commit, {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in files}

    def stale(self, tree: dict[str, str]) -> list[str]:
        """Returns the files of an earlier push which this one lacks; nobody else's."""
        if not self.staged.is_whole:
            return []
        inside = f"{self.staged.inside}/" if self.staged.inside else ""
        patterns = [inside + pattern for pattern in MODEL_FILES]
        return sorted(
            name
            for name in tree
            if name not in self.wanted and any(fnmatch(name, pattern) for pattern in patterns)
        )

    def changes(self, tree: dict[str, str]) -> list[CommitOperationAdd | CommitOperationDelete]:
        """Returns what a commit on a tree has to do."""
        added = [name for name, known in self.wanted.items() if tree.get(name) not in known]
        return [
            *(CommitOperationAdd(name, self.staged.folder / name) for name in added),
            *(CommitOperationDelete(name) for name in self.stale(tree)),
        ]

    def find(self) -> Pushed | None:
        """Returns where the Hub has these very files: on the branch, or in an open pull request of ours."""
        revisions = [self.place.branch]
        if self.place.create_pr:
            mine = {"author": self.api.whoami()["name"], "discussion_status": "open"}
            found = self.api.get_repo_discussions(
                self.repo_id, discussion_type="pull_request", repo_type=self.place.repo_type, **mine
            )
            revisions += [f"refs/pr/{request.num}" for request in found]
        for revision in revisions:
            commit, tree = self.read(revision)
            if not self.changes(tree):
                return Pushed(commit, revision, is_new=False)
        return None

    def commit(self, parent: str, tree: dict[str, str], message: str) -> Pushed:
        """Asks for the commit once; raises the client's errors."""
        made = self.api.create_commit(
            self.repo_id,
            self.changes(tree),
            repo_type=self.place.repo_type,
            commit_message=message,
            revision=self.place.branch,
            create_pr=self.place.create_pr,
            parent_commit=parent,
        )
        return Pushed(made.oid, made.pr_revision or self.place.branch, is_new=True)

    def after(self, error: BaseException, is_last: bool) -> Pushed | None:
        """
        Looks what became of a commit that failed.

        Returns:
            the push, if only its answer was lost; None if it may be tried again.

        Raises:
            ValueError: in one sentence, which says whether anything was pushed.
        """
        failure, status = f"the push to {self.repo_id} failed: {reason(error)}", status_of(error)
        try:
            found = self.find()
        except ERRORS:
            raise ValueError(
                f"{failure}; whether it was made is unknown, for the Hub does not answer: run again, which "
                "is safe"
            ) from error
        if found:
            return replace(found, is_new=True)
        if status in (409, 412):
            raise ValueError(
                f"somebody else has pushed to {self.repo_id} meanwhile, so nothing was pushed: see what they "
                "did, then run again"
            ) from error
        if status in (401, 403):
            raise ValueError(f"{failure}; nothing was pushed: check what the token may do") from error
        if is_last or not (status is None or status in PASSING):
            raise ValueError(f"{failure}; nothing was pushed: run again, which is safe") from error
        return None

    def ask(self, parent: str, tree: dict[str, str], message: str) -> Pushed:
        """Commits; asks again where the Hub failed and holds no such commit. Raises as `after` does."""
        waits = iter(WAITS)
        while True:
            try:
                return self.commit(parent, tree, message)
            except ERRORS as error:
                wait = next(waits, None)
                if found := self.after(error, is_last=wait is None):
                    return found
            except ValueError as error:
                line = " ".join(str(error).split())
                raise ValueError(f"the Hub refuses the card, so nothing was pushed: {line}") from error
            time.sleep(wait)

    def after_interrupt(self) -> str:
        """Returns what Ctrl-C in a commit has left, as far as one look tells."""
        try:
            found = self.find()
        except (*ERRORS, KeyboardInterrupt):
            found = None
        if found:
            return unproven(self.repo_id, found.commit)
        return f"interrupted; whether {self.repo_id} gets the commit is unknown, for now it is not seen there"

    def run(self, message: str) -> Pushed:
        """
        Commits, unless the files are there already.

        Raises:
            ValueError, KeyboardInterrupt: in one sentence, which says whether anything was pushed.
        """
        with told(f"cannot read {self.repo_id}", "nothing was pushed: try again"):
            if found := self.find():
                return found
            parent, tree = self.read(self.place.branch)
        try:
            return self.ask(parent, tree, message)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(self.after_interrupt()) from error

    def check_tag(self, found: Pushed | None) -> bool:
        """Returns whether the tag is to be made; raises ValueError if it names something else already."""
        tag = self.place.tag
        refs = self.api.list_repo_refs(self.repo_id, repo_type=self.place.repo_type)
        tags = {ref.name: ref.target_commit for ref in refs.tags}
        if tag in tags and not (found and found.commit == tags[tag]):
            raise ValueError(
                f"{self.repo_id} has a tag {tag} already, at {tags[tag][:8]}: give another --tag"
            )
        return bool(tag) and tag not in tags

    def check_weights(self, revision: str) -> None:
        """Raises ValueError if a revision's weights are others than those which the card describes."""
        _, tree = self.read(revision)
        for file in sorted(self.staged.folder.glob("*.safetensors")):
            if tree.get(file.name) not in digests(file):
                raise ValueError(
                    f"{self.repo_id} holds another {file.name} than the card is about: push the model "
                    "without --card-only"
                )
