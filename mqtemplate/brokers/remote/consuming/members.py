"""All members that a remote broker has, their client ids, and what is done for them again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from mqtemplate.broker import ConsumerSpec, MessageModel
from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.consuming.consumer import MemberParts, RemoteConsumer
from mqtemplate.brokers.remote.consuming.offsets import FileOffsets, GroupOffsets, MemberOffsets, broadcast_file
from mqtemplate.brokers.same_group import check_same_group
from mqtemplate.errors import MQTemplateError

_log = structlog.stdlib.get_logger("mqtemplate.remote")


class Members:
    """The members of one broker object, by client id: brokers cannot tell two of one group and one id apart.

    Args:
        first: The instance that sends; it takes members too.
        new_instance: Makes another one.
    """

    def __init__(self, first: ClientInstance, new_instance: Callable[[], ClientInstance]) -> None:
        self._new_instance = new_instance
        self._lock = threading.Lock()
        self._instances = [first]
        self._members: list[RemoteConsumer] = []
        self._files: dict[tuple[str, str], FileOffsets] = {}

    def all(self) -> list[RemoteConsumer]:
        return list(self._members)

    def instances(self) -> list[ClientInstance]:
        return list(self._instances)

    # --- coming and going ----------------------------------------------------------------------

    def join(self, spec: ConsumerSpec, parts: MemberParts) -> RemoteConsumer:
        """Take a member in.

        Raises:
            ListenerError: The group has a member here that wants something else.
            BrokerError: The cluster does not let it in, or does not answer.
        """
        member = self._add(spec, parts)
        try:
            for topic in spec.subscriptions:
                parts.routes.existing(topic)
            member.check_selectors()
            member.instance.heartbeat(parts.routes.addresses())
            member.has_joined = True
            member.rebalance()
            if member.is_incomplete:
                parts.need_rebalance()
        except BaseException:
            member.close()
            raise
        return member

    def _add(self, spec: ConsumerSpec, parts: MemberParts) -> RemoteConsumer:
        wire_group = parts.namespace.wrap(spec.group)
        with self._lock:
            for other in self._members:
                if other.spec.group == spec.group:
                    check_same_group(other.spec, spec)
            instance = next((each for each in self._instances if wire_group not in each.members), None)
            if instance is None:
                instance = self._new_instance()
                self._instances.append(instance)
            member = RemoteConsumer(spec, instance, self._offsets_of(spec, parts), parts)
            instance.members[wire_group] = member
            self._members.append(member)
            return member

    def _offsets_of(self, spec: ConsumerSpec, parts: MemberParts) -> MemberOffsets:
        if spec.message_model is MessageModel.CLUSTERING:
            return GroupOffsets(spec.group, parts.brokers_offsets)
        key = (spec.instance_name, spec.group)
        if key not in self._files:
            settings = parts.settings
            self._files[key] = FileOffsets(
                broadcast_file(settings.offset_path, spec.instance_name, settings.name_servers, spec.group)
            )
        return self._files[key]

    def left(self, member: RemoteConsumer, parts: MemberParts) -> None:
        """Tell the brokers that a member is gone, so that the others get its queues."""
        instance, wire_group = member.instance, parts.namespace.wrap(member.spec.group)
        with self._lock:
            self._members.remove(member)
            instance.members.pop(wire_group, None)
            is_idle = instance is not self._instances[0] and not instance.members
            if is_idle:
                self._instances.remove(instance)
        instance.unregister(parts.routes.addresses(), consumer_group=wire_group)
        if is_idle:
            instance.close()

    def close(self) -> None:
        """Close every member."""
        for member in self.all():
            member.close()

    # --- again and again -----------------------------------------------------------------------

    def heartbeat(self, masters: list[str], addresses: list[str]) -> bool:
        """Tell brokers who is here; replicas hear of consumers only."""
        deaf = [each for each in self.instances() if not each.heartbeat(addresses if each.members else masters)]
        return not deaf

    def rebalance(self, *, all_of_them: bool) -> bool:
        """Share queues out anew: of all members, or of those that lack something; False if some still do."""
        chosen = [member for member in self.all() if member.has_joined and (all_of_them or member.lacks())]
        for member in chosen:
            member.rebalance()
        return not any(member.is_incomplete for member in self.all())

    def flush_offsets(self) -> None:
        for member in self.all():
            try:
                member.offsets.flush()
            except MQTemplateError as exc:
                _log.warning("remote.commit_failed", group=member.spec.group, reason=str(exc))

    def renew_locks(self) -> None:
        for member in self.all():
            try:
                member.renew_locks()
            except MQTemplateError as exc:
                _log.warning("remote.lock_not_renewed", group=member.spec.group, reason=str(exc))


class PullRetries:
    """The pulls of all members that are to be tried again, as one `Service`."""

    name = "remote.pull"

    def __init__(self, members: Members) -> None:
        self._members = members
        self._wake: Callable[[], None] = lambda: None

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def step(self) -> int | None:
        due = []
        for member in self._members.all():
            member.pulls.on_wake(self._wake)
            due.append(member.pulls.step())
        return min((each for each in due if each is not None), default=None)

    def wake(self) -> None:
        self._wake()
