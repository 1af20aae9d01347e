"""Controls a headless Chromium over its debugging pipe, for the page tests."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
PROGRAM = next((path for name in _NAMES if (path := shutil.which(name))), None)

_KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowUp": 38, "ArrowDown": 40, "Escape": 27, "Enter": 13, "Tab": 9, "Home": 36}


class Chromium:
    """A browser with one page. `requests` lists the URLs that the page has requested. `errors` lists the errors of its
    scripts."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
                   "disable-dev-shm-usage", "remote-debugging-pipe", f"user-data-dir={profile}"]
        # Chromium reads commands from descriptor 3 and answers on 4.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 60) for fd in (theirs_in, theirs_out)]
        moved = 'exec "$0" "$@" 3<&{0} 4>&{1} {0}<&- {1}>&-'.format(*high)
        command = ["bash", "-c", moved, PROGRAM, *(f"--{o}" for o in options), "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=high, stderr=subprocess.DEVNULL)
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self._last, self._rest, self._session = 0, b"", ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            session, self._session = self._session, ""
            if session:
                self._call("Browser.close")
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._in)
            os.close(self._out)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 20)
            if not more:
                raise EOFError("Chromium has ended")
            self._rest += more
        text, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
            case "Log.entryAdded":
                self.errors.append(message["params"]["entry"]["text"])
        return message

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        command: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while (message := self._message()).get("id") != self._last:
            pass
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    def view(self, width: int = 1200, height: int = 800, *, dark: bool = False) -> None:
        """Sets the size of the window and the preferred colour scheme."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def open(self, path: Path) -> float:
        """Opens a file, and returns how many seconds passed until its scripts had run."""
        self.requests.clear()
        self.errors.clear()
        self._call("Page.navigate", url=path.resolve().as_uri())
        while not self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
            pass
        return float(self.run("performance.timing.domContentLoadedEventEnd - performance.timing.navigationStart")) / 1e3

    def run(self, expression: str) -> Any:
        """Returns the value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Presses a key."""
        code = {"key": key, "windowsVirtualKeyCode": _KEYS.get(key, ord(key[0].upper()))}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **code, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **code)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Sends a mouse event: mouseMoved, mousePressed, mouseReleased, mouseWheel."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def settle(self) -> None:
        """Waits until the page is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def picture(self, path: Path) -> bytes:
        """Writes a PNG picture of the window and returns it."""
        self.settle()
        data = base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(data)
        return data

    def names(self) -> list[tuple[str, str]]:
        """Returns the role and name of each node that a screen reader would find."""
        self._call("Accessibility.enable")
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n.get("ignored")]
