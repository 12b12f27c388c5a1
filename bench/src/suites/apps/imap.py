"""Clients of an IMAP server, each in a thread: connect, log in, read the header of a letter, log out, repeatedly."""

import imaplib
import json
import sys
import threading
import time

ADDRESS, PORT, CLIENTS, SECONDS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])


def session():
    server = imaplib.IMAP4(ADDRESS, PORT)
    server.login("someone", "secret")
    server.select("INBOX", readonly=True)
    status, letter = server.fetch("1", "(BODY[HEADER])")
    assert status == "OK" and b"Subject: well" in letter[0][1], letter
    server.logout()


def client(end, counts):
    count = 0
    while time.monotonic() < end:
        session()
        count += 1
    counts.append(count)


start = time.monotonic()
counts = []
threads = [threading.Thread(target=client, args=(start + SECONDS, counts)) for _ in range(CLIENTS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
# A client that failed has not counted.
assert len(counts) == CLIENTS, counts
print(json.dumps({"per_second": sum(counts) / (time.monotonic() - start)}))
