"""Repositories: who owns them, their commits and pull requests."""

import base64
import json
import re
import shutil
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .cards import check_card
from .errors import HubError, not_found
from .files import write
from .git import GitRepo
from .lfs import GITATTRIBUTES, LARGEST_REGULAR, LargeFiles, make_pointer


NAME = re.compile(r"(?!.*(--|\.\.))(?![-.])[\w.\-]{1,96}(?<![-.])(?<!\.git)")


@dataclass
class PullRequest:
    """A proposal to change the branch `base`, which was at the commit `start` when it was opened."""

    title: str
    description: str
    author: str
    base: str
    start: str
    status: str
    created: float = field(default_factory=time.time)
    merge_commit: str | None = None


@dataclass
class Metadata:
    """What the Hub knows of a repository that is not in git."""

    private: bool
    gated: str | bool = False
    created: float = field(default_factory=time.time)
    pull_requests: list[PullRequest] = field(default_factory=list)


def check_path(path: str) -> None:
    if any(part in ("", ".", "..", ".git") for part in path.split("/")):
        raise HubError(400, f"Invalid path: {path}")


def merge_files(
    start: dict[str, str], ours: dict[str, str], theirs: dict[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Returns `ours` with the changes from `start` to `theirs`, and the paths in conflict."""
    changed = [path for path in start.keys() | theirs.keys() if theirs.get(path) != start.get(path)]
    conflicts = [path for path in changed if ours.get(path) not in (start.get(path), theirs.get(path))]
    merged = {path: blob for path, blob in ours.items() if path not in changed}
    return merged | {path: theirs[path] for path in changed if path in theirs}, sorted(conflicts)


def owner_of(key: str) -> str:
    """Returns who owns a repository: "user" of "user/model" and of "spaces/user/space"."""
    return key.removeprefix("spaces/").split("/")[0]


class Repo:
    """The repository of a model or a Space: a bare git repository, and a file with its metadata beside it."""

    def __init__(self, git: GitRepo, key: str, metadata: Metadata, large_files: LargeFiles):
        self.key = key
        self.id = key.removeprefix("spaces/")
        self.kind = "model" if key == self.id else "space"
        self.owner = owner_of(key)
        self.git = git
        self.metadata = metadata
        self.large_files = large_files
        self.lock = threading.RLock()  # of references and metadata

    @property
    def api_path(self) -> str:
        return f"/api/{self.kind}s/{self.id}"

    @property
    def metadata_path(self) -> Path:
        return self.git.path.with_suffix(".json")

    def save(self) -> None:
        write(self.metadata_path, json.dumps(asdict(self.metadata), indent=1).encode())

    def create_ref(self, name: str, revision: str) -> None:
        with self.lock:
            if name in self.git.refs():
                raise HubError(409, f"Reference already exists: {name}")
            self.git.set_ref(name, self.git.resolve(revision))

    def delete_ref(self, name: str) -> None:
        with self.lock:
            self.git.delete_ref(name)

    def _add_regular(self, path: str, value: dict[str, Any]) -> str:
        """Stores a file that comes with a commit, and returns its blob."""
        content = base64.b64decode(value["content"])
        if len(content) > LARGEST_REGULAR:
            raise HubError(400, f"{path} is too large for a regular file: {len(content)} bytes")
        if path == "README.md":
            errors, _ = check_card(content.decode("utf-8", "replace"), self.kind)
            if errors:
                raise HubError(400, f"Invalid metadata in README.md: {'; '.join(errors)}")
        return self.git.put("blob", content)

    def _add_large(self, path: str, oid: str) -> str:
        if not self.large_files.has(oid):
            raise HubError(400, f"An LFS pointer pointed to a file that does not exist: {path} ({oid})")
        return self.git.put("blob", make_pointer(oid, self.large_files.size(oid)))

    def _change(self, files: dict[str, str], operation: str, value: dict[str, Any], commit: str) -> None:
        """Applies one line of a commit to {path: blob}."""
        path = value["path"].removesuffix("/")
        check_path(path)
        if operation == "file":
            files[path] = self._add_regular(path, value)
        elif operation == "lfsFile":
            files[path] = self._add_large(path, value["oid"])
        elif operation in ("deletedFile", "deletedFolder"):
            is_folder = operation == "deletedFolder"
            gone = [name for name in files if (name.startswith(f"{path}/") if is_folder else name == path)]
            if not gone:
                raise not_found(path, commit)
            for name in gone:
                del files[name]
        else:
            raise HubError(400, f"Unknown operation: {operation}")

    def commit(
        self, revision: str, author: str, header: dict[str, Any], changes: list[dict[str, Any]], propose: bool
    ) -> tuple[str, int | None]:
        """Commits to a branch, or to a new pull request, whose number is returned beside the commit."""
        with self.lock:
            head, ref = self.git.resolve(revision), self.git.ref_of(revision)
            if ref is None or ref.startswith("refs/tags/"):
                raise HubError(400, f"Cannot commit to {revision}, which is not a branch")
            if not head.startswith(header.get("parentCommit") or ""):
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            files = self.git.files(head)
            for change in changes:
                self._change(files, change["key"], change["value"], head)
            summary, description = header["summary"], header.get("description", "")
            commit = self.git.commit(files, [head], author, f"{summary}\n\n{description}".strip())
            if not propose:
                self.git.set_ref(ref, commit)
                return commit, None
            number = self.propose(summary, description, author, ref, status="open")
            self.git.set_ref(f"refs/pr/{number}", commit)
            return commit, number

    def propose(self, title: str, description: str, author: str, base: str, status: str) -> int:
        """Opens a pull request without changes and returns its number."""
        with self.lock:
            start, number = self.git.resolve(base), len(self.metadata.pull_requests) + 1
            self.git.set_ref(f"refs/pr/{number}", start)
            self.metadata.pull_requests.append(PullRequest(title, description, author, base, start, status))
            self.save()
            return number

    def pull_request(self, number: int) -> PullRequest:
        if not 0 < number <= len(self.metadata.pull_requests):
            raise HubError(404, f"Discussion not found: {number}")
        return self.metadata.pull_requests[number - 1]

    def merged_files(self, number: int) -> tuple[dict[str, str], list[str]]:
        """Returns {path: blob} after merging a pull request, and the paths that are in conflict."""
        request = self.pull_request(number)
        commits = (request.start, self.git.resolve(request.base), self.git.resolve(f"refs/pr/{number}"))
        return merge_files(*map(self.git.files, commits))

    def merge(self, number: int, author: str) -> None:
        with self.lock:
            request = self.pull_request(number)
            files, conflicts = self.merged_files(number)
            if request.status == "merged" or conflicts:
                raise HubError(409, f"Cannot merge #{number}: {request.status}, in conflict: {conflicts}")
            parents = [self.git.resolve(request.base), self.git.resolve(f"refs/pr/{number}")]
            commit = self.git.commit(files, parents, author, f"{request.title} (#{number})")
            self.git.set_ref(request.base, commit)
            request.status, request.merge_commit = "merged", commit
            self.save()


class Repos:
    """All repositories in a folder, those of an earlier hub included."""

    def __init__(self, folder: Path, large_files: LargeFiles):
        self.folder = folder
        self.large_files = large_files
        self._lock = threading.Lock()
        self._repos: dict[str, Repo] = {}
        for path in [*folder.glob("*/*.json"), *folder.glob("spaces/*/*.json")]:
            fields = json.loads(path.read_text())
            requests = [PullRequest(**request) for request in fields.pop("pull_requests")]
            self._add(
                path.relative_to(folder).with_suffix("").as_posix(),
                Metadata(**fields, pull_requests=requests),
            )

    def _add(self, key: str, metadata: Metadata) -> Repo:
        git = GitRepo(self.folder / f"{key}.git")
        self._repos[key] = Repo(git, key, metadata, self.large_files)
        return self._repos[key]

    def get(self, key: str) -> Repo | None:
        return self._repos.get(key)

    def create(self, key: str, private: bool) -> bool:
        """Returns whether the repository is new."""
        owner, _, name = key.removeprefix("spaces/").partition("/")
        if not (NAME.fullmatch(owner) and NAME.fullmatch(name)):
            raise HubError(400, f"Invalid repo name: {key}")
        with self._lock:
            if key in self._repos:
                return False
            repo = self._add(key, Metadata(private))
            repo.git.init()
            files = {".gitattributes": repo.git.put("blob", GITATTRIBUTES.encode())}
            repo.git.set_ref("refs/heads/main", repo.git.commit(files, [], repo.owner, "initial commit"))
            repo.save()
            return True

    def delete(self, repo: Repo) -> None:
        with self._lock:
            del self._repos[repo.key]
            repo.metadata_path.unlink()
            shutil.rmtree(repo.git.path)
