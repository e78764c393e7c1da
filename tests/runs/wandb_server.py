"""The part of wandb's server that its client needs to send a run. It keeps the steps of the received history."""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Listens on this machine from construction until :meth:`stop`. `steps` are the received ones."""

    def __init__(self, port: int = 0) -> None:
        self.steps: set[int] = set()
        handler = type("Handler", (_Handler,), {"server_of_tests": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("file_stream"):
            for line in json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", []):
                self.steps.add(json.loads(line)["_step"])
        if not path.endswith("graphql"):
            return {}
        request = json.loads(body)
        if "upsertBucket" in request["query"]:
            project = {"id": "p", "name": "linrnn", "entity": {"id": "e", "name": "someone"}}
            run = {"id": "r", "name": request["variables"]["name"], "displayName": "run", "config": "{}"}
            bucket = {**run, "description": "", "sweepName": None, "historyLineCount": 0, "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "createRunFiles" in request["query"]:
            files = [{"name": name, "uploadUrl": f"{self.url}/files"} for name in request["variables"]["files"]]
            return {"data": {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}}
        return {"data": {}}


class _Handler(BaseHTTPRequestHandler):
    server_of_tests: WandbServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        answer = json.dumps(self.server_of_tests.answer(self.path, body)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """Print nothing."""
