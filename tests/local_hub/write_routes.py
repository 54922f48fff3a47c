"""The Hub's origin: everything that changes repositories."""

import base64
import fnmatch
import json
import re
import time
from typing import Any

from .access import User, check_writes, signed_in
from .cards import check_card
from .errors import HubError
from .lfs import is_large, read_pointer
from .read_routes import MODEL, REPO, REVISION, seen
from .repos import Repo
from .server import Answer, Request, Route, json_answer
from .xet import LIFETIME


def proposed_to(request: Request, repo_id: str) -> tuple[Repo, User]:
    """Returns a repository, and who may open pull requests in it: everyone with a token to write with."""
    repo, user = seen(request, repo_id), signed_in(request.user)
    check_writes(user.name, user)
    return repo, user


def written_to(request: Request, repo_id: str) -> tuple[Repo, User]:
    """Returns a repository, and its owner."""
    repo, user = proposed_to(request, repo_id)
    check_writes(repo.owner, user)
    return repo, user


def changed(request: Request, repo_id: str, revision: str) -> tuple[Repo, User]:
    """Returns a repository, and who may commit to a revision of it or, with create_pr, beside it."""
    repo, user = proposed_to(request, repo_id)
    number = re.fullmatch(r"refs/pr/(\d+)", revision)
    is_author = number and repo.pull_request(int(number[1])).author == user.name
    if "create_pr" not in request.query and not is_author:
        check_writes(repo.owner, user)
    return repo, user


def create_repo(request: Request) -> Answer:
    body, user = request.json(), signed_in(request.user)
    owner = body.get("organization") or user.name
    check_writes(owner, user)
    kind = body.get("type") or "model"
    if kind == "space" and not body.get("sdk"):
        raise HubError(400, "A Space needs an sdk")
    repo_id = f"{owner}/{body['name']}"
    key = f"spaces/{repo_id}" if kind == "space" else repo_id
    private = body.get("visibility") == "private"
    url = f"{request.hub.url}/{key}"
    if not request.hub.repos.create(key, private):
        raise HubError(409, f"You already created this {kind} repo", body={"url": url})
    return json_answer({"url": url, "name": repo_id, "private": private})


def delete_repo(request: Request) -> Answer:
    body, user = request.json(), signed_in(request.user)
    repo_id = f"{body.get('organization') or user.name}/{body['name']}"
    repo, _ = written_to(request, f"spaces/{repo_id}" if body.get("type") == "space" else repo_id)
    request.hub.repos.delete(repo)
    return json_answer({})


def change_settings(request: Request, repo_id: str) -> Answer:
    body = request.json()
    repo, _ = written_to(request, repo_id)
    with repo.lock:
        if "visibility" in body:
            repo.metadata.private = body["visibility"] == "private"
        if "gated" in body:
            repo.metadata.gated = body["gated"]
        repo.save()
    return json_answer({"private": repo.metadata.private, "gated": repo.metadata.gated})


def validate_yaml(request: Request) -> Answer:
    body = request.json()
    messages = check_card(body["content"], body.get("repoType", "model"))
    found = dict(zip(("errors", "warnings"), messages, strict=True))
    body = {kind: [{"message": message} for message in messages] for kind, messages in found.items()}
    return json_answer(body, 400 if found["errors"] else 200)


def is_ignored(path: str, patterns: list[str]) -> bool:
    """Applies the lines of a .gitignore, in the simple cases."""
    parts = path.split("/")
    prefixes = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatch.filter([*prefixes, parts[-1]], pattern.rstrip("/")) for pattern in patterns)


def preupload(request: Request, repo_id: str, revision: str) -> Answer:
    body = request.json()
    repo, _ = changed(request, repo_id, revision)
    existing = repo.git.files(repo.git.resolve(revision))
    lines = [line.strip() for line in body.get("gitIgnore", "").splitlines()]
    patterns = [line for line in lines if line and not line.startswith("#")]
    files = []
    for file in body["files"]:
        path, sample = file["path"], base64.b64decode(file["sample"])
        mode = "lfs" if is_large(path.split("/")[-1], file["size"], sample) else "regular"
        found: dict[str, Any] = {"path": path, "uploadMode": mode, "shouldIgnore": is_ignored(path, patterns)}
        if path in existing:
            pointer = read_pointer(repo.git.blob(existing[path]))
            found["oid"] = pointer[0] if pointer else existing[path]
        files.append(found)
    return json_answer({"files": files})


def upload_action(request: Request, oid: str, size: int, multipart: bool) -> dict[str, Any]:
    """Returns where to put a large file, whole or in parts; clients choose by the header's chunk_size."""
    hub = request.hub
    if not (multipart and hub.multipart_over is not None and size > hub.multipart_over):
        return {"href": hub.signer.sign("PUT", f"/lfs/{oid}"), "header": {}}
    count = -(-size // hub.part_size)
    parts = {str(number): hub.signer.sign("PUT", f"/parts/{oid}/{number}") for number in range(1, count + 1)}
    return {"href": f"{hub.url}/api/join-parts/{oid}", "header": {"chunk_size": str(hub.part_size), **parts}}


def lfs_batch(request: Request, repo_id: str) -> Answer:
    body, hub = request.json(), request.hub
    repo, user = proposed_to(request, repo_id)
    if "ref" in body:  # otherwise it is for a pull request
        check_writes(repo.owner, user)
    verify = {"href": f"{hub.url}{repo.api_path}/lfs-verify", "header": {}}
    objects = []
    for file in body["objects"]:
        found = {"oid": file["oid"], "size": file["size"]}
        if not hub.large_files.has(file["oid"]):  # without actions clients do not upload it
            upload = upload_action(request, **found, multipart="multipart" in body["transfers"])
            found["actions"] = {"upload": upload, "verify": verify}
        objects.append(found)
    return json_answer({"objects": objects}, headers={"Content-Type": "application/vnd.git-lfs+json"})


def join_parts(request: Request, oid: str) -> Answer:
    numbers = sorted(part["partNumber"] for part in request.json()["parts"])
    request.hub.large_files.join_parts(oid, numbers)
    return json_answer({})


def verify_large_file(request: Request, repo_id: str) -> Answer:
    body, files = request.json(), request.hub.large_files
    seen(request, repo_id)
    if not files.has(body["oid"]) or files.size(body["oid"]) != body["size"]:
        raise HubError(404, f"LFS object not found: {body['oid']}")
    return json_answer({})


def xet_token(request: Request, repo_id: str, right: str, revision: str) -> Answer:
    """Sends a token to the two halves of the client: one reads the body, the other the headers."""
    if right == "write":
        changed(request, repo_id, revision)
    else:
        seen(request, repo_id)
    url, token = request.hub.storage_url, request.hub.require_xet().new_token()
    expiry = int(time.time()) + LIFETIME
    headers = {"Cas-Url": url, "Access-Token": token, "Token-Expiration": str(expiry)}
    return json_answer(
        {"casUrl": url, "accessToken": token, "exp": expiry},
        headers={f"X-Xet-{name}": value for name, value in headers.items()},
    )


def commit(request: Request, repo_id: str, revision: str) -> Answer:
    lines = [json.loads(line) for line in request.body().splitlines()]
    repo, user = changed(request, repo_id, revision)
    hub = request.hub
    headers = [line["value"] for line in lines if line["key"] == "header"]
    changes = [line for line in lines if line["key"] != "header"]
    if len(headers) != 1 or not headers[0].get("summary"):
        raise HubError(400, "One header with a summary is required")
    for change in changes:
        if change["key"] == "lfsFile" and hub.xet_storage and not hub.large_files.has(change["value"]["oid"]):
            hub.xet_storage.rebuild(change["value"]["oid"])
    oid, number = repo.commit(revision, user.name, headers[0], changes, propose="create_pr" in request.query)
    body = {"commitOid": oid, "commitUrl": f"{hub.url}/{repo_id}/commit/{oid}"}
    if number is not None:
        body["pullRequestUrl"] = f"{hub.url}/{repo_id}/discussions/{number}"
    return json_answer(body)


def change_branch(request: Request, repo_id: str, branch: str) -> Answer:
    body = request.json()
    repo, _ = written_to(request, repo_id)
    if request.command == "POST":
        repo.create_ref(f"refs/heads/{branch}", body.get("startingPoint", "main"))
    elif branch == "main":
        raise HubError(403, "Cannot delete the branch main")
    else:
        repo.delete_ref(f"refs/heads/{branch}")
    return json_answer({})


def change_tag(request: Request, repo_id: str, revision: str) -> Answer:
    """Creates a tag of the revision, or deletes the tag of this name."""
    body = request.json()
    repo, _ = written_to(request, repo_id)
    if request.command == "POST":
        repo.create_ref(f"refs/tags/{body['tag']}", revision)
    else:
        repo.delete_ref(f"refs/tags/{revision}")
    return json_answer({})


def open_pull_request(request: Request, repo_id: str) -> Answer:
    body = request.json()
    repo, user = proposed_to(request, repo_id)
    if not body.get("pullRequest"):
        raise HubError(400, "This Hub has no discussions but pull requests")
    number = repo.propose(body["title"], body.get("description", ""), user.name, "refs/heads/main", "draft")
    return json_answer({"num": number})


def merge(request: Request, repo_id: str, number: str) -> Answer:
    request.body()
    repo, user = written_to(request, repo_id)
    repo.merge(int(number), user.name)
    return json_answer({})


ROUTES: tuple[Route, ...] = (
    ("POST", r"/api/repos/create", create_repo),
    ("DELETE", r"/api/repos/delete", delete_repo),
    ("PUT", rf"{MODEL}/settings", change_settings),
    ("POST", r"/api/validate-yaml", validate_yaml),
    ("POST", rf"{MODEL}/preupload/{REVISION}", preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", lfs_batch),
    ("POST", r"/api/join-parts/(?P<oid>[0-9a-f]{64})", join_parts),
    ("POST", rf"{MODEL}/lfs-verify", verify_large_file),
    ("GET", rf"{MODEL}/xet-(?P<right>read|write)-token/{REVISION}", xet_token),
    ("POST", rf"{MODEL}/commit/{REVISION}", commit),
    ("POST DELETE", rf"{MODEL}/branch/(?P<branch>.+)", change_branch),
    ("POST DELETE", rf"{MODEL}/tag/{REVISION}", change_tag),
    ("POST", rf"{MODEL}/discussions", open_pull_request),
    ("POST", rf"{MODEL}/discussions/(?P<number>\d+)/merge", merge),
)
