"""A web server for tests, in threads of this process."""

from __future__ import annotations

from http.server import ThreadingHTTPServer
from typing import Any


class HTTPServer(ThreadingHTTPServer):
    """Prints no traceback where a client has gone away, and closes when each answer has ended.

    A traceback that a thread prints parses source, and so does the test that runs beside it: Python 3.11
    then fails in the test ("AST constructor recursion depth mismatch", python/cpython#106905).
    """

    daemon_threads = False

    def handle_error(self, *_: Any) -> None: ...
