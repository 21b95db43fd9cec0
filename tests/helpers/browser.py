"""Chromium without a window, driven over a pipe: shows a page as a reader sees it."""

import base64
import json
import os
import shutil
import subprocess
from contextlib import contextmanager

from processes import ended

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)


def chromium():
    """Return the path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One tab. The events of its page are kept: `events("Network.loadingFailed")`."""

    def __init__(self, commands, answers):
        self._commands, self._answers = commands, answers
        self._number, self._session, self._events = 0, {}, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        joined = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": joined["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Send a command of the DevTools protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._next()).get("id") != self._number:
            self._events.append(answer)
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def _next(self):
        text = b"".join(iter(lambda: self._answers.read(1), b"\0"))
        assert text, "the browser has ended"
        return json.loads(text)

    def events(self, *methods):
        """Return what came of these kinds since the page was opened."""
        return [event["params"] for event in self._events if event["method"] in methods]

    def open(self, address):
        """Load a page, to the end; forget the events of the page before."""
        self._events = []
        self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next())

    def show(self, width, height, scheme):
        """Set the size of the window, and whether the reader likes it light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def ask(self, expression):
        """Return the value of an expression of JavaScript; one that is a promise is awaited."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def photograph(self, file, height):
        """Write what can be seen, from the top down to `height`, to a PNG file."""
        width = self.ask("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def tab(profile):
    """Start a browser with an empty profile; end it with the block."""
    (reads, commands), (answers, writes) = os.pipe(), os.pipe()
    # It reads its commands from 3 and answers on 4.
    shell = ["bash", "-c", f'exec "$0" "$@" 3<&{reads} 4>&{writes}']
    job = subprocess.Popen(
        [*shell, chromium(), *FLAGS, f"--user-data-dir={profile}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        pass_fds=(reads, writes),
    )  # fmt: skip
    os.close(reads)
    os.close(writes)
    with ended(job), os.fdopen(commands, "wb") as send, os.fdopen(answers, "rb") as receive:
        yield Tab(send, receive)
