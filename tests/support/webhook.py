"""A web server on this machine that takes messages, in one of several ways."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.http_server import HTTPServer


class Webhook:
    """A server for POSTs. ``answer``: a status; ``drip``: a byte now and then, for ever."""

    def __init__(self, answer: int | str = 200) -> None:
        self.answer = answer
        self.messages: list[dict[str, Any]] = []
        self._open = True
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if hook.answer == "drip":
                    self.send_response(200)
                    self.send_header("Content-Length", "1000000")
                    self.end_headers()
                    while hook._open:
                        self.wfile.write(b"x")
                        time.sleep(0.1)
                    return
                assert isinstance(hook.answer, int)
                hook.messages.append(json.loads(body))
                self.send_response(hook.answer)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/services/S3CRET"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def kinds(self) -> list[str]:
        return [message["event"]["kind"] for message in self.messages]

    def close(self) -> None:
        """Refuse connections from now on."""
        self._open = False
        self._server.shutdown()
        self._server.server_close()
