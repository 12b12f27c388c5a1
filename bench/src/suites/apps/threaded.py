"""A web server of Python's library: a thread and a connection for each request."""

import http.server
import sys


class Server(http.server.ThreadingHTTPServer):
    # The library's own is five: fewer than the clients that connect at the same time.
    request_queue_size = 128


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"p" * 612
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


Server((sys.argv[1], int(sys.argv[2])), Page).serve_forever()
