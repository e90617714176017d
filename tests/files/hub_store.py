"""A small Hub on loopback that can be written to: just what huggingface_hub uses to push and pull a dataset.

Commits, branches, tokens, large files by their SHA-256; no Xet. It checks what the real one checks of these: tokens,
who may see and write what, the digest of a large file, the parent of a commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlparse

from tests.files.hub_server import on_loopback

LARGE = (".parquet", ".safetensors", ".png")
GIT = {".gitattributes": b"*.parquet filter=lfs\n"}


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repository:
    """Branches and commits; the files of a commit by name."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        state = "".join(f"{name} {git_sha1(data)}\n" for name, data in sorted(files.items()))
        oid = hashlib.sha1(f"{self.branches.get(branch)}\n{state}".encode()).hexdigest()
        self.branches[branch], self.commits[oid] = oid, dict(files)
        return oid

    def at(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


@dataclass
class HubStore:
    """Repositories and who may write to them; remembers what was asked, and fails when it is told to."""

    users: dict[str, tuple[str, set[str]]]
    """Name of the user of a token, and the owners under which it may write."""
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Method and path of every request."""
    damaged: set[str] = field(default_factory=set)
    """Files that are delivered with another byte."""
    before: Callable[[str, str], bool] = lambda *_: True
    """Called before each request; False: the connection is cut."""

    @property
    def sent(self) -> list[str]:
        """SHA-256 of every large file that arrived, as often as it did."""
        return [line.rpartition("/")[2] for line in self.asked if line.startswith("PUT ")]

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        found = self.repositories[repo]
        return {name: data for name, data in found.commits[found.branches[revision]].items() if name not in GIT}

    def holds(self, repo: str, files: dict[str, bytes]) -> None:
        """Give it a repository with these files."""
        self.repositories[repo] = Repository(private=False)
        self.repositories[repo].commit("main", GIT | files)

    @contextmanager
    def serving(self) -> Iterator[HubStore]:
        class Handler(_Handler):
            hub = self

        with on_loopback(Handler) as self.url:
            yield self


class _Handler(BaseHTTPRequestHandler):
    hub: HubStore
    protocol_version = "HTTP/1.1"
    ways = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "valid"),
        ("GET", r"/api/datasets/(?P<repo>[^/]+/[^/]+)/revision/(?P<revision>.+)", "info"),
        ("GET", r"/api/datasets/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)/?(?P<folder>.*)", "tree"),
        ("GET", r"/api/datasets/(?P<repo>[^/]+/[^/]+)/refs", "refs"),
        ("POST", r"/api/datasets/(?P<repo>[^/]+/[^/]+)/branch/(?P<revision>.+)", "branch"),
        ("POST", r"/api/datasets/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>.+)", "preupload"),
        ("POST", r"/api/datasets/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>.+)", "commit"),
        ("POST", r"/datasets/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "put"),
        ("GET|HEAD", r"/datasets/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)", "file"),
    )
    writes = frozenset({"branch", "preupload", "commit", "batch"})

    def log_message(self, *_: object) -> None:
        pass

    def answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if not self.hub.before(self.command, path):
            self.close_connection = True
            return None
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.hub.users:
            return self.json(401, {"error": "no"}, **{"X-Error-Message": "Invalid credentials in Authorization header"})
        self.user, self.owners = self.hub.users.get(token, ("", set()))
        for method, pattern, name in self.ways:
            match = re.fullmatch(pattern, path)
            if self.command in method.split("|") and match:
                return self.dispatch(name, match.groupdict())
        return self.json(404, {})

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def dispatch(self, name: str, given: dict[str, str]) -> None:
        if "repo" in given:
            found = self.hub.repositories.get(given["repo"])
            may = given["repo"].split("/")[0] in self.owners
            if found is None or (found.private and not may):
                return self.json(404 if self.user else 401, {}, **{"X-Error-Code": "RepoNotFound"})
            if name in self.writes and not may:
                return self.json(403, {"error": "you may not"})
            self.repository = found
        if "revision" in given and name != "branch":
            commit = self.repository.at(given["revision"])
            if commit is None:
                return self.json(404, {}, **{"X-Error-Code": "RevisionNotFound"})
            self.at, self.held = commit, self.repository.commits[commit]
        return getattr(self, name)(**given)

    def json(self, status: int, value: object, **headers: str) -> None:
        self.reply(status, json.dumps(value).encode(), {"Content-Type": "application/json"} | headers)

    def reply(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def whoami(self) -> None:
        if not self.user:
            return self.json(401, {})
        return self.json(200, {"type": "user", "name": self.user, "orgs": []})

    def create(self) -> None:
        asked = json.loads(self.body)
        repo = f"{asked['organization'] or self.user}/{asked['name']}"
        if asked["organization"] not in self.owners:
            return self.json(403, {"error": "you may not"})
        url = {"url": f"{self.hub.url}/datasets/{repo}"}
        if repo in self.hub.repositories:
            return self.json(409, url)
        self.hub.repositories[repo] = Repository(asked.get("visibility") == "private" or bool(asked.get("private")))
        self.hub.repositories[repo].commit("main", GIT)
        return self.json(200, url)

    def valid(self) -> None:
        self.json(200, {"errors": [], "warnings": []})

    def info(self, repo: str, **_: str) -> None:
        siblings = [{"rfilename": name} for name in self.held]
        private = self.repository.private
        self.json(200, {"id": repo, "sha": self.at, "siblings": siblings, "tags": [], "private": private})

    def tree(self, folder: str, **_: str) -> None:
        below = {name: data for name, data in self.held.items() if name.startswith(f"{folder}/" if folder else "")}
        if "recursive=true" in self.path.lower():
            return self.json(200, [self.entry(name, data) for name, data in below.items()])
        depth = folder.count("/") + 1 if folder else 0
        folders = {"/".join(name.split("/")[: depth + 1]) for name in below if name.count("/") > depth}
        files = [self.entry(name, data) for name, data in below.items() if name.count("/") == depth]
        return self.json(200, [{"type": "directory", "path": name, "oid": "0" * 40} for name in folders] + files)

    def entry(self, name: str, data: bytes) -> dict[str, object]:
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        large = {"lfs": lfs} if name.endswith(LARGE) else {}
        return {"type": "file", "path": name, "size": len(data), "oid": git_sha1(data)} | large

    def refs(self, **_: str) -> None:
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            for name, commit in self.repository.branches.items()
        ]
        self.json(200, {"branches": branches, "tags": [], "converts": []})

    def branch(self, revision: str, **_: str) -> None:
        if revision in self.repository.branches:
            return self.json(409, {})
        self.repository.branches[revision] = self.repository.branches["main"]
        return self.json(200, {})

    def preupload(self, **_: str) -> None:
        answers = []
        for file in json.loads(self.body)["files"]:
            name, held = file["path"], self.held.get(file["path"])
            large = name.endswith(LARGE)
            oid = None if held is None else hashlib.sha256(held).hexdigest() if large else git_sha1(held)
            mode = "lfs" if large else "regular"
            answers.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.json(200, {"files": answers})

    def batch(self, **_: str) -> None:
        objects = []
        for asked in json.loads(self.body)["objects"]:
            known = asked["oid"] in self.hub.objects
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"}}
            objects.append(asked | ({} if known else {"actions": upload}))
        self.json(200, {"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.json(400, {"error": "another digest"})
        self.hub.objects[oid] = self.body
        return self.json(200, {})

    def commit(self, repo: str, revision: str) -> None:
        files, lines = dict(self.held), [json.loads(line) for line in self.body.splitlines()]
        for value in (line["value"] for line in lines if line["key"] == "header"):
            if value.get("parentCommit") not in (None, self.at):
                return self.json(412, {"error": "the branch has moved"})
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "deletedFile":
                del files[value["path"]]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if key == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return self.json(400, {"error": "that file has not arrived"})
                files[value["path"]] = self.hub.objects[value["oid"]]
        oid = self.repository.commit(revision, files)
        return self.json(200, {"commitUrl": f"{self.hub.url}/datasets/{repo}/commit/{oid}", "commitOid": oid})

    def file(self, name: str, **_: str) -> None:
        if name not in self.held:
            return self.json(404, {}, **{"X-Error-Code": "EntryNotFound"})
        data = self.held[name]
        etag = hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else git_sha1(data)
        if name in self.hub.damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.at, "Accept-Ranges": "bytes"}
        headers |= {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if first else {}
        return self.reply(206 if first else 200, data[first:], headers)
