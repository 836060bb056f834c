"""Golden scripts of the dashboard: what its pages show a reader, and what its forms change."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest

from tests.console.pages import COMPLETE, Answer, Shop, bill, open_shop, report
from tests.golden import check_script, scripts_in

pytestmark = [pytest.mark.feature("14.2"), pytest.mark.feature("14.4")]

_LINE_ENDS = re.compile(r"</(?:tr|h\d|p|div|li|form|section|details|dl|pre)>")
_CELL_ENDS = re.compile(r"</(?:t[hd]|dt|dd|label|button|a|span|option)>")
_MASKS = (
    (re.compile(r"\b[0-9A-F]{32,}\b"), "ID"),
    (re.compile(r"\b(?=\w*\d)[0-9a-f]{10}\b"), "CHANGE"),
    (re.compile(r"\w+@\d{6}"), "CLIENT"),
    (re.compile(r'File "[^"]*", line \d+'), "FILE"),
    (re.compile(r"\d+ B at physical offset \d+"), "SIZE"),
)


class Reader:
    """The commands of a script: a user of the dashboard of an application, on a virtual clock."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._answer = shop.get("/")

    # --- the application -----------------------------------------------------------------------

    def send(self, topic: str, body: str, key: str = "", tag: str = "", count: str = "1", **properties: str) -> None:
        for _ in range(int(count)):
            self._sent = self._shop.send(topic, body.encode(), key, tag, **properties)

    def due(self, hours: str, key: str, topic: str = "reminders", tag: str = "", body: str = "x") -> None:
        self._sent = self._shop.send_due(float(hours), key, topic, tag, body.encode())

    def sign_in(self) -> None:
        """Sign in again: a session ends after some hours."""
        self._shop.sign_in()

    def advance(self, span: str) -> None:
        self._shop.harness.advance(span)

    def pause(self) -> None:
        self._shop.app.containers[0].pause()

    def resume(self) -> None:
        self._shop.app.containers[0].resume()

    def handled(self) -> list[str]:
        """Return the bodies and properties ``note`` of the messages that the listener has handled."""
        found = self._shop.harness.assert_received("bill")
        return [f"{each.body!r} {each.properties.get('note', '')}".strip() for each in found]

    def audit(self, *fields: str) -> list[str]:
        """Return fields of the lines of the audit log, and empty it."""
        lines = [json.loads(line) for line in self._shop.audit_path.read_text("utf-8").splitlines()]
        self._shop.audit_path.write_text("")
        return [
            " ".join(f"{name}={line[name]}" for name in ("action", "state", *fields) if name in line) for line in lines
        ]

    # --- pages ---------------------------------------------------------------------------------

    def page(self, path: str, /, **query: str) -> list[str]:
        """Show a page. The value ``@sent`` is the id of the last message, and ``@now-1h`` the time an hour ago."""
        answer = self._shop.get(path, **{name: self._value(value) for name, value in query.items()})
        return self._shown(self._shop.get(answer.headers["Location"]) if answer.status == 303 else answer)

    def open(self, path: str) -> None:
        """Load a page without showing it."""
        self._answer = self._shop.page(path)

    def follow(self, text: str) -> list[str]:
        """Follow a link of the page that was shown."""
        return self._shown(self._shop.get(self._answer.link(text)))

    def fill(self, target: str, /, **fields: str) -> list[str]:
        """Send a form of the page that was shown, with other values; ``@button`` names the form."""
        form = self._answer.form(target, fields.pop("button", None))
        return self._shown(self._post(target, form | self._lists(fields)))

    def post(self, target: str, /, **fields: str) -> list[str]:
        """Send fields without a form, but with its token."""
        return self._shown(self._post(target, COMPLETE | {"form_token": self._shop.form_token()} | self._lists(fields)))

    def _post(self, action: str, fields: dict[str, object]) -> Answer:
        answer = self._shop.post(action, fields)
        return self._shop.get(answer.headers["Location"]) if answer.status == 303 else answer

    def _lists(self, fields: dict[str, str]) -> dict[str, object]:
        return {
            name: self._value(value).split(",") if name == "handle" else self._value(value)
            for name, value in fields.items()
        }

    def _value(self, value: str) -> str:
        now_ms = self._shop.broker.clock.now_ms()
        known = {"@now": now_ms, "@now-1h": now_ms - 3_600_000, "@now+2h": now_ms + 7_200_000}
        known |= {"@sent": self._sent.msg_id, "@handle": self._sent.handle} if hasattr(self, "_sent") else {}
        return str(known.get(value, value)).replace("\\n", "\r\n")

    def _shown(self, answer: Answer) -> list[str]:
        self._answer = answer
        page = answer.html.replace("<wbr>", "")
        main = re.search(r"<main[^>]*>(.*)</main>", page, re.DOTALL)
        html = re.sub(r"<(script|svg|select)\b.*?</\1>", "", main[1] if main else page, flags=re.DOTALL)
        marked = _CELL_ENDS.sub(" · ", _LINE_ENDS.sub("\x00", html.replace("\n", " ")))
        lines = [" ".join(unescape(re.sub(r"<[^>]+>", " ", line)).split()) for line in marked.split("\x00")]
        lines = [re.sub(r"( ·)+", " ·", line).strip("· ") for line in lines]
        for pattern, text in _MASKS:
            lines = [pattern.sub(text, line) for line in lines]
        return [*([str(answer.status)] if answer.status != 200 else []), *(line for line in lines if line)]


@pytest.mark.parametrize("script", scripts_in(Path(__file__).parent / "page_scripts"), ids=lambda path: path.stem)
def test_pages_show_what_the_script_says(tmp_path: Path, script: Path) -> None:
    components = (bill, report) if script.stem == "application" else (bill,)
    with open_shop(tmp_path, components=components) as shop:
        shop.sign_in()
        check_script(script, Reader(shop))
