"""A broker as one account of access control may use it: reads of its topics and groups, and changes by its role."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from mqtemplate.broker import (
    Broker,
    BrokerAdmin,
    ConsumerGroups,
    DelayConsole,
    DelayedMessages,
    GroupDeliveries,
    GroupInfo,
    MessageReader,
    MessageSends,
    QueuedMessage,
    QueueProgress,
    QueueSpan,
    Requests,
    RetentionHold,
    StoreHealth,
    TopicKind,
    TopicMessageType,
    Transactions,
    unknown_name,
)
from mqtemplate.delay.recall_handle import decode_handle
from mqtemplate.errors import MQTemplateError, UnknownNameError, UnsupportedError
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.pending import (
    ConditionalSend,
    PendingCounts,
    PendingMessage,
    PendingPage,
    PendingQuery,
    PendingState,
    ScheduleChange,
)
from mqtemplate.results import PullResult, SendResult
from mqtemplate.selectors.tags import Selector
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Account, AccountRole, Need, Right, group_need, topic_need
from mqtemplate.services import Service
from mqtemplate.topics import DLQ_TOPIC_PREFIX, MARKS_TOPIC, is_broker_topic

_EITHER = Right.PUB | Right.SUB
_MOST_PAGES = 50
"""Pages of pending messages that are read for one page of those that an account may see."""
_MOST_COUNTED = 100
"""Topics whose pending messages are counted for an account without a right on all of them."""
_WHERE = "mqtemplate.server.acl.accounts"


class NoRightError(MQTemplateError):
    """An account has no right to a topic or a group, or its role does not include a change."""


class AccountRights:
    """Rights of one account, as they are now.

    Args:
        accounts: The accounts; they may change.
    """

    def __init__(self, accounts: AccessControl, access_key: str) -> None:
        self._accounts = accounts
        self.access_key = access_key

    @property
    def account(self) -> Account:
        """The account.

        Raises:
            NoRightError: It was removed.
        """
        found = self._accounts.accounts.get(self.access_key)
        if found is None:
            raise NoRightError(f"account {self.access_key!r} was removed from {_WHERE}; sign in with another one")
        return found

    def may(self, need: Need) -> bool:
        """Return True if the account has a right."""
        return self._accounts.permits(self.account, need)

    def may_read(self, topic: str) -> bool:
        """Return True if the account may read the messages of a topic."""
        return self.may(topic_need(topic, Right.SUB))

    def may_list(self, topic: str) -> bool:
        """Return True if the account may see that a topic exists, and how many messages it has."""
        return self.may(topic_need(topic, _EITHER))

    def may_use(self, group: str) -> bool:
        """Return True if the account may see a group."""
        return self.may(group_need(group))

    def reads_all(self) -> bool:
        """Return True if the account may read the messages of all topics, and of the retries of all groups."""
        return self.may(Need("topic", None, Right.SUB)) and self.may(Need("group", None, Right.SUB))

    def check(self, need: Need) -> None:
        """Check a right.

        Raises:
            NoRightError: The account does not have it.
        """
        if not self.may(need):
            raise NoRightError(
                f"account {self.access_key!r} has no right {need}; an administrator gives it with {need.kind}-perms or "
                f"default-{need.kind}-perm in {_WHERE}"
            )

    def check_names(self, topic: str | None, group: str | None) -> None:
        """Check that the account may see a topic and a group, of which each may be missing.

        Raises:
            NoRightError: It may not, so lists that leave them out must not say that they do not exist.
        """
        if topic:
            self.check(topic_need(topic, _EITHER))
        if group:
            self.check(group_need(group))

    def check_role(self, needed: AccountRole, action: str) -> None:
        """Check the role.

        Args:
            action: What needs the role, for the text of the error.

        Raises:
            NoRightError: The account has a lesser one.
        """
        account, order = self.account, list(AccountRole)
        if order.index(account.role) >= order.index(needed):
            return
        how = "admin: true" if needed is AccountRole.ADMIN else f"role: {needed.value}"
        raise NoRightError(
            f"account {self.access_key!r} has the role {account.role.value}, and {action} needs the role "
            f"{needed.value}; an administrator sets {how} in {_WHERE}"
        )

    def check_change(self, topic: str) -> None:
        """Check that the account may send to a topic, or change its pending messages.

        Raises:
            NoRightError: It may not.
        """
        self.check_role(AccountRole.OPERATOR, "a change")
        self.check(topic_need(topic, Right.PUB))

    def sees(self, message: MessageExt) -> bool:
        """Return True if the account may read a stored message, also in a topic that the broker uses for others."""
        return self.may_read(_reached(message))


def _reached(message: MessageExt) -> str:
    """Return the topic whose right a stored message needs."""
    if message.topic == MARKS_TOPIC:
        return DLQ_TOPIC_PREFIX + (message.keys or "")
    if not is_broker_topic(message.topic):
        return message.topic
    return message.properties.get(Property.REAL_TOPIC, message.topic)


def _is_shared(topic: str) -> bool:
    """Return True for a topic with messages of other topics, of which each needs a right of its own."""
    return is_broker_topic(topic) or topic == MARKS_TOPIC


class AccountBroker(Broker):
    """A started broker for one account. It is not started and not closed here.

    Lists have what the account may see; the rest is refused. It has no path: the figures of a folder are of all topics.

    Args:
        broker: The broker itself.
    """

    def __init__(self, broker: Broker, rights: AccountRights) -> None:
        self._broker, self._rights = broker, rights
        self.name, self.clock, self.capabilities = broker.name, broker.clock, broker.capabilities
        self.is_embedded = broker.is_embedded

    @property
    def delay_levels_ms(self) -> Sequence[int]:
        return self._broker.delay_levels_ms

    @property
    def retry_delays_ms(self) -> Sequence[int]:
        return self._broker.retry_delays_ms

    @property
    def sends(self) -> MessageSends:
        return _AccountSends(self._broker.sends, self._rights)

    @property
    def requests(self) -> Requests:
        raise _not_here("requests")

    @property
    def transactions(self) -> Transactions:
        raise _not_here("transactions")

    @property
    def reader(self) -> MessageReader:
        return _AccountReader(self._broker.reader, self._rights)

    @property
    def groups(self) -> ConsumerGroups:
        return _AccountGroups(self._broker.groups, self._rights)

    @property
    def delayed(self) -> DelayedMessages:
        return _AccountDelayed(self._broker, self._rights)

    @property
    def delay_console(self) -> DelayConsole | None:
        """The whole broker's for an administrator; None for others, as it has figures of all topics."""
        return self._broker.delay_console if self._rights.reads_all() else None

    def start(self) -> None:
        """Do nothing: the broker is started."""

    def close(self) -> None:
        """Do nothing: others use the broker."""

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        self._rights.check(topic_need(topic, _EITHER))
        return self._broker.queues(topic)

    def create_topic(self, topic: str, queue_count: int = 4, *, message_type: TopicMessageType | None = None) -> None:
        if topic != MARKS_TOPIC:
            self._rights.check_role(AccountRole.ADMIN, "creating a topic")
        self._broker.create_topic(topic, queue_count, message_type=message_type)

    def topic_names(self) -> Sequence[str]:
        return [topic for topic in self._broker.topic_names() if self._rights.may_list(topic)]

    def expect_topics(self, topics: Iterable[str]) -> None:
        raise _not_here("listeners")

    def admin(self) -> BrokerAdmin:
        return _AccountAdmin(self._broker.admin(), self._rights)

    def store_health(self) -> StoreHealth | None:
        found = self._broker.store_health()
        return None if found is None else dataclasses.replace(found, disk=None)  # its figures are of all topics

    def retention_holds(self) -> Sequence[RetentionHold]:
        return [hold for hold in self._broker.retention_holds() if self._rights.may_use(hold.group)]

    def services(self) -> Sequence[Service]:
        return ()


def _not_here(what: str) -> UnsupportedError:
    return UnsupportedError(f"an account reaches no {what} in the dashboard; connect to the broker itself")


class _AccountAdmin(BrokerAdmin):
    def __init__(self, admin: BrokerAdmin, rights: AccountRights) -> None:
        self._admin = admin
        self._rights = rights

    def topic_kinds(self) -> dict[str, TopicKind]:
        return {name: kind for name, kind in self._admin.topic_kinds().items() if self._rights.may_list(name)}

    def delay_levels_ms(self) -> Sequence[int] | None:
        found = self._admin.delay_levels_ms()
        return None if found is None else tuple(found)

    def topic_shapes(self) -> Mapping[str, str]:
        return {topic: each for topic, each in self._admin.topic_shapes().items() if self._rights.may_list(topic)}

    def queue_spans(self, topic: str) -> list[QueueSpan]:
        if topic != MARKS_TOPIC:  # of its messages only the visible ones are read
            self._rights.check(topic_need(topic, _EITHER))
        try:
            return self._admin.queue_spans(topic)
        except UnknownNameError:  # its hint may name a topic that the account may not see
            raise unknown_name("topic", topic, self.topic_names()) from None

    def readable_topics(self) -> list[str]:
        return [topic for topic in super().readable_topics() if self._rights.may_read(topic)]

    def delete_topic(self, topic: str) -> None:
        self._rights.check_role(AccountRole.ADMIN, "deleting a topic")
        self._admin.delete_topic(topic)

    def groups_of(self, topic: str) -> list[str]:
        self._rights.check(topic_need(topic, _EITHER))
        return [group for group in self._admin.groups_of(topic) if self._rights.may_use(group)]

    def group_names(self) -> list[str]:
        return [group for group in self._admin.group_names() if self._rights.may_use(group)]

    def group(self, name: str) -> GroupInfo:
        self._rights.check(group_need(name))
        try:
            found = self._admin.group(name)
        except UnknownNameError:
            raise unknown_name("group", name, self.group_names()) from None
        subscriptions = tuple(each for each in found.subscriptions if self._rights.may_read(each.topic))
        return dataclasses.replace(found, subscriptions=subscriptions, progress=tuple(self._seen(found.progress)))

    def deliveries(self, group: str) -> GroupDeliveries | None:
        self._rights.check(group_need(group))
        found = self._admin.deliveries(group)
        if found is None:
            return None
        seen = tuple(each for each in found.messages if self._rights.may_read(each.topic))
        return dataclasses.replace(found, messages=seen)

    def _seen(self, progress: Iterable[QueueProgress]) -> list[QueueProgress]:
        return [each for each in progress if self._rights.may_read(each.queue.topic)]

    def set_offsets(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        self._rights.check_role(AccountRole.OPERATOR, "a change")
        self._rights.check(group_need(group))
        for topic in {queue.topic for queue in offsets}:
            self._rights.check(topic_need(topic, Right.SUB))
        self._admin.set_offsets(group, offsets)

    def forget_group(self, group: str) -> None:
        self._rights.check_role(AccountRole.ADMIN, "deleting a group")
        self._admin.forget_group(group)


class _AccountReader(MessageReader):
    def __init__(self, reader: MessageReader, rights: AccountRights) -> None:
        self._reader = reader
        self._rights = rights

    def _check(self, topic: str, right: Right) -> None:
        if not _is_shared(topic):
            self._rights.check(topic_need(topic, right))

    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        max_count: int = 32,
        wait_ms: int = 0,
        selector: Selector | None = None,
    ) -> PullResult:
        self._check(queue.topic, Right.SUB)
        found = self._reader.pull(queue, queue_offset, max_count, wait_ms, selector)
        if not _is_shared(queue.topic):
            return found
        return dataclasses.replace(found, messages=[each for each in found.messages if self._rights.sees(each)])

    def min_offset(self, queue: MessageQueue) -> int:
        self._check(queue.topic, _EITHER)
        return self._reader.min_offset(queue)

    def max_offset(self, queue: MessageQueue) -> int:
        self._check(queue.topic, _EITHER)
        return self._reader.max_offset(queue)

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        self._check(queue.topic, _EITHER)
        return self._reader.search_offset(queue, timestamp)

    def message_by_id(self, offset_msg_id: str) -> MessageExt | None:
        found = self._reader.message_by_id(offset_msg_id)
        if found is not None and not self._rights.sees(found):
            raise NoRightError(
                f"account {self._rights.access_key!r} has no right SUB on the topic of message {offset_msg_id!r:.80}; "
                f"an administrator gives it in {_WHERE}"
            )
        return found

    def messages_by_key(
        self,
        topic: str,
        key: str,
        max_count: int = 64,
        *,
        begin_ms: int = 0,
        end_ms: int | None = None,
        unique: bool = False,
    ) -> list[MessageExt]:
        self._check(topic, Right.SUB)
        found = self._reader.messages_by_key(topic, key, max_count, begin_ms=begin_ms, end_ms=end_ms, unique=unique)
        return [each for each in found if self._rights.sees(each)]


class _AccountGroups(ConsumerGroups):
    def __init__(self, groups: ConsumerGroups, rights: AccountRights) -> None:
        self._groups = groups
        self._rights = rights

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        self._rights.check(group_need(group))
        return self._groups.committed_offset(group, queue)

    def subscribe(self, *_: Any, **__: Any) -> NoReturn:
        raise _not_here("consumers")

    def commit_offset(self, *_: Any, **__: Any) -> NoReturn:
        raise _not_here("consumers")

    def lock_queue(self, *_: Any, **__: Any) -> NoReturn:
        raise _not_here("consumers")

    def consumed_topics(self) -> Mapping[str, Collection[str]] | None:
        found = self._groups.consumed_topics()
        return None if found is None else {group: found[group] for group in found if self._rights.may_use(group)}


class _AccountSends(MessageSends):
    def __init__(self, sends: MessageSends, rights: AccountRights) -> None:
        self._sends = sends
        self._rights = rights

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        if message.topic == MARKS_TOPIC:  # its key is the group of the dead letters
            self._rights.check_role(AccountRole.OPERATOR, "a change")
            self._rights.check(group_need(message.properties.get(Property.KEYS, "")))
        else:
            self._rights.check_change(message.topic)
        return self._sends.send(message, queue, timeout_ms)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _not_here("sends but of single messages")

    send_batch = send_async = send_one_way = send_half = send_sequenced = _refuse


class _AccountDelayed(DelayedMessages):
    def __init__(self, broker: Broker, rights: AccountRights) -> None:
        self._broker = broker
        self._delayed = broker.delayed
        self._rights = rights

    def cancel(
        self,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        self._check_change(handle, topic, then)
        return self._delayed.cancel(handle, key=key, topic=topic, then=then)

    def reschedule(
        self,
        handle: str | None = None,
        deliver_ms: int = 0,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        self._check_change(handle, topic, then)
        return self._delayed.reschedule(handle, deliver_ms, key=key, topic=topic, then=then)

    def send_if(
        self,
        messages: Sequence[QueuedMessage],
        state: PendingState,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
    ) -> ConditionalSend:
        self._check_change(handle, topic, messages)
        return self._delayed.send_if(messages, state, handle, key=key, topic=topic)

    def _check_change(self, handle: str | None, topic: str | None, then: Sequence[QueuedMessage]) -> None:
        for message, _ in then:
            self._rights.check(topic_need(message.topic, Right.PUB))
        reached = topic if handle is None else decode_handle(handle).topic
        if reached is not None:
            self._rights.check_change(reached)
            return
        self._rights.check_role(AccountRole.OPERATOR, "a change")
        self._rights.check(Need("topic", None, Right.PUB))

    def pending(
        self,
        query: PendingQuery,
        max_count: int = 100,
        cursor: str | None = None,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingPage:
        """Return pending messages that the account may see. A page before the last one may have fewer of them."""
        if self._is_open(query):
            return self._delayed.pending(query, max_count, cursor, on_compared=on_compared)
        found: list[PendingMessage] = []
        for _ in range(_MOST_PAGES):
            page = self._delayed.pending(query, max_count - len(found), cursor, on_compared=on_compared)
            found += [each for each in page.messages if self._rights.may_read(each.topic)]
            cursor = page.cursor
            if cursor is None or len(found) >= max_count:
                break
        return PendingPage(tuple(found), cursor)

    def count_pending(
        self,
        query: PendingQuery,
        bucket_ms: int = 60_000,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingCounts:
        if self._is_open(query):
            return self._delayed.count_pending(query, bucket_ms, on_compared=on_compared)
        topics = [topic for topic in self._broker.topic_names() if self._rights.may_read(topic)]
        if len(topics) > _MOST_COUNTED:
            raise NoRightError(
                f"account {self._rights.access_key!r} may read {len(topics)} topics and not all of them, and pending "
                f"messages are counted for {_MOST_COUNTED} at once; name a topic"
            )
        total, buckets = 0, dict[int, int]()
        for topic in topics:
            each = self._delayed.count_pending(
                dataclasses.replace(query, topic=topic), bucket_ms, on_compared=on_compared
            )
            total += each.total
            for start_ms, count in each.buckets.items():
                buckets[start_ms] = buckets.get(start_ms, 0) + count
        return PendingCounts(total, dict(sorted(buckets.items())))

    def pending_positions(self, *_: Any, **__: Any) -> NoReturn:
        raise _not_here("files")

    def _is_open(self, query: PendingQuery) -> bool:
        """Return True if all messages that match may be seen."""
        if query.topic is None:
            return self._rights.reads_all()
        self._rights.check(topic_need(query.topic, Right.SUB))
        return True
