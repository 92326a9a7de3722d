"""A model hub on loopback: as much of the Hugging Face Hub's API as an upload uses.

The client is the real `huggingface_hub` library, pointed here by HF_ENDPOINT. Files travel inside
the commit, as the real hub asks for with small ones.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test"
USER = "anna"
_COMMIT = "0" * 40


@dataclass
class Repository:
    is_private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    """Files by path, for each branch and pull request."""
    messages: list[str] = field(default_factory=list)


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        state = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = urlsplit(self.path).path
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "no such token"})
            return
        for pattern, method in (
            (r"/api/whoami-v2", self._whoami),
            (r"/api/repos/create", self._create),
            (r"/api/validate-yaml", self._validate),
            (r"/api/models/([^/]+/[^/]+)/branch/([^/]+)", self._branch),
            (r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", self._preupload),
            (r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", self._commit),
            (r"/api/models/([^/]+/[^/]+)/discussions(?:/1)?", self._pull_request),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
        ):
            if found := re.fullmatch(pattern, path):
                method(body, *map(unquote, found.groups()))
                return
        self._send(404, {"error": f"this hub has no {self.command} {path}"})

    def _send(self, status: int, body: bytes | dict[str, Any], **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _whoami(self, body: bytes) -> None:
        self._send(200, {"type": "user", "name": USER, "orgs": []})

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization'] or USER}/{asked['name']}"
        is_new = name not in self.state.repositories
        if is_new:
            self.state.repositories[name] = Repository(asked.get("visibility") == "private")
        answer = {"url": f"{self.state.url}/{name}", "id": name, "name": name}
        self._send(200 if is_new else 409, answer)

    def _validate(self, body: bytes) -> None:
        has_header = json.loads(body)["content"].startswith("---\nbase_model: ")
        self._send(200 if has_header else 400, {"errors": [], "warnings": []})

    def _branch(self, body: bytes, repository: str, branch: str) -> None:
        branches = self.state.repositories[repository].branches
        is_new = branch not in branches
        branches.setdefault(branch, {})
        self._send(200 if is_new else 409, {})

    def _preupload(self, body: bytes, repository: str, revision: str) -> None:
        if self._files(repository, revision) is None:
            return
        files = [
            {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
            for each in json.loads(body)["files"]
        ]
        self._send(200, {"files": files})

    def _commit(self, body: bytes, repository: str, revision: str) -> None:
        files = self._files(repository, revision)
        if files is None:
            return
        answer = {"success": True, "commitOid": _COMMIT}
        for line in body.decode().splitlines():
            entry = json.loads(line)
            if entry["key"] == "header":
                self.state.repositories[repository].messages.append(entry["value"]["summary"])
            else:
                assert entry["key"] == "file", entry["key"]
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        answer["commitUrl"] = f"{self.state.url}/{repository}/commit/{_COMMIT}"
        self._send(200, answer)

    def _pull_request(self, body: bytes, repository: str) -> None:
        """There is one, number 1."""
        self.state.repositories[repository].branches.setdefault("refs/pr/1", {})
        facts = {
            "num": 1,
            "title": "",
            "createdAt": "2026-01-01T00:00:00.000Z",
            "status": "draft",
            "repo": {"name": repository, "type": "model"},
            "isPullRequest": True,
            "changes": {"base": "refs/heads/main"},
            "filesWithConflicts": [],
            "events": [],
        }
        self._send(200, facts)

    def _resolve(self, body: bytes, repository: str, revision: str, path: str) -> None:
        files = self._files(repository, revision)
        if files is None:
            return
        if path not in files:
            self._send(404, {"error": "no such file"}, X_Error_Code="EntryNotFound")
            return
        self._send(200, files[path], ETag=f'"{hash(files[path])}"', X_Repo_Commit=_COMMIT)

    def _files(self, repository: str, revision: str) -> dict[str, bytes] | None:
        """The files of a branch; None when it was answered that there is no such thing."""
        found = self.state.repositories.get(repository)
        if found is None:
            self._send(404, {"error": "no repository"}, X_Error_Code="RepoNotFound")
            return None
        if revision not in found.branches:
            self._send(404, {"error": "no branch"}, X_Error_Code="RevisionNotFound")
            return None
        return found.branches[revision]
