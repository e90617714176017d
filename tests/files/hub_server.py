"""A small Hub on loopback: just the endpoints that huggingface_hub uses to list and download a dataset or a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse


@dataclass
class FakeHub:
    """Serves the files of a folder as one revision of one repository, and remembers what it was asked for."""

    repo: str
    revision: str
    folder: Path
    url: str = ""
    downloads: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    cut_next: set[str] = field(default_factory=set)
    """Files whose next download breaks off half-way."""
    lost: set[str] = field(default_factory=set)
    """Files that are listed but not delivered."""
    model: bool = False
    """A model rather than a dataset."""

    @property
    def commit(self) -> str:
        return hashlib.sha1(f"{self.repo}@{self.revision}".encode()).hexdigest()

    def files(self) -> dict[str, Path]:
        return {p.relative_to(self.folder).as_posix(): p for p in sorted(self.folder.rglob("*")) if p.is_file()}

    @contextmanager
    def serving(self) -> Iterator[FakeHub]:
        hub = self

        class Handler(_Handler):
            owner = hub

        with on_loopback(Handler) as self.url:
            yield self


@contextmanager
def on_loopback(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server, while it holds; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    owner: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        hub, path = self.owner, unquote(urlparse(self.path).path)
        api = f"/api/{'models' if hub.model else 'datasets'}/{hub.repo}/"
        resolve = f"/{hub.repo}/resolve/" if hub.model else f"/datasets/{hub.repo}/resolve/"
        if path.startswith(resolve):
            revision, _, name = path.removeprefix(resolve).partition("/")
            return self._file(name, body) if self._known(revision) else self._missing("RevisionNotFound")
        if path == f"{api}refs":
            branch = {"name": hub.revision, "ref": f"refs/heads/{hub.revision}", "targetCommit": hub.commit}
            return self._json({"branches": [branch], "tags": [], "converts": []})
        if path.startswith((f"{api}revision/", f"{api}tree/")):
            kind, revision, *_ = path.removeprefix(api).split("/")
            if not self._known(revision):
                return self._missing("RevisionNotFound")
            if kind == "tree":
                return self._json(
                    [
                        {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40}
                        for name, file in hub.files().items()
                    ]
                )
            siblings = [{"rfilename": name} for name in hub.files()]
            return self._json({"id": hub.repo, "sha": hub.commit, "siblings": siblings, "tags": [], "private": False})
        return self._missing("RepoNotFound")

    def _known(self, revision: str) -> bool:
        return revision in (self.owner.revision, self.owner.commit)

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, name: str, body: bool) -> None:
        hub = self.owner
        if name not in hub.files() or name in hub.lost:
            return self._missing("EntryNotFound")
        data = hub.files()[name].read_bytes()
        start = 0
        asked = self.headers.get("Range")
        if body and asked:
            hub.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", hub.commit)
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if not body:
            return None
        hub.downloads.append(name)
        if name in hub.cut_next:
            hub.cut_next.discard(name)
            self.wfile.write(data[start : start + len(data) // 2])
            self.close_connection = True
            return None
        self.wfile.write(data[start:])
        return None
