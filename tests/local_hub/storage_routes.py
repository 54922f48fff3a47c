"""The storage's origin: large files by signed URLs, and v1 of Xet's API, to which clients fall back."""

import re

from .errors import HubError
from .server import Answer, Request, Route, json_answer
from .xet import XetStorage


SHA256 = r"[0-9a-f]{64}"


def check_signature(request: Request) -> None:
    """Refuses tokens of the Hub, which clients must keep to its own origin."""
    if request.record.token:
        raise HubError(400, "Only one auth mechanism allowed: a token of the Hub was sent to the storage")
    method = "GET" if request.command == "HEAD" else request.command
    request.hub.signer.check(method, request.path_only, request.query)


def xet_of(request: Request) -> XetStorage:
    """Returns the Xet storage, which has tokens of its own."""
    xet = request.hub.require_xet()
    if not xet.knows(request.record.token):
        raise HubError(401, "Not a Xet token")
    return xet


def put_large_file(request: Request, oid: str) -> Answer:
    check_signature(request)
    request.hub.large_files.add(oid, request.chunks())
    return Answer(headers={"ETag": f'"{oid}"'})


def put_part(request: Request, oid: str, number: str) -> Answer:
    check_signature(request)
    etag = request.hub.large_files.add_part(oid, int(number), request.chunks())
    return Answer(headers={"ETag": f'"{etag}"'})


def get_file(request: Request, kind: str, name: str) -> Answer:
    """Sends a large file or a xorb, or the part that a Range header names."""
    check_signature(request)
    hub = request.hub
    path = hub.large_files.path(name) if kind == "lfs" else hub.require_xet().xorb(name)
    if not path.exists():
        raise HubError(404, f"No such object: {name}")
    size = path.stat().st_size
    headers = {"ETag": f'"{name}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    if match is None:
        return Answer(path, headers=headers)
    start, end = int(match[1]), min(int(match[2] or size) + 1, size)
    if start >= end:
        raise HubError(416, "Range not satisfiable", headers={"Content-Range": f"bytes */{size}"})
    return Answer(path, 206, {**headers, "Content-Range": f"bytes {start}-{end - 1}/{size}"}, start, end)


def put_xorb(request: Request, name: str) -> Answer:
    return json_answer({"was_inserted": xet_of(request).add_xorb(name, request.chunks())})


def put_shard(request: Request) -> Answer:
    xet_of(request).add_shard(request.body())
    return json_answer({"result": 1})


def get_reconstruction(request: Request, name: str) -> Answer:
    byte_range = request.headers.get("Range", "bytes=0-")
    return json_answer(xet_of(request).reconstruction(name, byte_range))


ROUTES: tuple[Route, ...] = (
    ("PUT", rf"/lfs/(?P<oid>{SHA256})", put_large_file),
    ("PUT", rf"/parts/(?P<oid>{SHA256})/(?P<number>\d+)", put_part),
    ("GET HEAD", rf"/(?P<kind>lfs|xorb)/(?P<name>{SHA256})", get_file),
    ("POST", rf"/v1/xorbs/default/(?P<name>{SHA256})", put_xorb),
    ("POST", r"/v1/shards", put_shard),
    ("GET", rf"/v1/reconstructions/(?P<name>{SHA256})", get_reconstruction),
)
