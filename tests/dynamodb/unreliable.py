"""A server before an emulator, for what no emulator answers: throttling, faults of the service, no date."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Unreliable:
    """Passes requests on, except for those of an operation that it was told to spoil; use it as a context manager."""

    def __init__(self, port):
        self.seen = []
        self._spoilt = {}
        outer, target = self, port

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                operation = self.headers["X-Amz-Target"].rpartition(".")[2]
                outer.seen.append(operation)
                spoilt = outer._spoilt.get(operation, [])
                said = spoilt.pop(0) if spoilt else None
                if isinstance(said, tuple):
                    self._reply(said[0], json.dumps({"__type": f"com.amazonaws.dynamodb#{said[1]}"}).encode())
                    return
                connection = http.client.HTTPConnection("127.0.0.1", target)
                connection.request("POST", "/", body, dict(self.headers.items()))
                reply = connection.getresponse()
                text = reply.read()
                connection.close()
                if said == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    self.close_connection = True
                    return
                self._reply(reply.status, text, None if said == "no date" else reply.headers["Date"])

            def _reply(self, status, body, date=None):
                self.send_response_only(status)
                if date is not None:
                    self.send_header("Date", date)
                self.send_header("Content-Type", "application/x-amz-json-1.0")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def spoil(self, operation, *replies):
        """What the next requests of this operation are answered: a status and a code, or the emulator's own reply
        without its date (`no date`), or a connection that breaks after the emulator did it (`reset`)."""
        self._spoilt[operation] = list(replies)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
