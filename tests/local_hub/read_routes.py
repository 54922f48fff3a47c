"""The Hub's origin: everything that reads repositories."""

from typing import Any
from urllib.parse import parse_qs, quote, urlencode

from . import describe
from .access import check_gate, signed_in, visible
from .errors import not_found
from .lfs import read_pointer
from .repos import Repo
from .server import Answer, Request, Route, json_answer


PAGE = 1000  # entries of a tree
REPO = r"(?P<repo_id>(?:spaces/)?[^/]+/[^/]+)"  # as clients write those of Spaces in addresses of files
REVISION = r"(?P<revision>refs/pr/[^/]+|[^/]+)"
MODEL = rf"/api/(?:models/|(?=spaces/)){REPO}"  # or a Space


def seen(request: Request, repo_id: str) -> Repo:
    """Returns a repository whose description this user may read."""
    return visible(request.hub.repos.get(repo_id), repo_id, request.user)


def loaded(request: Request, repo_id: str) -> Repo:
    """Returns a repository whose files this user may read."""
    repo = seen(request, repo_id)
    check_gate(repo, request.user)
    return repo


def whoami(request: Request) -> Answer:
    user = signed_in(request.user)
    token = {"displayName": "token", "role": user.role}
    auth = {"type": "access_token", "accessToken": token}
    return json_answer({"type": "user", "id": user.name, "name": user.name, "orgs": [], "auth": auth})


def check_access(request: Request, repo_id: str) -> Answer:
    loaded(request, repo_id)
    return json_answer({})


def info(request: Request, repo_id: str, revision: str) -> Answer:
    repo = seen(request, repo_id)
    return json_answer(describe.model_info(repo, revision or "main", "blobs" in request.query))


def tree(request: Request, repo_id: str, revision: str, folder: str) -> Answer:
    repo, query = loaded(request, repo_id), request.query
    commit = repo.git.resolve(revision)
    entries, inside = repo.git.entries(commit), f"{folder}/" if folder else ""
    if folder and folder not in entries:
        raise not_found(folder, commit)
    paths = sorted(path for path in entries if path.startswith(inside))
    if query.get("recursive", "false").lower() not in ("true", "1"):
        paths = [path for path in paths if "/" not in path.removeprefix(inside)]
    start = int(query.get("cursor", 0))
    end = start + int(query.get("limit", PAGE))
    headers = {}
    if end < len(paths):
        url = f"{request.hub.url}{request.path_only}?{urlencode({**query, 'cursor': end})}"
        headers["Link"] = f'<{url}>; rel="next"'
    xet = request.hub.xet_storage
    found = [describe.entry(repo, path, *entries[path], xet) for path in paths[start:end]]
    return json_answer(found, headers=headers)


def paths_info(request: Request, repo_id: str, revision: str) -> Answer:
    paths = parse_qs(request.body().decode())["paths"]
    repo = seen(request, repo_id)
    entries = repo.git.entries(repo.git.resolve(revision))
    xet = request.hub.xet_storage
    return json_answer([describe.entry(repo, path, *entries[path], xet) for path in paths if path in entries])


def refs(request: Request, repo_id: str) -> Answer:
    return json_answer(describe.refs(seen(request, repo_id), "include_prs" in request.query))


def commits(request: Request, repo_id: str, revision: str) -> Answer:
    git = seen(request, repo_id).git
    return json_answer([describe.history_entry(commit) for commit in git.history(git.resolve(revision))])


def pull_requests(request: Request, repo_id: str) -> Answer:
    repo = seen(request, repo_id)
    wanted = {name: request.query[name] for name in ("author", "status") if name in request.query}
    found = [describe.pull_request(repo, number) for number in range(1, len(repo.metadata.pull_requests) + 1)]
    found = [
        one
        for one in found
        if one["author"]["name"] == wanted.get("author", one["author"]["name"])
        and one["status"] == wanted.get("status", one["status"])
    ]
    return json_answer({"discussions": found, "count": len(found), "start": 0})


def pull_request(request: Request, repo_id: str, number: str) -> Answer:
    return json_answer(describe.pull_request(seen(request, repo_id), int(number)))


def redirect(request: Request, repo: Repo, commit: str, oid: str, size: int) -> Answer:
    """Sends a client to the storage, and tells one that speaks Xet how to get there."""
    hub = request.hub
    headers = {
        "Location": hub.signer.sign("GET", f"/lfs/{oid}"),
        "X-Repo-Commit": commit,
        "X-Linked-Etag": f'"{oid}"',
        "X-Linked-Size": str(size),
    }
    if hub.xet_storage and (name := hub.xet_storage.verified_hash(oid)):
        token_url = f"{hub.url}{repo.api_path}/xet-read-token/{commit}"
        headers |= {"X-Xet-Hash": name, "Link": f'<{token_url}>; rel="xet-auth"'}
    return Answer(status=302, headers=headers)


def resolve(request: Request, repo_id: str, revision: str, path: str) -> Answer:
    repo = loaded(request, repo_id)
    commit = repo.git.resolve(revision)
    if (oid := repo.git.files(commit).get(path)) is None:
        raise not_found(path, commit)
    blob = repo.git.blob(oid)
    if pointer := read_pointer(blob):
        return redirect(request, repo, commit, *pointer)
    name = quote(path.split("/")[-1])
    headers: dict[str, Any] = {
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Disposition": f"inline; filename*=UTF-8''{name}",
        "ETag": f'"{oid}"',
        "X-Repo-Commit": commit,
    }
    return Answer(blob, headers=headers)


ROUTES: tuple[Route, ...] = (
    ("GET", r"/api/whoami-v2", whoami),
    ("GET", rf"{MODEL}/auth-check", check_access),
    ("GET", rf"{MODEL}(?:/revision/{REVISION})?", info),
    ("GET", rf"{MODEL}/tree/{REVISION}(?:/(?P<folder>.+))?", tree),
    ("POST", rf"{MODEL}/paths-info/{REVISION}", paths_info),
    ("GET", rf"{MODEL}/refs", refs),
    ("GET", rf"{MODEL}/commits/{REVISION}", commits),
    ("GET", rf"{MODEL}/discussions", pull_requests),
    ("GET", rf"{MODEL}/discussions/(?P<number>\d+)", pull_request),
    ("GET HEAD", rf"/{REPO}/resolve/{REVISION}/(?P<path>.+)", resolve),
)
