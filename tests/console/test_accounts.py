"""Accounts of access control in the dashboard: sign-in, roles, what each sees, refusals, the name in the audit log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.console import Actuator
from mqtemplate.console.dashboard import _ROUTES
from mqtemplate.errors import ConfigurationError
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Account, AccountRole, AclSettings, Right
from tests.console.pages import COMPLETE, TOKEN, Answer, Shop, open_shop

SECRET = "s3cret-of-all"
ORDERS = {"orders": Right.PUB | Right.SUB}
VIEWER = Account(access_key="view-orders", secret_key=SECRET, topic_perms=ORDERS, group_perms={"billing": Right.SUB})
OPERATOR = replace(VIEWER, access_key="run-orders", role=AccountRole.OPERATOR)
ADMIN = Account(access_key="all-of-it", secret_key=SECRET, admin=True)
INTERNAL = Account(access_key="run-0123", secret_key=SECRET, admin=True, is_owner=True)


@pytest.fixture
def accounts() -> AccessControl:
    return AccessControl(AclSettings(accounts=(VIEWER, OPERATOR, ADMIN, INTERNAL)))


@pytest.fixture
def guest(tmp_path: Path, accounts: AccessControl) -> Iterator[Shop]:
    """A dashboard with accounts; nobody is signed in. Messages of topic `payroll` are for administrators."""
    with open_shop(tmp_path, accounts=accounts) as shop:
        shop.send("orders", b"an order", "order-1")
        shop.send("payroll", b"a salary", "salary-1")
        shop.send_due(1, "order-2", "orders")
        shop.send_due(1, "salary-2", "payroll")
        shop.broker.admin().set_offsets("payroll-readers", {shop.broker.queues("payroll")[0]: 0})
        yield shop


def sign_in(shop: Shop, access_key: str, secret_key: str = SECRET) -> Answer:
    shop.cookies.clear()
    return shop.post("/sign-in", {"access_key": access_key, "secret_key": secret_key, **COMPLETE})


def post(shop: Shop, path: str, **fields: object) -> Answer:
    """Send a form with its token."""
    return shop.post(path, {"form_token": shop.form_token(), **COMPLETE, **fields})


def change(shop: Shop, path: str, **fields: Any) -> Answer:
    """Preview a change, make it, and return its page."""
    preview = post(shop, f"{path}/preview", **fields)
    assert preview.status == 200, preview.text
    return shop.change(path, preview.form(path))


def audit_lines(shop: Shop) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shop.audit_path.read_text("utf-8").splitlines()]


# --- the sign-in --------------------------------------------------------------------------------


def test_an_account_signs_in_with_its_keys_and_the_token_still_works(guest: Shop) -> None:
    form = guest.get("/").text
    signed_in = sign_in(guest, "view-orders")
    page = guest.page("/").text
    guest.cookies.clear()
    guest.sign_in()

    assert "Access key" in form
    assert (signed_in.status, signed_in.headers["Location"]) == (303, "/")
    assert "view-orders viewer" in page
    assert "changes allowed" in guest.page("/").text


def test_without_accounts_only_the_token_is_asked_for(tmp_path: Path) -> None:
    with open_shop(tmp_path) as shop:
        assert "Access key" not in shop.get("/").text
        assert sign_in(shop, "view-orders").status == 403


@pytest.mark.parametrize(
    "keys", [("view-orders", "wrong"), ("nobody", SECRET), ("run-0123", SECRET)], ids=["secret", "unknown", "internal"]
)
def test_wrong_keys_are_refused_with_one_text(guest: Shop, keys: tuple[str, str]) -> None:
    answer = sign_in(guest, *keys)

    assert answer.status == 403
    assert "The access key is unknown, or the secret key is wrong." in answer.text
    assert guest.get("/topics").status == 401


def test_a_secret_key_cannot_be_guessed(guest: Shop) -> None:
    """Ten wrong ones, and the right one waits a minute too; other accounts and other addresses do not."""
    statuses = [sign_in(guest, "view-orders", f"guess {number}").status for number in range(10)]
    right = sign_in(guest, "view-orders")
    other_account = sign_in(guest, "all-of-it").status
    guest.remote = "10.0.0.8"
    elsewhere = sign_in(guest, "view-orders").status
    guest.remote = "10.0.0.7"
    guest.harness.advance("61s")

    assert statuses == [403] * 10
    assert right.status == 429
    assert "There were too many wrong secret keys for this access key from your address: wait a minute" in right.text
    assert (other_account, elsewhere, sign_in(guest, "view-orders").status) == (303, 303, 303)


def test_a_session_ends_when_its_account_is_removed_or_gets_another_secret(
    guest: Shop, accounts: AccessControl
) -> None:
    sign_in(guest, "view-orders")
    before = guest.get("/topics").status
    accounts.change_accounts(AclSettings(accounts=(OPERATOR, ADMIN)))
    removed = guest.get("/topics").status
    sign_in(guest, "run-orders")
    accounts.change_accounts(AclSettings(accounts=(replace(OPERATOR, secret_key="another-one"), ADMIN)))

    assert (before, removed) == (200, 401)
    assert guest.get("/topics").status == 401


def test_changed_rights_apply_to_the_next_request(guest: Shop, accounts: AccessControl) -> None:
    sign_in(guest, "view-orders")
    before = guest.page("/topics").text
    accounts.change_accounts(AclSettings(accounts=(replace(VIEWER, topic_perms={"payroll": Right.SUB}),)))
    after = guest.page("/topics").text

    assert "orders" in before
    assert "payroll" not in before
    assert "payroll" in after


def test_the_role_admin_needs_admin_true() -> None:
    with pytest.raises(ConfigurationError, match="has role admin, and admin is false; set admin: true, or give the"):
        replace(VIEWER, role=AccountRole.ADMIN)
    assert ADMIN.role is AccountRole.ADMIN


# --- what an account sees -----------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted({path for method, path in _ROUTES if method == "GET"}))
def test_no_page_tells_an_account_of_topics_that_it_may_not_read(guest: Shop, page: str) -> None:
    sign_in(guest, "run-orders")

    answers = [guest.get(page), guest.get(page, q="salary"), guest.get(page, kind="all", all="1")]

    assert not any(word in each.html for each in answers for word in ("payroll", "salary-", "a salary"))


@pytest.mark.parametrize(
    ("page", "query", "text"),
    [
        ("/topics", {"name": "payroll"}, "has no right PUB|SUB on topic 'payroll'; an administrator gives it with"),
        ("/messages", {"topic": "payroll"}, "has no right PUB|SUB on topic 'payroll'"),
        ("/messages", {"topic": "payroll", "key": "salary-1"}, "has no right PUB|SUB on topic 'payroll'"),
        ("/delayed/list", {"topic": "payroll"}, "has no right PUB|SUB on topic 'payroll'"),
        ("/tail/stream", {"topic": "payroll"}, "has no right PUB|SUB on topic 'payroll'"),
        ("/groups", {"name": "payroll-readers"}, "has no right SUB on group 'payroll-readers'; an administrator gives"),
        ("/dead-letters", {"group": "payroll-readers"}, "has no right SUB on group 'payroll-readers'"),
        ("/configuration", {}, "has the role viewer, and this page needs the role admin; an administrator sets admin"),
    ],
)
def test_what_an_account_may_not_read_is_refused_with_the_right_that_it_needs(
    guest: Shop, page: str, query: dict[str, str], text: str
) -> None:
    sign_in(guest, "view-orders")

    answer = guest.get(page, **query)

    assert answer.status == 403
    assert f"account 'view-orders' {text}" in answer.text


def test_a_message_of_another_topic_is_refused_by_its_id_too(guest: Shop) -> None:
    sent = guest.send("payroll", b"a salary", "salary-3")
    sign_in(guest, "view-orders")

    answer = guest.get("/message", id=sent.offset_msg_id)

    assert answer.status == 403
    assert "account 'view-orders' has no right SUB on the topic of message" in answer.text
    assert "a salary" not in answer.text


@pytest.mark.parametrize("page", ["/messages", "/delayed/list"])
def test_an_account_that_may_only_send_to_a_topic_reads_none_of_its_messages(
    guest: Shop, accounts: AccessControl, page: str
) -> None:
    accounts.change_accounts(AclSettings(accounts=(replace(VIEWER, topic_perms={"orders": Right.PUB}),)))
    sign_in(guest, "view-orders")

    listed, answer = guest.page("/topics").text, guest.get(page, topic="orders")

    assert "orders" in listed
    assert answer.status == 403
    assert "account 'view-orders' has no right SUB on topic 'orders'" in answer.text


def test_hints_name_nothing_that_an_account_may_not_see(guest: Shop, accounts: AccessControl) -> None:
    most = replace(
        VIEWER,
        default_topic_perm=Right.SUB,
        default_group_perm=Right.SUB,
        topic_perms={"payroll": Right.DENY},
        group_perms={"payroll-readers": Right.DENY},
    )
    accounts.change_accounts(AclSettings(accounts=(most,)))
    sign_in(guest, "view-orders")

    answers = [guest.get("/topics", name="payrol"), guest.get("/groups", name="payroll-reader")]

    assert [each.status for each in answers] == [404, 404]
    assert "topic 'payrol' does not exist; there is:" in answers[0].text
    assert not any("payroll'" in each.text or "payroll-readers" in each.text for each in answers)


def test_a_search_leaves_out_topics_to_which_an_account_may_only_send(guest: Shop, accounts: AccessControl) -> None:
    rights = {"orders": Right.SUB, "payroll": Right.PUB}
    accounts.change_accounts(AclSettings(accounts=(replace(VIEWER, topic_perms=rights),)))
    sign_in(guest, "view-orders")

    found, missing = guest.get("/search", q="order-1"), guest.get("/search", q="salary-1")

    assert (found.status, missing.status) == (303, 200)
    assert "a salary" not in missing.text


def test_a_viewer_sees_the_messages_of_its_topics(guest: Shop) -> None:
    sign_in(guest, "view-orders")

    assert "order-1" in guest.page("/messages", topic="orders").text
    assert "order-2" in guest.page("/delayed/list").text
    assert "1 due in this span of 1 counted" in guest.page("/delayed").text
    assert "billing" in guest.page("/groups").text
    assert "bill" in guest.page("/listeners").text
    assert "1 pending message" in guest.page("/").text


# --- changes ------------------------------------------------------------------------------------


def test_a_viewer_changes_nothing(guest: Shop) -> None:
    sign_in(guest, "view-orders")

    pages = [guest.page(page).text for page in ("/delayed", "/listeners", "/messages/send")]
    answer = post(guest, "/delayed/preview", action="cancel", scope="all")
    paused = post(guest, "/listeners/change", action="pause", listener="bill")

    assert not any(word in page for page in pages for word in ("Cancel", "Pause", "Preview"))
    assert (answer.status, paused.status) == (403, 403)
    assert (
        "account 'view-orders' has the role viewer, and a change needs the role operator; an administrator sets role: "
        "operator in mqtemplate.server.acl.accounts"
    ) in answer.text
    assert len(guest.pending_keys()) == 2


def test_an_operator_cancels_what_it_may_send_and_the_audit_log_has_its_name(guest: Shop) -> None:
    sign_in(guest, "run-orders")

    preview = post(guest, "/delayed/preview", action="cancel", scope="all")
    done = guest.change("/delayed/change", preview.form("/delayed/change"))

    assert "Cancel 1 pending message" in preview.text or "Cancel: 1 pending message" in preview.text
    assert "succeeded" in done.text
    assert guest.pending_keys() == ["salary-2"]
    assert {(line["action"], line["user"], line["remote"]) for line in audit_lines(guest)} == {
        ("delayed.cancel", "run-orders", "10.0.0.7")
    }


def test_an_operator_pauses_and_moves_the_listeners_of_its_groups(guest: Shop) -> None:
    sign_in(guest, "run-orders")

    post(guest, "/listeners/change", action="pause", listener="bill")

    assert "paused" in guest.page("/listeners").text
    assert [line["user"] for line in audit_lines(guest)] == ["run-orders", "run-orders"]


@pytest.mark.parametrize("access_key", ["run-orders", "all-of-it"])
def test_the_log_of_the_application_has_the_account_that_moved_its_listener(guest: Shop, access_key: str) -> None:
    guest.send("orders", b"another order")
    guest.harness.advance("1s")
    sign_in(guest, access_key)
    post(guest, "/listeners/change", action="pause", listener="bill")
    preview = post(guest, "/listeners/seek", listener="bill", to="first")
    guest.change("/listeners/seek", preview.form("/listeners/seek"))
    guest.cookies.clear()
    guest.sign_in()
    post(guest, "/listeners/change", action="resume", listener="bill")

    log = guest.app.get(Actuator).sources.audit
    assert log is not None
    assert {each.action: each.author for each in log.recent(10)} == {
        "listener.pause": access_key, "listener.seek": access_key, "listener.resume": "this process"
    }  # fmt: skip


def test_an_operator_without_the_group_cannot_pause_its_listener(guest: Shop, accounts: AccessControl) -> None:
    accounts.change_accounts(AclSettings(accounts=(replace(OPERATOR, group_perms={}),)))
    sign_in(guest, "run-orders")

    answer = post(guest, "/listeners/change", action="pause", listener="bill")

    assert answer.status == 403
    assert "account 'run-orders' has no right SUB on group 'billing'" in answer.text


def test_an_operator_who_may_only_read_a_topic_cannot_change_its_messages(guest: Shop, accounts: AccessControl) -> None:
    accounts.change_accounts(AclSettings(accounts=(replace(OPERATOR, topic_perms={"orders": Right.SUB}),)))
    sign_in(guest, "run-orders")

    preview = post(guest, "/delayed/preview", action="cancel", scope="all")
    done = guest.change("/delayed/change", preview.form("/delayed/change"))

    assert "account 'run-orders' has no right PUB on topic 'orders'" in done.text
    assert len(guest.pending_keys()) == 2


def test_topics_and_groups_are_created_by_administrators(guest: Shop) -> None:
    sign_in(guest, "run-orders")
    refused = post(guest, "/topics/create/preview", topic="refunds", queues=2)
    group = post(guest, "/groups/delete/preview", group="billing")
    sign_in(guest, "all-of-it")
    change(guest, "/topics/create", topic="refunds", queues=2)

    assert (refused.status, group.status) == (403, 403)
    assert (
        "account 'run-orders' has the role operator, and this page needs the role admin; an administrator sets admin: "
        "true in mqtemplate.server.acl.accounts"
    ) in refused.text
    assert len(guest.broker.admin().queue_spans("refunds")) == 2
    assert {(line["action"], line["user"]) for line in audit_lines(guest)} == {("topics.create", "all-of-it")}


def test_the_list_of_changes_has_the_own_ones_and_of_an_administrator_all(guest: Shop) -> None:
    sign_in(guest, "all-of-it")
    change(guest, "/messages/send", topic="payroll", body="a salary", delay="1h")
    sign_in(guest, "run-orders")
    change(guest, "/messages/send", topic="orders", body="an order", delay="1h", keys="order-9")
    own = guest.page("/changes").text
    [sent] = [line["id"] for line in audit_lines(guest) if line["state"] == "started" and line["topic"] == "payroll"]
    foreign = post(guest, "/changes/preview", id=sent)
    guest.cookies.clear()
    guest.sign_in()

    assert "orders" in own
    assert "payroll" not in own
    assert foreign.status == 404
    assert "payroll" in guest.page("/changes").text


def test_an_operator_undoes_its_own_send(guest: Shop) -> None:
    sign_in(guest, "run-orders")
    change(guest, "/messages/send", topic="orders", body="an order", delay="1h", keys="order-9")
    sent = audit_lines(guest)[-1]["id"]

    preview = post(guest, "/changes/preview", id=sent)
    guest.change("/changes/undo", preview.form("/changes/undo"))

    assert "order-9" not in guest.pending_keys()


def test_a_send_to_another_topic_is_refused(guest: Shop) -> None:
    sign_in(guest, "run-orders")

    answer = post(guest, "/messages/send/preview", topic="payroll", body="a raise")

    assert answer.status == 403
    assert "account 'run-orders' has no right PUB|SUB on topic 'payroll'" in answer.text


def test_without_allow_changes_an_administrator_only_reads(tmp_path: Path, accounts: AccessControl) -> None:
    with open_shop(tmp_path, allow_changes=False, accounts=accounts) as shop:
        sign_in(shop, "all-of-it")
        answer = post(shop, "/topics/create/preview", topic="refunds", queues=2)

    assert answer.status == 403
    assert "this dashboard only reads; start it with --allow-changes" in answer.text


def test_a_change_without_a_sign_in_names_both_ways(tmp_path: Path, accounts: AccessControl) -> None:
    with open_shop(tmp_path, accounts=accounts, reads_need_token=False) as shop:
        answer = shop.post("/delayed/preview", {"action": "cancel", "form_token": TOKEN, **COMPLETE})

    assert answer.status == 403
    assert "open the link that was printed at the start, or sign in with an account" in answer.text
