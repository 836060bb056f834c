"""All group members of a remote broker: they join and leave, and their periodic work is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import structlog

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec, MessageModel
from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.consuming.broker_offsets import BrokerOffsets, RemoteBrokerOffsetStore
from mqtemplate.brokers.remote.consuming.consumer import MemberParts, RemoteConsumer
from mqtemplate.brokers.remote.consuming.group_requests import GroupRequests
from mqtemplate.brokers.remote.consuming.offset_store import LocalFileOffsetStore, OffsetStore, local_offset_file
from mqtemplate.brokers.remote.consuming.pull_client import PullClient
from mqtemplate.brokers.remote.consuming.pull_loop import PullLoop
from mqtemplate.brokers.remote.consuming.queue_locks import QueueLocks
from mqtemplate.brokers.remote.consuming.send_back import RetrySender
from mqtemplate.brokers.remote.pull_request import Subscription, subscription_data
from mqtemplate.brokers.remote.queries import Queries
from mqtemplate.brokers.same_group import check_same_group
from mqtemplate.clock import Clock
from mqtemplate.errors import MQTemplateError
from mqtemplate.message import MessageQueue
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.services import WakeEvent
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_log = structlog.stdlib.get_logger("mqtemplate.remote")

_HALF_AN_HOUR_MS = 1_800_000


class Members:
    """The members of one client, and its instances.

    Brokers cannot tell two members of one group and one client id apart. So the second member of a group gets another
    instance; members of different groups share the first one, which also sends.

    Args:
        new_instance: Creates another client instance.
        on_heartbeat_due: Called when a broker has not registered a member.
        on_rebalance_due: Called when a member is incomplete.
        on_retry_due: Called when `retry_pulls` has work at a new time.
    """

    def __init__(
        self,
        context: ClientContext,
        queries: Queries,
        retry_sender: RetrySender,
        new_instance: Callable[[], ClientInstance],
        on_heartbeat_due: Callable[[], None],
        on_rebalance_due: Callable[[], None],
        on_retry_due: Callable[[], None],
    ) -> None:
        self._context = context
        self._queries = queries
        self._offsets = BrokerOffsets(context)
        self._retry_sender = retry_sender
        self._new_instance = new_instance
        self._on_heartbeat_due = on_heartbeat_due
        self._on_rebalance_due = on_rebalance_due
        self._on_retry_due = on_retry_due
        self._lock = threading.Lock()
        self._instances = [context.instance]
        self._members: list[RemoteConsumer] = []
        self._files: dict[tuple[str, str], LocalFileOffsetStore] = {}

    def all(self) -> list[RemoteConsumer]:
        """Return the members."""
        return list(self._members)

    def instances(self) -> list[ClientInstance]:
        """Return the client instances; the first one always exists."""
        return list(self._instances)

    # --- membership ----------------------------------------------------------------------------

    def join(self, spec: ConsumerSpec) -> RemoteConsumer:
        """Create a member, and wait until brokers have registered it.

        Raises:
            ListenerError: The group has a member here with another subscription or message model, or a selector is
                invalid.
            BrokerError: The cluster refuses the member, or does not answer.
        """
        member = self._add(spec)
        try:
            member.join()
            if member.is_incomplete:
                self._on_rebalance_due()
        except BaseException:
            member.close()
            raise
        return member

    def _add(self, spec: ConsumerSpec) -> RemoteConsumer:
        wire_group = self._context.namespace.wrap(spec.group)
        with self._lock:
            for other in self._members:
                if other.spec.group == spec.group:
                    check_same_group(other.spec, spec)
            instance = next((each for each in self._instances if wire_group not in each.members), None)
            if instance is None:
                instance = self._new_instance()
                self._instances.append(instance)
            member = self._create(spec, replace(self._context, instance=instance))
            instance.members[wire_group] = member
            self._members.append(member)
            return member

    def _create(self, spec: ConsumerSpec, context: ClientContext) -> RemoteConsumer:
        settings, clock = context.settings, context.clock
        subscriptions, offsets, wake_event = self._subscriptions(spec), self._offset_store(spec), WakeEvent()
        requests = GroupRequests(context, spec.group)
        pulls = PullClient(context, spec.group, subscriptions, self._on_heartbeat_due)
        parts = MemberParts(
            context=context,
            subscriptions=subscriptions,
            offsets=offsets,
            locks=QueueLocks(requests.lock, requests.unlock, spec.group, clock, settings.lock_live_ms),
            pulls=PullLoop(
                pulls.pull,
                clock,
                settings.pull_threshold_messages,
                settings.pull_threshold_bytes,
                wake_event.set,
                self._on_retry_due,
            ),
            wake_event=wake_event,
            check_subscription=requests.check_subscription,
            list_members=requests.list_members,
            start_offset=partial(_start_offset, spec, offsets, self._queries, clock),
            send_back=partial(self._retry_sender.send_back, context.instance),
            on_close=self._leave,
        )
        return RemoteConsumer(spec, parts)

    def _subscriptions(self, spec: ConsumerSpec) -> dict[str, Subscription]:
        selectors: dict[str, Selector] = dict(spec.subscriptions)
        if spec.message_model is MessageModel.CLUSTERING:
            selectors[RETRY_TOPIC_PREFIX + spec.group] = TagSelector()
        version, wrap = self._context.clock.now_ms(), self._context.namespace.wrap
        return {
            topic: Subscription(selector, subscription_data(wrap(topic), selector, version))
            for topic, selector in selectors.items()
        }

    def _offset_store(self, spec: ConsumerSpec) -> OffsetStore:
        if spec.message_model is MessageModel.CLUSTERING:
            return RemoteBrokerOffsetStore(spec.group, self._offsets)
        key = (spec.instance_name, spec.group)
        if key not in self._files:
            settings = self._context.settings
            self._files[key] = LocalFileOffsetStore(
                local_offset_file(settings.offset_path, spec.instance_name, settings.name_servers, spec.group)
            )
        return self._files[key]

    def _leave(self, member: RemoteConsumer) -> None:
        """Unregister a member, so that the brokers have its group rebalanced."""
        instance, wire_group = member.instance, self._context.namespace.wrap(member.spec.group)
        with self._lock:
            self._members.remove(member)
            instance.members.pop(wire_group, None)
            is_idle = instance is not self._instances[0] and not instance.members
            if is_idle:
                self._instances.remove(instance)
        instance.unregister(self._context.routes.addresses(), consumer_group=wire_group)
        if is_idle:
            instance.close()

    def close(self) -> None:
        """Close every member."""
        for member in self.all():
            member.close()

    # --- committed offsets ---------------------------------------------------------------------

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """See `Broker.committed_offset`."""
        self._flush_offset(group, queue)
        return self._offsets.read(group, queue)

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """See `Broker.commit_offset`."""
        self._flush_offset(group, queue)
        wire_group = self._context.namespace.wrap(group)
        self._offsets.commit(group, queue, queue_offset, lambda: self._queries.create_group(wire_group, queue))

    def _flush_offset(self, group: str, queue: MessageQueue) -> None:
        for member in self.all():
            if member.spec.group == group and member.is_clustering:
                member.offsets.flush([queue])

    # --- periodic work -------------------------------------------------------------------------

    def heartbeat(self) -> bool:
        """Send heartbeats; replicas get those with consumers only. Return False if one failed."""
        masters, addresses = self._context.routes.masters(), self._context.routes.addresses()
        failed = [each for each in self.instances() if not each.heartbeat(addresses if each.members else masters)]
        return not failed

    def rebalance(self, *, all_members: bool) -> bool:
        """Rebalance all members, or those that need it; return False if some are incomplete afterwards."""
        for member in self.all():
            if all_members or member.needs_rebalance():
                member.rebalance()
        return not any(member.is_incomplete for member in self.all())

    def retry_pulls(self) -> int | None:
        """Repeat the failed pulls that are due; return the time of the next one."""
        due = [member.pulls.retry() for member in self.all()]
        return min((due_ms for due_ms in due if due_ms is not None), default=None)

    def flush_offsets(self) -> None:
        """Commit the changed offsets of all members."""
        self._for_each(lambda member: member.offsets.flush(), "remote.commit_failed")

    def renew_locks(self) -> None:
        """Renew the queue locks of all members."""
        self._for_each(RemoteConsumer.renew_locks, "remote.lock_renewal_failed")

    def _for_each(self, action: Callable[[RemoteConsumer], None], failure_event: str) -> None:
        for member in self.all():
            try:
                action(member)
            except MQTemplateError as exc:
                _log.warning(failure_event, group=member.spec.group, reason=str(exc))


def _start_offset(spec: ConsumerSpec, offsets: OffsetStore, queries: Queries, clock: Clock, queue: MessageQueue) -> int:
    """Return the committed offset of a queue; without one, the offset that the spec defines.

    Source: RocketMQ ``client: RebalancePushImpl``.
    """
    where = spec.consume_from_where
    at_end = where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    committed = offsets.read(queue, young_is_zero=at_end)
    if committed is not None:
        return committed
    if queue.topic == RETRY_TOPIC_PREFIX + spec.group or where is ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET:
        return queries.min_offset(queue)
    if at_end:
        return queries.max_offset(queue)
    since = spec.consume_timestamp
    return queries.search_offset(queue, clock.now_ms() - _HALF_AN_HOUR_MS if since is None else since)
