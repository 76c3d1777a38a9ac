"""A stand-in for the Hugging Face hub: the calls that `huggingface_hub` makes to fetch a model, over real
HTTP.

    with Hub({"org/name": {"main": {"config.json": b"…"}}}) as hub: …   # hub.endpoint goes into HF_ENDPOINT

A repository is a map from branch to files. Files are served with the headers of the real hub
(`X-Repo-Commit`, ETag, and, for large ones, the linked size and digest), in ranges when asked.
`hub.requests` tells what was fetched; `hub.cut` breaks the connection after so many bytes of a file, once.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

Files = Mapping[str, bytes]
LARGE_BYTES = 1 << 16


def commit_of(files: Files) -> str:
    """40 hex digits that name these files."""
    digest = hashlib.sha1(usedforsecurity=False)
    for name in sorted(files):
        digest.update(name.encode() + hashlib.sha256(files[name]).digest())
    return digest.hexdigest()


class Hub:
    """Serves `repositories` (id -> branch -> files) on a free port of the loopback until closed."""

    def __init__(
        self, repositories: Mapping[str, Mapping[str, Files]], gated: frozenset[str] = frozenset()
    ) -> None:
        self.repositories = repositories
        self.gated = gated
        self.requests: list[str] = []
        self.cut: dict[str, int] = {}
        hub = self

        class Answer(_Answer):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def find(self, repo: str, revision: str) -> Files | None:
        """The files of a branch or commit."""
        branches = self.repositories.get(repo, {})
        by_commit = {commit_of(files): files for files in branches.values()}
        return branches.get(revision) or by_commit.get(revision)


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass

    def _answer(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        if parts[:2] == ["api", "models"]:
            self._answer_api("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._answer_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._refuse(404, "EntryNotFound")

    def _answer_api(self, repo: str, rest: list[str]) -> None:
        kind, revision = rest[0] if rest else "revision", rest[1] if len(rest) > 1 else "main"
        files = self._files(repo, revision)
        if files is None:
            return
        if kind == "tree":
            self._json([_tree_entry(name, content) for name, content in files.items()])
        else:
            siblings = [{"rfilename": name} for name in files]
            self._json(
                {"id": repo, "modelId": repo, "sha": commit_of(files), "siblings": siblings, "tags": []}
            )

    def _answer_file(self, repo: str, revision: str, name: str) -> None:
        files = self._files(repo, revision)
        if files is None:
            return
        if name not in files:
            self._refuse(404, "EntryNotFound")
            return
        content = files[name]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if self.command == "GET":
            self.server_hub.requests.append(name)
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", commit_of(files))
        digest = hashlib.sha256(content).hexdigest()
        self.send_header("ETag", f'"{digest}"')
        if len(content) >= LARGE_BYTES:
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-Etag", f'"{digest}"')
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            cut = self.server_hub.cut.pop(name, None)
            self.wfile.write(content[start : cut if cut is not None else len(content)])
            self.close_connection = cut is not None

    def _files(self, repo: str, revision: str) -> Files | None:
        """The files asked for; None once a refusal has been sent."""
        if repo not in self.server_hub.repositories:
            self._refuse(404, "RepoNotFound")
        elif repo in self.server_hub.gated:
            self._refuse(403, "GatedRepo")
        elif (files := self.server_hub.find(repo, revision)) is None:
            self._refuse(404, "RevisionNotFound")
        else:
            return files
        return None

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _tree_entry(name: str, content: bytes) -> dict[str, object]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": blob}
    if len(content) >= LARGE_BYTES:
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
    return entry
