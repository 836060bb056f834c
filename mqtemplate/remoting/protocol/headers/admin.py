"""Headers about topics, name servers, brokers, users and their rights.

Source: RocketMQ ``remoting: protocol/header``; sections 6, 18, 19 and 21 of the specification.
"""

from __future__ import annotations

from mqtemplate.remoting.protocol.headers.fields import CommandHeader, Long, header
from mqtemplate.remoting.protocol.headers.message import TopicRequestHeader


@header
class GetRouteInfoRequestHeader(TopicRequestHeader):
    """Where a topic is.

    Attributes:
        accept_standard_json_only: As a version of 4.9.4 or newer says by itself.
    """

    topic: str
    accept_standard_json_only: bool | None = None


@header
class CreateTopicRequestHeader(TopicRequestHeader):
    """Make a topic, or change it.

    Attributes:
        topic_filter_type: ``SINGLE_TAG`` or ``MULTI_TAG``.
        attributes: ``+name=value`` and ``-name``, separated by commas.
    """

    topic: str
    default_topic: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_filter_type: str
    topic_sys_flag: int | None = None
    order: bool
    attributes: str | None = None
    force: bool | None = None


@header
class DeleteTopicRequestHeader(TopicRequestHeader):
    topic: str


@header
class DeleteTopicFromNamesrvRequestHeader(TopicRequestHeader):
    topic: str
    cluster_name: str | None = None


@header
class GetTopicConfigRequestHeader(TopicRequestHeader):
    topic: str


@header
class GetTopicStatsInfoRequestHeader(TopicRequestHeader):
    topic: str


@header
class QueryTopicConsumeByWhoRequestHeader(TopicRequestHeader):
    topic: str


@header
class GetTopicsByClusterRequestHeader(CommandHeader):
    cluster: str


@header
class GetAllTopicConfigRequestHeader(CommandHeader):
    """All topics, from the ``topic_seq``-th on; 4.9 sends no fields at all."""

    topic_seq: int = 0
    data_version: str | None = None
    max_topic_num: int | None = None


@header
class GetAllTopicConfigResponseHeader(CommandHeader):
    total_topic_num: int | None = None


@header
class GetBrokerConfigResponseHeader(CommandHeader):
    """The version is the JSON of a `bodies.DataVersion`; the settings themselves are the body."""

    version: str


@header
class QueryConsumeQueueRequestHeader(TopicRequestHeader):
    """Some units of a consume queue, from ``index`` on."""

    topic: str | None = None
    queue_id: int = 0
    index: Long = 0
    count: int = 0
    consumer_group: str | None = None


@header
class ViewBrokerStatsDataRequestHeader(CommandHeader):
    stats_name: str
    stats_key: str


# --- name server ------------------------------------------------------------------------------------


@header
class PutKVConfigRequestHeader(CommandHeader):
    namespace: str
    key: str
    value: str


@header
class KVConfigKeyRequestHeader(CommandHeader):
    """Read or delete one entry."""

    namespace: str
    key: str


@header
class GetKVConfigResponseHeader(CommandHeader):
    value: str | None = None


@header
class KVNamespaceRequestHeader(CommandHeader):
    namespace: str


@header
class BrokerNameRequestHeader(CommandHeader):
    """Take the right to write from a broker, or give it back."""

    broker_name: str


@header
class WipeWritePermOfBrokerResponseHeader(CommandHeader):
    wipe_topic_count: int


@header
class AddWritePermOfBrokerResponseHeader(CommandHeader):
    add_topic_count: int


@header
class RegisterBrokerRequestHeader(CommandHeader):
    """A broker tells a name server of itself, every 30 s.

    Attributes:
        broker_id: 0 is a master.
        body_crc32: CRC-32 of the body, top bit cleared; 0 for none.
    """

    broker_name: str
    broker_addr: str
    cluster_name: str
    ha_server_addr: str
    broker_id: Long
    heartbeat_timeout_millis: Long | None = None
    enable_acting_master: bool | None = None
    compressed: bool = False
    body_crc32: int = 0


@header
class RegisterBrokerResponseHeader(CommandHeader):
    ha_server_addr: str | None = None
    master_addr: str | None = None


@header
class UnRegisterBrokerRequestHeader(CommandHeader):
    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Long


@header
class QueryDataVersionRequestHeader(CommandHeader):
    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Long


@header
class QueryDataVersionResponseHeader(CommandHeader):
    changed: bool


# --- users and rights, ACL 2.0 ----------------------------------------------------------------------


@header
class UserRequestHeader(CommandHeader):
    """Make, change, show or delete a user."""

    username: str | None = None


@header
class ListUsersRequestHeader(CommandHeader):
    filter: str | None = None


@header
class AclRequestHeader(CommandHeader):
    """Make, change or show what a subject (``User:name``) may do."""

    subject: str | None = None


@header
class DeleteAclRequestHeader(CommandHeader):
    subject: str | None = None
    policy_type: str | None = None
    resource: str | None = None


@header
class ListAclsRequestHeader(CommandHeader):
    subject_filter: str | None = None
    resource_filter: str | None = None
