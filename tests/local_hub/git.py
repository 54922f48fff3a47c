"""Just enough of git for a bare repository: loose objects and loose references, which git itself can read."""

import hashlib
import re
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from .errors import HubError
from .files import write


FILE, FOLDER = "100644", "40000"  # the modes of a tree's entries
COMMIT = re.compile(r"[0-9a-f]{40}")
REFERENCE = re.compile(r"refs/(heads|tags|pr)(/(?!\.)[\w.\-]+)+")


@dataclass
class Commit:
    """A commit; `date` in seconds since 1970."""

    oid: str
    tree: str = ""
    parents: list[str] = field(default_factory=list)
    author: str = ""
    date: int = 0
    message: str = ""


class GitRepo:
    """A bare repository in a folder."""

    def __init__(self, path: Path):
        self.path = path

    def init(self) -> None:
        for folder in ("objects/info", "objects/pack", "refs/heads", "refs/tags"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        write(self.path / "HEAD", b"ref: refs/heads/main\n")
        write(self.path / "config", b"[core]\n\trepositoryformatversion = 0\n\tbare = true\n")

    def _object(self, oid: str) -> Path:
        return self.path / "objects" / oid[:2] / oid[2:]

    def put(self, kind: str, data: bytes) -> str:
        """Stores an object and returns its sha1, as git computes it."""
        raw = f"{kind} {len(data)}\0".encode() + data
        oid = hashlib.sha1(raw).hexdigest()
        if not self._object(oid).exists():
            write(self._object(oid), zlib.compress(raw, 1))
        return oid

    def get(self, oid: str) -> tuple[str, bytes]:
        """Returns the kind of an object, and what it holds."""
        head, _, data = zlib.decompress(self._object(oid).read_bytes()).partition(b"\0")
        return head.split()[0].decode(), data

    def blob(self, oid: str) -> bytes:
        return self.get(oid)[1]

    def put_tree(self, files: dict[str, str]) -> str:
        """Stores the folders of {path: blob}."""
        entries: dict[str, tuple[str, str]] = {}
        folders: dict[str, dict[str, str]] = {}
        for path, oid in files.items():
            first, _, rest = path.partition("/")
            if rest:
                folders.setdefault(first, {})[rest] = oid
            else:
                entries[first] = (FILE, oid)
        for name, inside in folders.items():
            if name in entries:
                raise HubError(400, f"{name!r} is both a file and a folder")
            entries[name] = (FOLDER, self.put_tree(inside))
        # git sorts a folder as if its name ended with a slash
        order = sorted(entries, key=lambda name: name + "/" * (entries[name][0] == FOLDER))
        lines = [f"{entries[name][0]} {name}\0".encode() + bytes.fromhex(entries[name][1]) for name in order]
        return self.put("tree", b"".join(lines))

    def read_tree(self, oid: str) -> dict[str, tuple[str, str]]:
        """Returns {path: (mode, oid)} of a tree and all folders inside it, which are listed too."""
        found: dict[str, tuple[str, str]] = {}
        rest = self.get(oid)[1]
        while rest:
            head, _, rest = rest.partition(b"\0")
            mode, _, name = head.decode().partition(" ")
            child, rest = rest[:20].hex(), rest[20:]
            found[name] = (mode, child)
            if mode == FOLDER:
                found |= {f"{name}/{path}": entry for path, entry in self.read_tree(child).items()}
        return found

    def entries(self, commit: str) -> dict[str, tuple[str, str]]:
        """Returns {path: (mode, oid)} of a commit's files and folders."""
        return self.read_tree(self.read_commit(commit).tree)

    def files(self, commit: str) -> dict[str, str]:
        """Returns {path: blob} of a commit's files."""
        return {path: oid for path, (mode, oid) in self.entries(commit).items() if mode == FILE}

    def commit(self, files: dict[str, str], parents: list[str], author: str, message: str) -> str:
        who = f"{author} <{author}@localhost> {int(time.time())} +0000"
        lines = [f"tree {self.put_tree(files)}", *(f"parent {parent}" for parent in parents)]
        lines += [f"author {who}", f"committer {who}", "", message.rstrip("\n") + "\n"]
        return self.put("commit", "\n".join(lines).encode())

    def read_commit(self, oid: str) -> Commit:
        head, _, message = self.get(oid)[1].decode().partition("\n\n")
        commit = Commit(oid, message=message)
        for line in head.split("\n"):
            key, _, value = line.partition(" ")
            if key == "tree":
                commit.tree = value
            elif key == "parent":
                commit.parents.append(value)
            elif key == "author":
                commit.author, commit.date = value.split(" <")[0], int(value.split()[-2])
        return commit

    def history(self, oid: str) -> list[Commit]:
        """Returns a commit and its first parents, the newest first."""
        commits = [self.read_commit(oid)]
        while commits[-1].parents:
            commits.append(self.read_commit(commits[-1].parents[0]))
        return commits

    def refs(self) -> dict[str, str]:
        """Returns {full name: commit} of all branches, tags and pull requests."""
        names = sorted(path for path in (self.path / "refs").rglob("*") if path.is_file())
        found = {path.relative_to(self.path).as_posix(): path for path in names}
        return {name: path.read_text().strip() for name, path in found.items() if REFERENCE.fullmatch(name)}

    def set_ref(self, name: str, oid: str) -> None:
        if not REFERENCE.fullmatch(name) or ".." in name or name.endswith(".lock"):
            raise HubError(400, f"Invalid reference name: {name}")
        write(self.path / name, oid.encode() + b"\n")

    def delete_ref(self, name: str) -> None:
        if name not in self.refs():
            raise HubError(404, f"Reference not found: {name}", "RevisionNotFound")
        (self.path / name).unlink()

    def ref_of(self, revision: str) -> str | None:
        """Returns the full name of a branch, a tag or a pull request."""
        refs = self.refs()
        names = (revision, f"refs/heads/{revision}", f"refs/tags/{revision}")
        return next((name for name in names if name in refs), None)

    def resolve(self, revision: str) -> str:
        """Returns the commit that a revision names."""
        if name := self.ref_of(revision):
            return self.refs()[name]
        is_commit = COMMIT.fullmatch(revision) and self._object(revision).exists()
        if is_commit and self.get(revision)[0] == "commit":
            return revision
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
