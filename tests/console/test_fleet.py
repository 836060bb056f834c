"""Several brokers and applications in one console: the overview of all, the chooser, one that does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.console import Access, Place, dashboard_audit, several_dashboards
from mqtemplate.console.client import ActuatorClient
from mqtemplate.console.sources import ClusterSource, OpenSource
from mqtemplate.errors import BrokerError, UnknownNameError
from mqtemplate.message import Message
from mqtemplate.operations import BrokerAccess
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Account, AclSettings, Right
from tests.console.pages import COMPLETE, TOKEN, Shop

SECRET = "s3cret-of-all"


class AbsentBroker(EmbeddedBroker):
    """A broker that cannot be reached at first.

    Attributes:
        attempts: Number of attempts to connect.
    """

    attempts = 0
    is_there = False

    def start(self) -> None:
        self.attempts += 1
        if not self.is_there:
            raise BrokerError("no name server answers at 10.9.9.9:9876")
        super().start()


class Several:
    """A console of two brokers that are there, one that is not, and an application that does not answer."""

    def __init__(self, stack: ExitStack, folder: Path, accounts: AccessControl | None = None) -> None:
        clock = VirtualClock()
        self.eu = stack.enter_context(EmbeddedBroker(clock=clock))
        self.us = stack.enter_context(EmbeddedBroker(clock=clock))
        self.absent = AbsentBroker(clock=clock)
        for broker, topic in ((self.eu, "orders"), (self.us, "invoices")):
            broker.sends.send(Message(topic, b"x"))
        self.eu.admin().set_offsets("billing", dict.fromkeys(self.eu.queues("orders"), 0))
        self.audit_path = folder / "changes.jsonl"
        self.fleet = several_dashboards(
            {
                "eu": Place(OpenSource(BrokerAccess(self.eu), "10.0.0.1:9876")),
                "us": Place(OpenSource(BrokerAccess(self.us), "10.1.0.1:9876")),
                "asia": Place(ClusterSource(self.absent, "10.9.9.9:9876"), ActuatorClient("http://127.0.0.1:9")),
            },
            access=Access(TOKEN, allow_changes=True, accounts=accounts, clock=clock),
            audit=dashboard_audit(self.audit_path, clock),
            clock=clock,
        )
        stack.callback(self.fleet.close)
        self.clock = clock
        self.shop = Shop(None, self.eu, self.fleet, self.audit_path)  # type: ignore[arg-type]


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Several]:
    with ExitStack() as stack:
        yield Several(stack, tmp_path)


def test_the_overview_has_each_with_its_problems_and_a_link(several: Several) -> None:
    several.clock.move_ms(120_000)
    several.shop.sign_in()

    page = several.shop.page("/")

    assert "billing is 2m behind" in page.text
    assert "it does not answer: no name server answers at 10.9.9.9:9876" in page.text
    assert "it does not answer: no actuator answers at http://127.0.0.1:9/actuator" in page.text
    assert "nothing is wrong now" in page.text
    assert page.link("us") == "/at/us/"
    assert "orders" in several.shop.page("/at/eu/topics").text
    assert "orders" not in several.shop.page("/at/us/topics").text


def test_one_that_does_not_answer_has_the_error_on_its_pages_and_is_tried_again(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1_000.0
    monkeypatch.setattr("mqtemplate.console.sources.time.monotonic", lambda: now_s)
    several.shop.sign_in()
    failed = [several.shop.get("/at/asia/topics") for _ in range(2)]
    attempts = several.absent.attempts
    several.absent.is_there = True
    now_s += 6

    assert [(each.status, "no name server answers" in each.text) for each in failed] == [(503, True)] * 2
    assert attempts == 1
    assert several.shop.get("/at/asia/topics").status == 200


def test_the_chooser_is_on_each_page_and_marks_the_present_one(several: Several) -> None:
    several.shop.sign_in()

    page = several.shop.page("/at/us/groups").html

    assert '<a href="/at/us/" aria-current="true">us</a>' in page
    assert '<a href="/at/eu/">eu</a>' in page
    assert 'href="/at/us/topics"' in page


def test_one_sign_in_is_for_all_and_its_cookie_too(several: Several) -> None:
    closed = several.shop.get("/at/eu/topics")
    signed_in = several.shop.post("/at/eu/sign-in", {"token": TOKEN, **COMPLETE})
    page = several.shop.page("/at/us/topics")
    several.shop.post("/at/us/sign-in", page.form("/sign-in"))

    assert closed.status == 401
    assert "eu" not in closed.text
    assert (signed_in.status, signed_in.headers["Location"]) == (303, "/")
    assert "; Path=/; " in signed_in.headers["Set-Cookie"]
    assert several.shop.get("/at/eu/topics").status == 401


def test_the_link_with_the_token_leads_to_the_page_below_the_prefix(several: Several) -> None:
    answer = several.shop.get("/at/eu/topics", token=TOKEN, kind="normal")

    assert (answer.status, answer.headers["Location"]) == (303, "/at/eu/topics?kind=normal")
    assert "; Path=/; " in answer.headers["Set-Cookie"]


def test_an_unknown_name_is_not_found(several: Several) -> None:
    several.shop.sign_in()

    assert several.shop.get("/at/mars/topics").status == 404


def test_a_change_is_made_where_its_page_is_and_the_log_names_the_broker(several: Several) -> None:
    several.shop.sign_in()
    token = several.shop.page("/at/us/topics").form("/sign-in")["form_token"][0]
    fields = {"form_token": token, "topic": "refunds", "queues": "2", **COMPLETE}
    preview = several.shop.post("/at/us/topics/create/preview", fields)

    several.shop.change("/at/us/topics/create", preview.form("/at/us/topics/create"))

    assert "refunds" in several.us.admin().topic_names()
    assert "refunds" not in several.eu.admin().topic_names()
    assert '"broker": "10.1.0.1:9876"' in several.audit_path.read_text("utf-8")


def test_an_account_has_its_rights_in_all_of_them(tmp_path: Path) -> None:
    account = Account(
        access_key="view-orders", secret_key=SECRET, topic_perms={"orders": Right.SUB}, group_perms={"other": Right.SUB}
    )
    with ExitStack() as stack:
        several = Several(stack, tmp_path, AccessControl(AclSettings(accounts=(account,))))
        several.clock.move_ms(120_000)
        several.shop.post("/sign-in", {"access_key": "view-orders", "secret_key": SECRET, **COMPLETE})

        assert "billing" not in several.shop.page("/").text
        assert "orders" in several.shop.page("/at/eu/topics").text
        assert "invoices" not in several.shop.page("/at/us/topics").text


class Application:
    """An application with a paused listener and a part that has failed."""

    address = "http://10.0.0.5:9090/actuator"

    def get(self, path: str) -> Any:
        paused = {"id": "bill", "group": "billing", "state": "paused", "lag": 7}
        failed = {"status": "DOWN", "details": {"error": "no connection"}}
        found: dict[str, Any] = {
            "listeners": {"listeners": [paused]},
            "health": {"status": "DOWN", "components": {"mail": failed}},
        }
        if path not in found:
            raise UnknownNameError(f"there is no endpoint {path!r}")
        return found[path]

    def post(self, path: str, change: object) -> Any:
        raise NotImplementedError

    def of(self, account: str) -> Application:
        return self


def test_the_overview_of_all_and_that_of_an_application_say_the_same(tmp_path: Path) -> None:
    clock = VirtualClock()
    fleet = several_dashboards(
        {"shop": Place(application=Application())},
        access=Access(TOKEN, reads_need_token=False, clock=clock),
        audit=dashboard_audit(None, clock),
        clock=clock,
    )
    shop = Shop(None, None, fleet, tmp_path)  # type: ignore[arg-type]

    both = [shop.page(path).text for path in ("/", "/at/shop/")]
    fleet.close()

    for page in both:
        assert page.index("health: mail is DOWN: no connection") < page.index(
            "listener bill is paused, with a lag of 7 messages"
        )
