"""All group members of a remote broker: joining, leaving, and periodic work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from mqtemplate.broker import ConsumerSpec, MessageModel, QueueLock
from mqtemplate.brokers.remote.cluster.client import ClientContext, ClientInstance, GroupMember
from mqtemplate.brokers.remote.cluster.failures import log_failure
from mqtemplate.brokers.remote.cluster.queries import MemberSubscription, Queries, subscription_data
from mqtemplate.brokers.remote.consuming.consumer import RemoteConsumer
from mqtemplate.brokers.remote.consuming.group_requests import CallerLocks, GroupRequests, HeldQueueLocks, RetrySender
from mqtemplate.brokers.remote.consuming.offsets import (
    BrokerOffsets,
    LocalFileOffsetStore,
    OffsetStore,
    RemoteBrokerOffsetStore,
    StartOffsets,
    local_offset_file,
)
from mqtemplate.brokers.remote.consuming.pulls import PullClient, PullLoop
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.engine.group_rules import SentBack, check_same_group
from mqtemplate.errors import ListenerError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.services import PeriodicService, WakeEvent
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_log = get_logger("mqtemplate.remote")

_REPEAT_MS = 1_000
_NO_RETRY_MS = 3_600_000  # without failed pulls; a failure triggers the service


@dataclass(eq=False)
class Members:
    """The members of one client, and its instances.

    Brokers cannot tell two members of one group and one client id apart. So the second member of a group gets another
    instance; members of different groups share the first one, which also sends.

    Args:
        new_instance: Creates another client instance.
        on_heartbeat_due: Called when a broker has not registered a member.

    Attributes:
        rebalances, commits, lock_renewals, lock_changes, pull_retries: The services with the members' periodic work.
    """

    context: ClientContext
    queries: Queries
    producer: Producer
    new_instance: Callable[[], ClientInstance]
    on_heartbeat_due: Callable[[], None]

    def __post_init__(self) -> None:
        settings, clock = self.context.settings, self.context.clock
        self.rebalances = PeriodicService("remote.rebalance", self._rebalance, clock, settings.rebalance_interval_ms)
        self.commits = PeriodicService(
            "remote.offsets", self._flush_offsets, clock, settings.persist_consumer_offset_interval_ms
        )
        self.lock_renewals = PeriodicService("remote.locks", self._renew_locks, clock, settings.lock_interval_ms)
        self.lock_changes = PeriodicService("remote.lock_changes", self._change_locks, clock, _NO_RETRY_MS)
        self.pull_retries = PeriodicService("remote.pull", self._retry_pulls, clock, _NO_RETRY_MS)
        self._due_members: set[RemoteConsumer] = set()
        self._rebalanced_ms = clock.steady_ms()
        self._offsets = BrokerOffsets(self.context)
        self._lock = threading.Lock()
        self._instances = [self.context.instance]
        self._members: list[RemoteConsumer] = []
        self._pop_groups: set[str] = set()
        self._files: dict[tuple[str, str], LocalFileOffsetStore] = {}
        self._caller_locks: dict[str, CallerLocks] = {}

    def all(self) -> list[RemoteConsumer]:
        """Return the members."""
        return list(self._members)

    def instances(self) -> list[ClientInstance]:
        """Return the client instances; the first one always exists."""
        return list(self._instances)

    def send_back(self, sent_back: SentBack) -> None:
        """Send a message back as the client itself; its group need not have a member here."""
        RetrySender(self.context, self.producer).send_back(sent_back)

    # --- membership ----------------------------------------------------------------------------

    def subscribe(self, spec: ConsumerSpec) -> RemoteConsumer:
        """Create a member, and wait until brokers have registered it.

        Raises:
            ListenerError: The group has a member here with another subscription or message model, or a selector is
                invalid.
            BrokerError: The cluster refuses the member, or does not answer.
        """
        self.context.routes.unknown.expect(spec.subscriptions)
        member = self._add(spec)
        try:
            member.join()
            if member.is_incomplete:
                self.rebalances.trigger()
        except BaseException:
            member.close()
            raise
        return member

    def _add(self, spec: ConsumerSpec) -> RemoteConsumer:
        wire_group = self.context.namespace.wrap(spec.group)
        with self._lock:
            if spec.group in self._pop_groups:
                raise _two_request_modes(spec.group, "receives by POP")
            for other in self._members:
                if other.spec.group == spec.group:
                    check_same_group(other.spec, spec)
            instance = self._instance_without(wire_group)
            member = self._create(spec, replace(self.context, instance=instance))
            instance.members[wire_group] = member
            self._members.append(member)
            return member

    def attach(self, group: str, member: GroupMember) -> ClientInstance:
        """Have a member that receives by POP in the heartbeats of an instance, and return that instance.

        Raises:
            ListenerError: The group has a member here that pulls.
        """
        wire_group = self.context.namespace.wrap(group)
        with self._lock:
            if any(other.spec.group == group for other in self._members):
                raise _two_request_modes(group, "pulls")
            instance = self._instance_without(wire_group)
            instance.members[wire_group] = member
            self._pop_groups.add(group)
            return instance

    def detach(self, group: str, instance: ClientInstance) -> None:
        """Unregister the member that `attach` has registered."""
        with self._lock:
            self._pop_groups.discard(group)
        self._unregister(instance, self.context.namespace.wrap(group))

    def _instance_without(self, wire_group: str) -> ClientInstance:
        """Return an instance that has no member of a group. The caller has the lock."""
        instance = next((each for each in self._instances if wire_group not in each.members), None)
        if instance is None:
            instance = self.new_instance()
            self._instances.append(instance)
        return instance

    def _create(self, spec: ConsumerSpec, context: ClientContext) -> RemoteConsumer:
        settings, clock = context.settings, context.clock
        subscriptions, offsets, wake_event = self.subscriptions(spec), self._offset_store(spec), WakeEvent()
        requests = GroupRequests(context, spec.group)
        client = PullClient(context, spec.group, subscriptions, offsets.carried, self.on_heartbeat_due)
        limits = settings.pull_threshold_messages, settings.pull_threshold_bytes
        return RemoteConsumer(
            spec=spec,
            context=context,
            subscriptions=subscriptions,
            requests=requests,
            offsets=offsets,
            locks=HeldQueueLocks(requests, clock, settings.lock_live_ms),
            pulls=PullLoop(client.pull, clock, *limits, wake_event.set, self.pull_retries.trigger),
            wake_event=wake_event,
            retry_sender=RetrySender(context, self.producer),
            starts=StartOffsets(spec, offsets, context, self.queries),
            on_locks_due=self.lock_changes.trigger,
            on_close=self._leave,
        )

    def subscriptions(self, spec: ConsumerSpec) -> dict[str, MemberSubscription]:
        """Return the subscriptions of a member by topic; of a clustering one also that of its retry topic."""
        selectors: dict[str, Selector] = dict(spec.subscriptions)
        if spec.message_model is MessageModel.CLUSTERING:
            selectors[RETRY_TOPIC_PREFIX + spec.group] = TagSelector()
        version, wrap = self.context.clock.now_ms(), self.context.namespace.wrap
        return {
            topic: MemberSubscription(selector, subscription_data(wrap(topic), selector, version))
            for topic, selector in selectors.items()
        }

    def _offset_store(self, spec: ConsumerSpec) -> OffsetStore:
        if spec.message_model is MessageModel.CLUSTERING:
            return RemoteBrokerOffsetStore(spec.group, self._offsets)
        key = (spec.instance_name, spec.group)
        if key not in self._files:
            settings = self.context.settings
            self._files[key] = LocalFileOffsetStore(
                local_offset_file(settings.offset_folder, spec.instance_name, settings.name_servers, spec.group)
            )
        return self._files[key]

    def _leave(self, member: RemoteConsumer) -> None:
        """Unregister a member, so that the brokers have its group rebalanced."""
        with self._lock:
            self._members.remove(member)
        self._unregister(member.context.instance, member.requests.wire_group)

    def _unregister(self, instance: ClientInstance, wire_group: str) -> None:
        with self._lock:
            instance.members.pop(wire_group, None)
            is_idle = instance is not self._instances[0] and not instance.members
            if is_idle:
                self._instances.remove(instance)
        instance.unregister(self.context.routes.addresses(), consumer_group=wire_group)
        if is_idle:
            instance.close()

    def close(self) -> None:
        """Close every member."""
        for member in self.all():
            member.close()

    # --- committed offsets ---------------------------------------------------------------------

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """See `ConsumerGroups.committed_offset`."""
        self._flush_offset(group, queue)
        return self._offsets.read(group, queue)

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """See `ConsumerGroups.commit_offset`."""
        self._flush_offset(group, queue)
        wire_group = self.context.namespace.wrap(group)
        self._offsets.commit(group, queue, queue_offset, lambda: self.queries.create_group(wire_group, queue))

    def lock_queue(self, group: str, queue: MessageQueue) -> QueueLock | None:
        """See `ConsumerGroups.lock_queue`."""
        with self._lock:
            locks = self._caller_locks.get(group)
            if locks is None:
                settings, requests = self.context.settings, GroupRequests(self.context, group)
                held = HeldQueueLocks(requests, self.context.clock, settings.lock_live_ms)
                locks = self._caller_locks[group] = CallerLocks(held)
        return locks.lock(queue)

    def consumed_topics(self) -> None:
        """See `ConsumerGroups.consumed_topics`: brokers have the offsets."""

    def _flush_offset(self, group: str, queue: MessageQueue) -> None:
        for member in self.all():
            if member.spec.group == group and member.is_clustering:
                member.offsets.flush([queue])

    # --- periodic work -------------------------------------------------------------------------

    def heartbeat(self) -> bool:
        """Send heartbeats. Return False if one failed."""
        failed = [each for each in self.instances() if not each.heartbeat(self._addresses(each))]
        return not failed

    def register(self) -> None:
        """Send heartbeats to the brokers at which an instance is not registered; rebalance the members there."""
        for instance in self.instances():
            missing = [address for address in self._addresses(instance) if not instance.has_answer(address)]
            if not missing:
                continue
            instance.heartbeat(missing)
            if any(instance.has_answer(address) and not instance.is_registered(address) for address in missing):
                self.on_heartbeat_due()  # refused: that one is repeated with growing pauses
            if reached := {address for address in missing if instance.is_registered(address)}:
                self._rejoin({member for member in self.all() if member.context.instance is instance}, reached)

    def _rejoin(self, members: set[RemoteConsumer], addresses: set[str]) -> None:
        """Rebalance members at brokers that have registered them, and repeat their commits there.

        A broker that was killed may have lost the last commits, and a master does not get those that its replica got.
        """
        brokers = {
            name for name, by_id in self.context.routes.brokers().items() if addresses.intersection(by_id.values())
        }
        for member in members:
            member.offsets.repeat(brokers)
        self.commits.trigger()
        self._rebalance_members(members)

    def answered(self) -> frozenset[str]:
        """Return the addresses that have answered a heartbeat of each instance that sends heartbeats there."""
        due = [(each, address) for each in self.instances() for address in self._addresses(each)]
        failed = {address for each, address in due if not each.has_answer(address)}
        return frozenset(self.context.routes.addresses()) - failed

    def _addresses(self, instance: ClientInstance) -> list[str]:
        """Return the addresses for the heartbeats of an instance: replicas get those with consumers only."""
        if instance.members:
            return self.context.routes.addresses()
        return self.context.routes.masters() if instance.producer_groups else []

    def lose_locks(self, broker_name: str) -> None:
        """Count the locks at a broker as lost: it forgets them when it restarts, and ours when a connection ends."""
        for callers in list(self._caller_locks.values()):
            callers.locks.lose(broker_name)
        for member in self.all():
            if member.locks.lose(broker_name):
                member.wake()

    def rebalance_group(self, wire_group: str) -> None:
        """Have the members of a group rebalanced at once."""
        self._rebalance_members({member for member in self.all() if member.requests.wire_group == wire_group})

    def rebalance_topic(self, topic: str) -> None:
        """Have the members that subscribe to *topic* rebalanced at once."""
        self._rebalance_members({member for member in self.all() if topic in member.subscriptions})

    def _rebalance_members(self, concerned: set[RemoteConsumer]) -> None:
        if concerned:
            with self._lock:
                self._due_members |= concerned
            self.rebalances.trigger()

    def _rebalance(self) -> int | None:
        """Rebalance all members if that is due, or those that it is requested for or that need it."""
        now_ms = self.context.clock.steady_ms()
        interval_ms = self.context.settings.rebalance_interval_ms
        all_members = now_ms - self._rebalanced_ms >= interval_ms
        if all_members:
            self._rebalanced_ms = now_ms
        with self._lock:
            due, self._due_members = self._due_members, set()
        for member in self.all():
            if all_members or member in due or member.needs_rebalance():
                member.rebalance()
        return _REPEAT_MS if any(member.is_incomplete for member in self.all()) else None

    def _retry_pulls(self) -> int | None:
        """Repeat the failed pulls that are due."""
        retries = [member.pulls.retry() for member in self.all()]
        due_ms = min((each for each in retries if each is not None), default=None)
        return None if due_ms is None else max(0, due_ms - self.context.clock.steady_ms())

    def _flush_offsets(self) -> None:
        for member in self.all():
            try:
                member.flush_offsets()
            except MQTemplateError as exc:
                log_failure(_log, "remote.commit_failed", exc, group=member.spec.group)

    def _renew_locks(self) -> int | None:
        locks = [each.renew() for each in list(self._caller_locks.values())]
        is_complete = [*locks, *[member.renew_locks() for member in self.all()]]
        return None if all(is_complete) else _REPEAT_MS

    def _change_locks(self) -> int | None:
        is_complete = [member.change_locks() for member in self.all()]
        return None if all(is_complete) else _REPEAT_MS


def _two_request_modes(group: str, other: str) -> ListenerError:
    return ListenerError(
        f"group {group!r} has a member in this process that {other}; the members of a group have one request mode, "
        "since both would handle each message. Give the second listener a group of its own"
    )
