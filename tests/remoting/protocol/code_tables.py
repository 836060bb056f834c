"""Header and body of each request code, for tests that cover all of them.

A code that is in no table has no header fields or no JSON body of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import TypeVar

from mqtemplate.remoting.protocol.bodies import group as group_bodies
from mqtemplate.remoting.protocol.bodies import own_requests
from mqtemplate.remoting.protocol.bodies import route as route_bodies
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.headers import admin as admin_headers
from mqtemplate.remoting.protocol.headers import group as group_headers
from mqtemplate.remoting.protocol.headers import message as message_headers
from mqtemplate.remoting.protocol.headers.fields import CommandHeader, camel_case, declared_fields
from tests.remoting.protocol.other_side import ConsumeMessageDirectlyResult

_T = TypeVar("_T")


def _declared_in(base: type[_T], *modules: ModuleType) -> Mapping[str, type[_T]]:
    """Return the subclasses of *base* that *modules* declare, by name."""
    classes = {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind.__module__ == module.__name__
    }
    return MappingProxyType(classes)


HEADERS: Mapping[str, type[CommandHeader]] = _declared_in(CommandHeader, admin_headers, group_headers, message_headers)
"""Name -> header, for all headers that RocketMQ has as well."""
BODIES: Mapping[str, type[JsonBody]] = _declared_in(JsonBody, group_bodies, route_bodies)
"""Name -> body, for all JSON bodies that RocketMQ has as well."""
_ROCKETMQ_NAMES = {
    "ClientConnection": "Connection",
    "ConsumeStatistics": "ConsumeStatus",
    "DataVersionBody": "DataVersion",
}


def rocketmq_name(kind: type[JsonBody]) -> str:
    """Return RocketMQ's name of a body's class; here a class name is used once in the whole library."""
    return _ROCKETMQ_NAMES.get(kind.__name__, kind.__name__)


REQUEST_HEADERS: Mapping[int, type[CommandHeader]] = MappingProxyType(
    {
        RequestCode.SEND_MESSAGE: message_headers.SendMessageRequestHeader,
        RequestCode.PULL_MESSAGE: message_headers.PullMessageRequestHeader,
        RequestCode.QUERY_MESSAGE: message_headers.QueryMessageRequestHeader,
        RequestCode.QUERY_CONSUMER_OFFSET: group_headers.QueryConsumerOffsetRequestHeader,
        RequestCode.UPDATE_CONSUMER_OFFSET: group_headers.UpdateConsumerOffsetRequestHeader,
        RequestCode.UPDATE_AND_CREATE_TOPIC: admin_headers.CreateTopicRequestHeader,
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: message_headers.RpcRequestHeader,
        RequestCode.GET_ALL_TOPIC_CONFIG: admin_headers.GetAllTopicConfigRequestHeader,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: group_headers.SearchOffsetRequestHeader,
        RequestCode.GET_MAX_OFFSET: group_headers.GetMaxOffsetRequestHeader,
        RequestCode.GET_MIN_OFFSET: group_headers.TopicQueueRequestHeader,
        RequestCode.GET_EARLIEST_MSG_STORETIME: group_headers.TopicQueueRequestHeader,
        RequestCode.VIEW_MESSAGE_BY_ID: message_headers.ViewMessageRequestHeader,
        RequestCode.HEART_BEAT: own_requests.HeartbeatRequestHeader,
        RequestCode.UNREGISTER_CLIENT: group_headers.UnregisterClientRequestHeader,
        RequestCode.CONSUMER_SEND_MSG_BACK: message_headers.ConsumerSendMsgBackRequestHeader,
        RequestCode.END_TRANSACTION: message_headers.EndTransactionRequestHeader,
        RequestCode.GET_CONSUMER_LIST_BY_GROUP: group_headers.ConsumerGroupRequestHeader,
        RequestCode.CHECK_TRANSACTION_STATE: message_headers.CheckTransactionStateRequestHeader,
        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: group_headers.ConsumerGroupRequestHeader,
        RequestCode.LOCK_BATCH_MQ: message_headers.RpcRequestHeader,
        RequestCode.UNLOCK_BATCH_MQ: message_headers.RpcRequestHeader,
        RequestCode.PUT_KV_CONFIG: admin_headers.PutKVConfigRequestHeader,
        RequestCode.GET_KV_CONFIG: admin_headers.KVConfigKeyRequestHeader,
        RequestCode.DELETE_KV_CONFIG: admin_headers.KVConfigKeyRequestHeader,
        RequestCode.REGISTER_BROKER: admin_headers.RegisterBrokerRequestHeader,
        RequestCode.UNREGISTER_BROKER: admin_headers.BrokerRequestHeader,
        RequestCode.GET_ROUTEINFO_BY_TOPIC: admin_headers.GetRouteInfoRequestHeader,
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: group_headers.GetAllSubscriptionGroupRequestHeader,
        RequestCode.GET_TOPIC_STATS_INFO: admin_headers.TopicNameRequestHeader,
        RequestCode.GET_CONSUMER_CONNECTION_LIST: group_headers.ConsumerGroupRequestHeader,
        RequestCode.GET_PRODUCER_CONNECTION_LIST: group_headers.ProducerGroupRequestHeader,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER: admin_headers.BrokerNameRequestHeader,
        RequestCode.DELETE_SUBSCRIPTIONGROUP: group_headers.DeleteSubscriptionGroupRequestHeader,
        RequestCode.GET_CONSUME_STATS: group_headers.GetConsumeStatsRequestHeader,
        RequestCode.DELETE_TOPIC_IN_BROKER: admin_headers.TopicNameRequestHeader,
        RequestCode.DELETE_TOPIC_IN_NAMESRV: admin_headers.DeleteTopicFromNamesrvRequestHeader,
        RequestCode.GET_KVLIST_BY_NAMESPACE: admin_headers.KVNamespaceRequestHeader,
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET: group_headers.ResetOffsetRequestHeader,
        RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: group_headers.GetConsumerStatusRequestHeader,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: group_headers.ResetOffsetRequestHeader,
        RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: group_headers.GetConsumerStatusRequestHeader,
        RequestCode.GET_TOPICS_BY_CLUSTER: admin_headers.GetTopicsByClusterRequestHeader,
        RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: admin_headers.TopicNameRequestHeader,
        RequestCode.QUERY_CONSUME_TIME_SPAN: group_headers.QueryConsumeTimeSpanRequestHeader,
        RequestCode.GET_CONSUMER_RUNNING_INFO: group_headers.GetConsumerRunningInfoRequestHeader,
        RequestCode.QUERY_CORRECTION_OFFSET: group_headers.QueryCorrectionOffsetHeader,
        RequestCode.CONSUME_MESSAGE_DIRECTLY: message_headers.ConsumeMessageDirectlyResultRequestHeader,
        RequestCode.SEND_MESSAGE_V2: message_headers.SendMessageRequestHeaderV2,
        RequestCode.CLONE_GROUP_OFFSET: group_headers.CloneGroupOffsetRequestHeader,
        RequestCode.VIEW_BROKER_STATS_DATA: admin_headers.ViewBrokerStatsDataRequestHeader,
        RequestCode.GET_BROKER_CONSUME_STATS: group_headers.GetConsumeStatsInBrokerHeader,
        RequestCode.SEND_BATCH_MESSAGE: message_headers.SendMessageRequestHeaderV2,
        RequestCode.QUERY_CONSUME_QUEUE: admin_headers.QueryConsumeQueueRequestHeader,
        RequestCode.QUERY_DATA_VERSION: admin_headers.BrokerRequestHeader,
        RequestCode.SEND_REPLY_MESSAGE: message_headers.SendMessageRequestHeader,
        RequestCode.SEND_REPLY_MESSAGE_V2: message_headers.SendMessageRequestHeaderV2,
        RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: message_headers.ReplyMessageRequestHeader,
        RequestCode.ADD_WRITE_PERM_OF_BROKER: admin_headers.BrokerNameRequestHeader,
        RequestCode.QUERY_TOPICS_BY_CONSUMER: group_headers.GroupRequestHeader,
        RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: group_headers.QuerySubscriptionByConsumerRequestHeader,
        RequestCode.GET_TOPIC_CONFIG: admin_headers.TopicNameRequestHeader,
        RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: group_headers.GroupRequestHeader,
        RequestCode.LITE_PULL_MESSAGE: message_headers.PullMessageRequestHeader,
        RequestCode.RECALL_MESSAGE: message_headers.RecallMessageRequestHeader,
        RequestCode.CANCEL_DELAYED_MESSAGE: own_requests.CancelDelayedMessageRequestHeader,
        RequestCode.RESCHEDULE_DELAYED_MESSAGE: own_requests.RescheduleDelayedMessageRequestHeader,
        RequestCode.GET_PENDING_MESSAGES: own_requests.GetPendingMessagesRequestHeader,
        RequestCode.COUNT_PENDING_MESSAGES: own_requests.CountPendingMessagesRequestHeader,
        RequestCode.SEND_SEQUENCED_MESSAGES: own_requests.SendSequencedRequestHeader,
        RequestCode.GET_RECORD_BLOCK: own_requests.GetRecordBlockRequestHeader,
        RequestCode.GET_PENDING_POSITIONS: own_requests.GetPendingPositionsRequestHeader,
    }
)
"""Request code -> header of the request."""
RESPONSE_HEADERS: Mapping[int, type[CommandHeader]] = MappingProxyType(
    {
        RequestCode.SEND_MESSAGE: message_headers.SendMessageResponseHeader,
        RequestCode.PULL_MESSAGE: message_headers.PullMessageResponseHeader,
        RequestCode.QUERY_MESSAGE: message_headers.QueryMessageResponseHeader,
        RequestCode.QUERY_CONSUMER_OFFSET: group_headers.OffsetResponseHeader,
        RequestCode.GET_ALL_TOPIC_CONFIG: admin_headers.GetAllTopicConfigResponseHeader,
        RequestCode.GET_BROKER_CONFIG: admin_headers.GetBrokerConfigResponseHeader,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: group_headers.OffsetResponseHeader,
        RequestCode.GET_MAX_OFFSET: group_headers.OffsetResponseHeader,
        RequestCode.GET_MIN_OFFSET: group_headers.OffsetResponseHeader,
        RequestCode.GET_EARLIEST_MSG_STORETIME: group_headers.GetEarliestMsgStoretimeResponseHeader,
        RequestCode.HEART_BEAT: own_requests.HeartbeatResponseHeader,
        RequestCode.GET_KV_CONFIG: admin_headers.GetKVConfigResponseHeader,
        RequestCode.REGISTER_BROKER: admin_headers.RegisterBrokerResponseHeader,
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: group_headers.GetAllSubscriptionGroupResponseHeader,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER: admin_headers.WipeWritePermOfBrokerResponseHeader,
        RequestCode.SEND_MESSAGE_V2: message_headers.SendMessageResponseHeader,
        RequestCode.SEND_BATCH_MESSAGE: message_headers.SendMessageResponseHeader,
        RequestCode.QUERY_DATA_VERSION: admin_headers.QueryDataVersionResponseHeader,
        RequestCode.SEND_REPLY_MESSAGE: message_headers.SendMessageResponseHeader,
        RequestCode.SEND_REPLY_MESSAGE_V2: message_headers.SendMessageResponseHeader,
        RequestCode.ADD_WRITE_PERM_OF_BROKER: admin_headers.AddWritePermOfBrokerResponseHeader,
        RequestCode.LITE_PULL_MESSAGE: message_headers.PullMessageResponseHeader,
        RequestCode.RECALL_MESSAGE: message_headers.RecallMessageResponseHeader,
    }
)
"""Request code -> header of its response, if the response has one."""
REQUEST_BODIES: Mapping[int, type[JsonBody]] = MappingProxyType(
    {
        RequestCode.HEART_BEAT: group_bodies.HeartbeatData,
        RequestCode.CHECK_CLIENT_CONFIG: group_bodies.CheckClientRequestBody,
        RequestCode.LOCK_BATCH_MQ: group_bodies.LockBatchRequestBody,
        RequestCode.UNLOCK_BATCH_MQ: group_bodies.LockBatchRequestBody,
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: route_bodies.CreateTopicListRequestBody,
        RequestCode.REGISTER_BROKER: route_bodies.RegisterBrokerBody,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: group_bodies.SubscriptionGroupConfig,
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET: group_bodies.ResetOffsetBody,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: group_bodies.SubscriptionGroupList,
        RequestCode.QUERY_DATA_VERSION: route_bodies.DataVersionBody,
    }
)
"""Request code -> body of the request."""
RESPONSE_BODIES: Mapping[int, type[JsonBody]] = MappingProxyType(
    {
        RequestCode.GET_ROUTEINFO_BY_TOPIC: route_bodies.TopicRouteData,
        RequestCode.GET_CONSUMER_LIST_BY_GROUP: group_bodies.GetConsumerListByGroupResponseBody,
        RequestCode.LOCK_BATCH_MQ: group_bodies.LockBatchResponseBody,
        RequestCode.GET_ALL_TOPIC_CONFIG: route_bodies.TopicConfigSerializeWrapper,
        RequestCode.GET_BROKER_RUNTIME_INFO: route_bodies.KVTable,
        RequestCode.GET_ALL_CONSUMER_OFFSET: group_bodies.ConsumerOffsetSerializeWrapper,
        RequestCode.REGISTER_BROKER: route_bodies.KVTable,
        RequestCode.GET_BROKER_CLUSTER_INFO: route_bodies.ClusterInfo,
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: group_bodies.SubscriptionGroupWrapper,
        RequestCode.GET_TOPIC_STATS_INFO: route_bodies.TopicStatsTable,
        RequestCode.GET_CONSUMER_CONNECTION_LIST: group_bodies.ConsumerConnection,
        RequestCode.GET_PRODUCER_CONNECTION_LIST: group_bodies.ProducerConnection,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: route_bodies.TopicList,
        RequestCode.GET_CONSUME_STATS: group_bodies.ConsumeStats,
        RequestCode.GET_KVLIST_BY_NAMESPACE: route_bodies.KVTable,
        RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: group_bodies.GetConsumerStatusBody,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: group_bodies.ResetOffsetBody,
        RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: group_bodies.GetConsumerStatusBody,
        RequestCode.GET_TOPICS_BY_CLUSTER: route_bodies.TopicList,
        RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: group_bodies.GroupList,
        RequestCode.QUERY_CONSUME_TIME_SPAN: group_bodies.QueryConsumeTimeSpanBody,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: route_bodies.TopicList,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: route_bodies.TopicList,
        RequestCode.GET_CONSUMER_RUNNING_INFO: group_bodies.ConsumerRunningInfo,
        RequestCode.QUERY_CORRECTION_OFFSET: group_bodies.QueryCorrectionOffsetBody,
        RequestCode.CONSUME_MESSAGE_DIRECTLY: ConsumeMessageDirectlyResult,
        RequestCode.VIEW_BROKER_STATS_DATA: route_bodies.BrokerStatsData,
        RequestCode.GET_BROKER_CONSUME_STATS: group_bodies.ConsumeStatsList,
        RequestCode.QUERY_CONSUME_QUEUE: route_bodies.QueryConsumeQueueResponseBody,
        RequestCode.QUERY_DATA_VERSION: route_bodies.DataVersionBody,
        RequestCode.GET_ALL_PRODUCER_INFO: group_bodies.ProducerTableInfo,
        RequestCode.QUERY_TOPICS_BY_CONSUMER: route_bodies.TopicList,
        RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: group_bodies.QuerySubscriptionResponseBody,
        RequestCode.GET_TOPIC_CONFIG: route_bodies.TopicConfig,
        RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: group_bodies.SubscriptionGroupConfig,
        RequestCode.CANCEL_DELAYED_MESSAGE: own_requests.ScheduleChangeData,
        RequestCode.RESCHEDULE_DELAYED_MESSAGE: own_requests.ScheduleChangeData,
        RequestCode.GET_PENDING_MESSAGES: own_requests.PendingMessagesData,
        RequestCode.COUNT_PENDING_MESSAGES: own_requests.PendingCountsData,
    }
)
"""Request code -> body of its response."""


def wire_names(code: int) -> list[str]:
    """Return the names of the header fields of a request code."""
    header = REQUEST_HEADERS.get(code)
    if header is None:
        return []
    fields = [field for field, _, _ in declared_fields(header)]
    return [header.wire_names.get(f.name) or f.metadata.get("name") or camel_case(f.name) for f in fields]
