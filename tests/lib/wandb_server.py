"""As much of a W&B server as its client needs to send a run, and ways for it to fail.

It keeps the steps that arrive, so that tests see what a project would show.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Mood = Literal["well", "hangs", "refuses", "broken"]
KEY = "0123456789012345678901234567890123456789"


class WandbServer:
    """A server on 127.0.0.1; `mood` says how it answers from now on."""

    def __init__(self, mood: Mood = "well") -> None:
        self.mood: Mood = mood
        self.steps: list[int] = []
        """Of the rows that came, in the order they came."""
        self.asked: list[str] = []
        """The beginnings of queries, and paths."""
        self._ended = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                outer._wait_in_its_mood()
                if outer.mood in ("refuses", "broken"):
                    self._reply({"error": "no"}, 403 if outer.mood == "refuses" else 500)
                else:
                    self._reply(outer._answer(self.path, data))

            do_GET = do_PUT = do_POST  # noqa: N815

            def _reply(self, document: Any, code: int = 200) -> None:
                data = json.dumps(document).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that went away, as it does when it is killed."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def environment(self) -> dict[str, str]:
        """Variables by which W&B's client finds it."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY}

    def stop(self) -> None:
        """No connection is taken any more."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def _wait_in_its_mood(self) -> None:
        while self.mood == "hangs" and not self._ended.is_set():
            time.sleep(0.05)

    def _answer(self, path: str, data: bytes) -> Any:
        if path.endswith("/file_stream"):
            files = json.loads(data).get("files") or {}
            rows = (files.get("wandb-history.jsonl") or {}).get("content") or []
            self.steps += [int(json.loads(row)["_step"]) for row in rows]
        if path != "/graphql":
            self.asked.append(path)
            return {}
        body = json.loads(data)
        query, variables = " ".join(body["query"].split()), body.get("variables") or {}
        self.asked.append(query[:60])
        return {"data": self._data(query, variables)}

    def _data(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        entity = {"id": "e", "name": "me"}
        if "viewer" in query:
            return {"viewer": {"id": "u", "username": "me", "entity": "me", "teams": {"edges": []}}}
        if query.startswith("query RunResumeStatus"):
            if not self.steps:
                return {"model": None}
            tail = json.dumps([json.dumps({"_step": max(self.steps), "_runtime": 1})])
            bucket = {
                "id": "b",
                "name": variables["name"],
                "displayName": "a run",
                "summaryMetrics": json.dumps({"_step": max(self.steps)}),
                "logLineCount": 0,
                "historyLineCount": len(self.steps),
                "eventsLineCount": 0,
                "historyTail": tail,
                "eventsTail": "[]",
                "config": "{}",
                "tags": [],
                "wandbConfig": json.dumps({"t": 1}),
            }
            return {"model": {"id": "p", "name": "etude", "entity": entity, "bucket": bucket}}
        if "upsertBucket" in query:
            project = {"id": "p", "name": "etude", "entity": entity}
            bucket = {"id": "b", "name": variables["name"], "displayName": "a run"}
            bucket |= {"historyLineCount": len(self.steps), "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": not self.steps}}
        if "createRunFiles" in query:
            files = [{"name": n, "uploadUrl": f"{self.url}/file/{n}"} for n in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if query.startswith("query ArtifactType"):
            return {"project": None}
        if "createArtifact(" in query:
            return {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED"}}}
        return {}
