"""A page for servers of WSGI (`wsgi`) and ASGI (`asgi`)."""

BODY = b"p" * 612
HEADERS = [("Content-Type", "text/plain"), ("Content-Length", str(len(BODY)))]


def wsgi(_environ, start_response):
    start_response("200 OK", HEADERS)
    return [BODY]


async def asgi(scope, receive, send):
    if scope["type"] != "http":
        return
    headers = [(name.encode(), value.encode()) for name, value in HEADERS]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})
