"""Repositories in the JSON in which clients read them."""

import hashlib
import json
import time
from typing import Any

from .cards import as_list, front_matter
from .git import FOLDER, Commit
from .lfs import read_pointer
from .repos import Repo
from .xet import XetStorage


def iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


def entry(repo: Repo, path: str, mode: str, oid: str, xet: XetStorage | None) -> dict[str, Any]:
    """Describes a file or a folder of a tree; a large file by what its pointer says."""
    if mode == FOLDER:
        return {"type": "directory", "oid": oid, "size": 0, "path": path}
    blob = repo.git.blob(oid)
    file = {"type": "file", "oid": oid, "size": len(blob), "path": path}
    if pointer := read_pointer(blob):
        sha256, size = pointer
        file |= {"size": size, "lfs": {"oid": sha256, "size": size, "pointerSize": len(blob)}}
        if xet and (name := xet.verified_hash(sha256)):
            file["xetHash"] = name
    return file


def sibling(file: dict[str, Any]) -> dict[str, Any]:
    """Describes a file as `model_info(files_metadata=True)` expects it."""
    found = {"rfilename": file["path"], "size": file["size"], "blobId": file["oid"]}
    if "lfs" in file:
        lfs = file["lfs"]
        found["lfs"] = {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
    return found


def tags(
    files: dict[str, str], card: dict[str, Any], config: dict[str, Any], library: str | None
) -> list[str]:
    """Returns the tags that the Hub derives from the names of files, the card and config.json."""
    found = [library] if library else []
    found += ["safetensors"] if any(path.endswith(".safetensors") for path in files) else []
    found += as_list(config.get("model_type")) + as_list(card.get("tags"))
    found += ["custom_code"] if "auto_map" in config else []
    found += as_list(card.get("language"))
    for key, prefix in (("datasets", "dataset"), ("base_model", "base_model"), ("license", "license")):
        found += [f"{prefix}:{value}" for value in as_list(card.get(key))]
    return list(dict.fromkeys(found))


def card_and_config(repo: Repo, files: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the metadata of README.md and config.json, {} where there are none that anyone can read."""
    texts = [repo.git.blob(files[path]) if path in files else b"" for path in ("README.md", "config.json")]
    try:
        card = front_matter(texts[0].decode("utf-8", "replace"))
    except ValueError:
        card = {}
    try:
        config = json.loads(texts[1])
    except ValueError:
        config = {}
    return card, config


def model_info(repo: Repo, revision: str, with_blobs: bool) -> dict[str, Any]:
    commit = repo.git.read_commit(repo.git.resolve(revision))
    files = repo.git.files(commit.oid)
    card, config = card_and_config(repo, files)
    library = card.get("library_name") or ("transformers" if "model_type" in config else None)
    siblings = [{"rfilename": path} for path in sorted(files)]
    if with_blobs:
        siblings = [sibling(entry(repo, path, "", files[path], None)) for path in sorted(files)]
    return {
        "_id": hashlib.sha1(repo.id.encode()).hexdigest()[:24],
        "id": repo.id,
        "modelId": repo.id,
        "author": repo.owner,
        "sha": commit.oid,
        "lastModified": iso(commit.date),
        "createdAt": iso(repo.metadata.created),
        "private": repo.metadata.private,
        "gated": repo.metadata.gated,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": tags(files, card, config, library),
        "library_name": library,
        "pipeline_tag": card.get("pipeline_tag"),
        "cardData": card,
        "siblings": siblings,
        "config": {key: config[key] for key in ("architectures", "auto_map", "model_type") if key in config},
        "model-index": card.get("model-index"),
    }


def refs(repo: Repo, with_pull_requests: bool) -> dict[str, Any]:
    kinds = {"branches": "heads", "tags": "tags", "converts": "convert"}
    kinds |= {"pullRequests": "pr"} if with_pull_requests else {}
    commits = {tuple(ref.split("/", 2)[1:]): commit for ref, commit in repo.git.refs().items()}
    return {
        key: [
            {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit}
            for (kind, name), commit in commits.items()
            if kind == wanted
        ]
        for key, wanted in kinds.items()
    }


def history_entry(commit: Commit) -> dict[str, Any]:
    title, _, message = commit.message.partition("\n")
    authors = [{"user": commit.author}]
    return {
        "id": commit.oid,
        "title": title,
        "message": message.strip(),
        "authors": authors,
        "date": iso(commit.date),
    }


def pull_request(repo: Repo, number: int) -> dict[str, Any]:
    request = repo.pull_request(number)
    created, author = iso(request.created), {"name": request.author, "type": "user"}
    _, conflicts = repo.merged_files(number)
    latest = {"raw": request.description, "html": "", "updatedAt": created, "author": author}
    comment = {"edited": False, "hidden": False, "latest": latest, "history": []}
    return {
        "num": number,
        "title": request.title,
        "status": request.status,
        "isPullRequest": True,
        "author": author,
        "createdAt": created,
        "repo": {"name": repo.id, "type": repo.kind},
        "events": [
            {
                "id": f"{number:024x}",
                "type": "comment",
                "createdAt": created,
                "author": author,
                "data": comment,
            }
        ],
        "changes": {"base": request.base, "mergeCommitId": request.merge_commit},
        "filesWithConflicts": [] if request.status == "merged" else conflicts,
        "diff": "",
    }
