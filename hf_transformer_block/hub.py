"""Pushes a staged model to the Hub in one commit, and proves that strangers load it."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load_file

from .card import find_auto_class, published_card
from .card_checks import front_matter
from .staging import MODEL_FILES, Staged, read_config, stage


PROBE = Path(__file__).with_name("probe.py")
WAITS = (1, 2, 4, 8)  # seconds before the commit is asked for again
PASSING = {408, 429, 500, 502, 503, 504}  # statuses of a Hub that may recover
ERRORS = (HTTPError, OSError)  # of the Hub and of the network


@dataclass(frozen=True)
class Place:
    """Where a model goes."""

    repo_id: str
    branch: str = "main"
    create_pr: bool = False
    private: bool = False
    tag: str | None = None


@dataclass(frozen=True)
class Pushed:
    """What a push came to."""

    commit: str  # 40 hexadecimal digits
    revision: str  # branch, or refs/pr/N
    is_new: bool  # else everything was there already


def reason(error: Exception) -> str:
    """Returns what the Hub said, in a line."""
    message = getattr(error, "server_message", None) or str(error).strip().splitlines()[0]
    status = getattr(getattr(error, "response", None), "status_code", None)
    return f"{message} (HTTP {status})" if status and str(status) not in message else message


@contextmanager
def told(doing: str, remedy: str) -> Iterator[None]:
    """Turns the errors of the Hub and of the network into a ValueError of one sentence."""
    try:
        yield
    except ERRORS as error:
        raise ValueError(f"{doing}: {reason(error)}; {remedy}") from error


def probe(model: str | Path, revision: str | None = None, *, is_stranger: bool, has_tokenizer: bool) -> dict:
    """
    Returns what a model computes on fixed inputs, in a process of its own with an empty cache.

    Raises:
        ValueError: it does not load, with that process's error.
    """
    request = {"model": str(model.resolve() if isinstance(model, Path) else model), "revision": revision}
    request |= {"is_stranger": is_stranger, "has_tokenizer": has_tokenizer}
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"HF_HOME": home, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        for name in ("HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_XET_CACHE", "PYTHONSTARTUP"):
            environment.pop(name, None)
        if token := get_token():
            environment["HF_TOKEN"] = token
        if revision is None:
            environment["HF_HUB_OFFLINE"] = "1"
        result = f"{home}/result.safetensors"
        command = [sys.executable, "-c", PROBE.read_text(encoding="utf-8"), json.dumps(request), result]
        done = subprocess.run(
            command, env=environment, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            errors = re.findall(r"^\w[\w.]*(?:Error|Exception)\b.*", done.stderr, flags=re.MULTILINE)
            raise ValueError(errors[-1] if errors else f"exit code {done.returncode}")
        return load_file(result)


def check_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference of two probes; raises ValueError if it is more than rounding."""
    if ours.keys() != theirs.keys() or any(ours[name].shape != theirs[name].shape for name in ours):
        raise ValueError(f"it returns {sorted(theirs)} where the original returns {sorted(ours)}")
    largest = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    if not all(torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-5) for name in ours):
        raise ValueError(f"its logits differ by {largest:.3g} from the original's")
    return largest


def login(api: HfApi, place: Place) -> str:
    """Returns the full id of the repository, whose namespace the token may write to; raises ValueError."""
    if not (api.token or get_token()):
        raise ValueError("no token: `hf auth login`, or set HF_TOKEN to one that may write")
    with told("the Hub refuses the token", "`hf auth login` with one that may write"):
        user = api.whoami()
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(
            f"the token of {user['name']} may only read: `hf auth login` with one that may write"
        )
    repo_id = place.repo_id if "/" in place.repo_id else f"{user['name']}/{place.repo_id}"
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"{place.repo_id!r} is no name of a repository, as user/name: {error}") from error
    namespaces = [user["name"], *(organization["name"] for organization in user.get("orgs", []))]
    if repo_id.split("/")[0] not in namespaces and not place.create_pr:
        raise ValueError(
            f"{repo_id}: {user['name']} may write to {', '.join(namespaces)}; push there, or --create-pr"
        )
    return repo_id


def check_repository(api: HfApi, repo_id: str, place: Place) -> bool:
    """Returns whether the repository is there; raises ValueError if it may not be pushed to."""
    with told(f"cannot read {repo_id}", "nothing was pushed: try again"):
        try:
            info = api.model_info(repo_id)
        except RepositoryNotFoundError:
            if place.create_pr:
                raise ValueError(f"{repo_id} does not exist, or is private: --create-pr needs it") from None
            return False
    if place.private and not info.private:
        raise ValueError(f"{repo_id} is there and public: make it private in its settings, or push elsewhere")
    return True


def check_access(api: HfApi, place: Place) -> tuple[str, bool]:
    """
    Returns the repository's full id and whether it is there, and sends nothing.

    Raises:
        ValueError: no push to it can succeed; in one sentence.
    """
    repo_id = login(api, place)
    return repo_id, check_repository(api, repo_id, place)


def hashes(file: Path) -> set[str]:
    """Returns the two names that a file may have on the Hub: of a large file, and of a git blob."""
    large, blob = hashlib.sha256(), hashlib.sha1(f"blob {file.stat().st_size}\0".encode())
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            large.update(block)
            blob.update(block)
    return {large.hexdigest(), blob.hexdigest()}


class Push:
    """One commit of staged files on a branch or a pull request of a repository that is there."""

    def __init__(self, api: HfApi, staged: Staged, repo_id: str, place: Place):
        self.api, self.staged, self.repo_id, self.place = api, staged, repo_id, place
        self.wanted = {name: hashes(staged.folder / name) for name in staged.files}

    def read(self, revision: str) -> tuple[str, dict[str, str]]:
        """Returns a revision's commit, and the hash of each file at the top of its tree."""
        commit = self.api.model_info(self.repo_id, revision=revision).sha
        entries = self.api.list_repo_tree(self.repo_id, revision=commit)
        files = [entry for entry in entries if isinstance(entry, RepoFile)]
        return commit, {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in files}

    def stale(self, tree: dict[str, str]) -> list[str]:
        """Returns the files of an earlier push which this one lacks; nobody else's."""
        if not self.staged.is_whole:
            return []
        return sorted(
            name
            for name in tree
            if name not in self.wanted and any(fnmatch(name, pattern) for pattern in MODEL_FILES)
        )

    def changes(self, tree: dict[str, str]) -> list[CommitOperationAdd | CommitOperationDelete]:
        """Returns what a commit on a tree has to do."""
        added = [name for name, hashes in self.wanted.items() if tree.get(name) not in hashes]
        return [
            *(CommitOperationAdd(name, self.staged.folder / name) for name in added),
            *(CommitOperationDelete(name) for name in self.stale(tree)),
        ]

    def find(self) -> Pushed | None:
        """Returns where the Hub holds these very files already: on the branch, or in a pull request."""
        revisions = [self.place.branch]
        if self.place.create_pr:
            refs = self.api.list_repo_refs(self.repo_id, include_pull_requests=True).pull_requests or []
            revisions += sorted((ref.ref for ref in refs), key=lambda ref: -int(ref.split("/")[-1]))
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
            commit_message=message,
            revision=self.place.branch,
            create_pr=self.place.create_pr,
            parent_commit=parent,
        )
        return Pushed(made.oid, made.pr_revision or self.place.branch, is_new=True)

    def run(self, message: str) -> Pushed:
        """
        Commits, unless the files are there already; asks again where the Hub failed and holds no such commit.

        Raises:
            ValueError: in one sentence, which says whether anything was pushed.
        """
        with told(f"cannot read {self.repo_id}", "nothing was pushed: try again"):
            if found := self.find():
                return found
            parent, tree = self.read(self.place.branch)
        for wait in (*WAITS, None):
            try:
                return self.commit(parent, tree, message)
            except ERRORS as error:
                status = getattr(getattr(error, "response", None), "status_code", None)
                if status in (409, 412):
                    raise ValueError(
                        f"somebody else has pushed to {self.repo_id} meanwhile, so nothing was pushed: see "
                        "what they did, then run again"
                    ) from error
                failure = f"the push to {self.repo_id} failed: {reason(error)}"
                try:
                    if found := self.find():  # only the answer was lost
                        return replace(found, is_new=True)
                except ERRORS:
                    raise ValueError(
                        f"{failure}; whether it was made is unknown, for the Hub does not answer: run again, "
                        "which is safe"
                    ) from error
                if wait is None or not (status is None or status in PASSING):
                    raise ValueError(f"{failure}; nothing was pushed: run again, which is safe") from error
                time.sleep(wait)
        raise AssertionError("the last wait is None")


def check_tag(push: Push, tag: str) -> bool:
    """Returns whether a tag is to be made; raises ValueError if it is taken by something else."""
    with told(f"cannot read {push.repo_id}", "nothing was pushed: try again"):
        tags = {ref.name: ref.target_commit for ref in push.api.list_repo_refs(push.repo_id).tags}
        found = push.find() if tag in tags else None
    if tag in tags and not (found and found.commit == tags[tag]):
        raise ValueError(f"{push.repo_id} has a tag {tag} already, at {tags[tag][:8]}: give another --tag")
    return tag not in tags


def prove(original: dict[str, torch.Tensor], model: Path | str, revision: str | None = None) -> str:
    """
    Compares a stranger's model with the original, and returns how it went.

    Args:
        original: what `probe` gave for the training's folder.
        model: staged folder, or id on the Hub with a commit as `revision`.

    Raises:
        ValueError: the stranger cannot load it, or gets other numbers.
    """
    theirs = probe(model, revision, is_stranger=True, has_tokenizer="tokens" in original)
    difference = check_same(original, theirs)
    where = "from the Hub" if revision else "from its files"
    return f"loads {where} without this package; largest difference of logits {difference:.3g}"


def human(size: int) -> str:
    """Returns a number of bytes as people say it."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def list_files(staged: Staged) -> str:
    """Returns what goes to the Hub and what stays, line by line."""
    lines = [f"{human(size):>8}  {name}" for name, size in staged.files.items()]
    lines.append(f"{human(sum(staged.files.values())):>8}  in {len(staged.files)} file(s)")
    if staged.left_out:
        lines.append(f"left out: {', '.join(staged.left_out)}")
    return "\n".join(lines)


def snippet(repo_id: str, pushed: Pushed, auto_class: str) -> str:
    """Returns Python that loads the pushed commit, and no later one."""
    where = f'"{repo_id}", revision="{pushed.commit}", trust_remote_code=True'
    return (
        f"from transformers import {auto_class}, AutoTokenizer\n\n"
        f"model = {auto_class}.from_pretrained({where})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({where})"
    )


@contextmanager
def staged(
    folder: Path, place: Place, template: Path, license_file: Path, *, card_only: bool = False, **card_options
) -> Iterator[Staged]:
    """
    Yields a clean folder with what of a training's folder goes to the Hub.

    Args:
        template: the card's, as model_card.md.
        license_file: of Apache 2.0, which goes along where the card names it.
        card_only: stages the card and no other file.
        card_options: `license`, `language` and `datasets` of `published_card`.

    Raises:
        ValueError: something must not be published, or is missing.
    """
    repo_id = place.repo_id if "/" in place.repo_id else f"your-name/{place.repo_id}"
    card_options |= {"repo_id": repo_id, "revision": place.tag}
    card = published_card(folder, template.read_text(encoding="utf-8"), **card_options)
    is_apache = front_matter(card).get("license") == "apache-2.0"
    with tempfile.TemporaryDirectory() as target:
        whole = stage(folder, target, card, license_file if is_apache else None)
        size = whole.files["README.md"]
        yield Staged(whole.folder, {"README.md": size}, [], is_whole=False) if card_only else whole


def publish(folder: Path, staged: Staged, place: Place, say: Callable[[str], None] = print) -> Pushed:
    """
    Checks, pushes, and checks what came back.

    Args:
        folder: the original, whose logits are the measure.
        say: is given a line for each step.

    Raises:
        ValueError: in one sentence, which says whether anything was pushed and what to do.
    """
    api = HfApi()
    repo_id, is_there = check_access(api, place)
    if staged.is_whole:
        try:
            original = probe(folder, is_stranger=False, has_tokenizer="tokenizer_config.json" in staged.files)
            say(prove(original, staged.folder))
        except ValueError as error:
            raise ValueError(f"{folder} does not load by itself, so it was not pushed: {error}") from error
    elif not is_there:
        raise ValueError(f"{repo_id} is not there yet: push the model without --card-only")
    with told(f"cannot write to {repo_id}", "nothing was pushed: check what the token may do"):
        if not is_there:
            api.create_repo(repo_id, private=place.private)
        if place.branch != "main":
            api.create_branch(repo_id, branch=place.branch, exist_ok=True)
    push = Push(api, staged, repo_id, place)
    makes_tag = bool(place.tag) and check_tag(push, place.tag)
    pushed = push.run(f"Push {'the model' if staged.is_whole else 'the card'} with hf_transformer_block")
    if makes_tag:
        with told(f"{pushed.commit} is pushed, but not tagged {place.tag}", "run again"):
            api.create_tag(repo_id, tag=place.tag, revision=pushed.commit, exist_ok=True)
    if not pushed.is_new:
        say(f"nothing to do: {pushed.revision} of {repo_id} holds these very files")
    elif staged.is_whole:
        try:
            say(prove(original, repo_id, pushed.commit))
        except ValueError as error:
            raise ValueError(
                f"{repo_id} has commit {pushed.commit}, but it does not load from there: {error}"
            ) from error
    say(f"{api.endpoint}/{repo_id}: commit {pushed.commit} on {pushed.revision}")
    say(f"\n{snippet(repo_id, pushed, find_auto_class(read_config(folder)))}")
    return pushed
