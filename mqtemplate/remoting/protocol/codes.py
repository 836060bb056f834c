"""Numbers of the protocol: request and response codes, languages, versions, flag bits, and the largest frame.

A peer may use codes that have no name here: a number that arrives stays a plain ``int``. An `IntEnum` member equals its
number, so both may be compared. Codes that this library neither serves nor sends are listed too: their names appear in
log lines, error texts and the remarks of refused requests.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Self

MAX_FRAME_BYTES = 16_777_216
"""Size of the largest frame that RocketMQ accepts, including the four bytes of its length."""

FLAG_RESPONSE = 1
"""Bit of a command's flag: set on a response, clear on a request."""
FLAG_ONE_WAY = 2
"""Bit of a request's flag: the receiver must not answer, not even with an error."""


class _Code(IntEnum):
    @classmethod
    def of(cls, number: int) -> Self | int:
        """Return the member with that number, or the number itself if it has no name here."""
        try:
            return cls(number)
        except ValueError:
            return number

    @classmethod
    def text(cls, number: int) -> str:
        """Return the number and its name for a reader, or only the number if it has no name here."""
        code = cls.of(number)
        return f"{number} {code.name}" if isinstance(code, cls) else str(number)


class SerializeType(IntEnum):
    """Encoding of a frame's header. Each frame names its own."""

    JSON = 0
    ROCKETMQ = 1


class LanguageCode(IntEnum):
    """Language of the sender. A JSON header carries the name, a binary header the number."""

    JAVA = 0
    CPP = 1
    DOTNET = 2
    PYTHON = 3
    DELPHI = 4
    ERLANG = 5
    RUBY = 6
    OTHER = 7
    HTTP = 8
    GO = 9
    PHP = 10
    OMS = 11
    RUST = 12
    NODE_JS = 13


class Version(IntEnum):
    """Releases of RocketMQ by their number on the wire: those that a rule below depends on, and common ones.

    Source: ``common: MQVersion``, where the number is the position in the list.
    """

    V3_0_11 = 37
    """First broker version that registers with the wrapper object."""
    V3_1_8_SNAPSHOT = 62
    """First consumer that answers `RequestCode.GET_CONSUMER_RUNNING_INFO` and `CONSUME_MESSAGE_DIRECTLY`."""
    V3_4_9 = 121
    """First client whose ``maxReconsumeTimes`` the broker honours."""
    V4_1_0_SNAPSHOT = 232
    """A consumer refuses SQL92 if the broker's heartbeat response has a lower version."""
    V4_9_3 = 399
    """Last version whose clients do not sign ``_UNIQUE_KEY_QUERY``."""
    V4_9_4 = 401
    """First version that reads routes in standard JSON."""
    V4_9_7 = 407
    V4_9_8 = 409
    V5_0_0 = 413
    V5_3_1 = 475
    """Last version that does not understand `ResponseCode.GO_AWAY`."""
    V5_3_3 = 479
    V5_5_0 = 513


CURRENT_VERSION = Version.V5_3_3
"""Version that our commands carry."""


class RequestCode(_Code):
    """Operation of a request. Source: ``remoting: RequestCode``; 50-53 are from 4.9.x.

    Codes from 500,001 to 500,099 are our own: RocketMQ's highest code is 200,151. A client sends them only to a server
    that announced the capability; see `bodies.own_requests.HeartbeatResponseHeader`.
    """

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    UPDATE_AND_CREATE_TOPIC_LIST = 18
    GET_ALL_TOPIC_CONFIG = 21
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    CHECK_CLIENT_CONFIG = 46
    UPDATE_AND_CREATE_ACL_CONFIG = 50
    DELETE_ACL_CONFIG = 51
    GET_BROKER_CLUSTER_ACL_INFO = 52
    UPDATE_GLOBAL_WHITE_ADDRS_CONFIG = 53
    PUT_KV_CONFIG = 100
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    REGISTER_BROKER = 103
    UNREGISTER_BROKER = 104
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    WIPE_WRITE_PERM_OF_BROKER = 205
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    GET_KVLIST_BY_NAMESPACE = 219
    RESET_CONSUMER_CLIENT_OFFSET = 220
    GET_CONSUMER_STATUS_FROM_CLIENT = 221
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223
    GET_TOPICS_BY_CLUSTER = 224
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST = 225
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    QUERY_CONSUME_TIME_SPAN = 303
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    CLEAN_EXPIRED_CONSUMEQUEUE = 306
    GET_CONSUMER_RUNNING_INFO = 307
    QUERY_CORRECTION_OFFSET = 308
    CONSUME_MESSAGE_DIRECTLY = 309
    SEND_MESSAGE_V2 = 310
    GET_UNIT_TOPIC_LIST = 311
    GET_HAS_UNIT_SUB_TOPIC_LIST = 312
    GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST = 313
    CLONE_GROUP_OFFSET = 314
    VIEW_BROKER_STATS_DATA = 315
    CLEAN_UNUSED_TOPIC = 316
    GET_BROKER_CONSUME_STATS = 317
    UPDATE_NAMESRV_CONFIG = 318
    GET_NAMESRV_CONFIG = 319
    SEND_BATCH_MESSAGE = 320
    QUERY_CONSUME_QUEUE = 321
    QUERY_DATA_VERSION = 322
    RESUME_CHECK_HALF_MESSAGE = 323
    SEND_REPLY_MESSAGE = 324
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    ADD_WRITE_PERM_OF_BROKER = 327
    GET_ALL_PRODUCER_INFO = 328
    DELETE_EXPIRED_COMMITLOG = 329
    QUERY_TOPICS_BY_CONSUMER = 343
    QUERY_SUBSCRIPTION_BY_CONSUMER = 345
    GET_TOPIC_CONFIG = 351
    GET_SUBSCRIPTIONGROUP_CONFIG = 352
    UPDATE_AND_GET_GROUP_FORBIDDEN = 353
    CHECK_ROCKSDB_CQ_WRITE_PROGRESS = 354
    EXPORT_ROCKSDB_CONFIG_TO_JSON = 355
    LITE_PULL_MESSAGE = 361
    RECALL_MESSAGE = 370
    QUERY_ASSIGNMENT = 400
    SET_MESSAGE_REQUEST_MODE = 401
    UPDATE_AND_CREATE_STATIC_TOPIC = 513
    ADD_BROKER = 902
    REMOVE_BROKER = 903
    BROKER_HEARTBEAT = 904
    GET_BROKER_HA_STATUS = 907
    RESET_MASTER_FLUSH_OFFSET = 908
    CONTROLLER_ELECT_MASTER = 1002
    CONTROLLER_GET_METADATA_INFO = 1005
    CONTROLLER_GET_SYNC_STATE_DATA = 1006
    GET_BROKER_EPOCH_CACHE = 1007
    UPDATE_CONTROLLER_CONFIG = 1009
    GET_CONTROLLER_CONFIG = 1010
    CLEAN_BROKER_DATA = 1011
    UPDATE_COLD_DATA_FLOW_CTR_CONFIG = 2001
    REMOVE_COLD_DATA_FLOW_CTR_CONFIG = 2002
    GET_COLD_DATA_FLOW_CTR_INFO = 2003
    SET_COMMITLOG_READ_MODE = 2004
    AUTH_CREATE_USER = 3001
    AUTH_UPDATE_USER = 3002
    AUTH_DELETE_USER = 3003
    AUTH_GET_USER = 3004
    AUTH_LIST_USER = 3005
    AUTH_CREATE_ACL = 3006
    AUTH_UPDATE_ACL = 3007
    AUTH_DELETE_ACL = 3008
    AUTH_GET_ACL = 3009
    AUTH_LIST_ACL = 3010
    SWITCH_TIMER_ENGINE = 5001
    POP_MESSAGE = 200050
    ACK_MESSAGE = 200051
    PEEK_MESSAGE = 200052
    CHANGE_MESSAGE_INVISIBLETIME = 200053
    NOTIFICATION = 200054
    POLLING_INFO = 200055
    POP_ROLLBACK = 200056
    GET_BROKER_LITE_INFO = 200074
    GET_PARENT_TOPIC_INFO = 200075
    GET_LITE_TOPIC_INFO = 200076
    GET_LITE_CLIENT_INFO = 200077
    GET_LITE_GROUP_INFO = 200078
    TRIGGER_LITE_DISPATCH = 200079
    BATCH_ACK_MESSAGE = 200151
    CANCEL_DELAYED_MESSAGE = 500_001
    RESCHEDULE_DELAYED_MESSAGE = 500_002
    GET_PENDING_MESSAGES = 500_003
    COUNT_PENDING_MESSAGES = 500_004
    GET_GROUP_DELIVERIES = 500_005
    CHANGE_AND_SEND = 500_006
    SEND_SEQUENCED_MESSAGES = 500_010
    GET_PENDING_POSITIONS = 500_011
    GET_RECORD_BLOCK = 500_020
    RELOAD_CONFIG = 500_030
    GET_HAND_OVER = 500_040
    CHANGE_HAND_OVER = 500_041


class ResponseCode(_Code):
    """Outcome of a request. Source: ``remoting: ResponseCode``, ``RemotingSysResponseCode``."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    TRANSACTION_FAILED = 4
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    INVALID_PARAMETER = 29
    TRANSACTION_SHOULD_COMMIT = 200
    TRANSACTION_SHOULD_ROLLBACK = 201
    TRANSACTION_STATE_UNKNOW = 202
    TRANSACTION_STATE_GROUP_WRONG = 203
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    POLLING_FULL = 209
    POLLING_TIMEOUT = 210
    BROKER_NOT_EXIST = 211
    BROKER_DISPATCH_NOT_COMPLETE = 212
    BROADCAST_CONSUMPTION = 213
    FLOW_CONTROL = 215
    NOT_LEADER_FOR_QUEUE = 501
    ILLEGAL_OPERATION = 604
    GO_AWAY = 1500
    LMQ_QUOTA_EXCEEDED = 2017
    LITE_SUBSCRIPTION_QUOTA_EXCEEDED = 2018
    USER_NOT_EXIST = 3001
    POLICY_NOT_EXIST = 3002


class PullSysFlag:
    """Bits of a pull request's ``sysFlag``. Source: ``common: PullSysFlag``."""

    COMMIT_OFFSET = 0x1
    """``commitOffset`` is valid. Without this bit the broker ignores its value."""
    SUSPEND = 0x2
    """The broker may hold the request until a message arrives."""
    SUBSCRIPTION = 0x4
    """``subscription`` is valid. Without this bit the broker uses the subscription of the heartbeat."""
    LITE_PULL = 0x10
    """The consumer pulls by itself; the broker handles the request as any other pull."""


class Perm:
    """Bits of a topic's permission. Source: ``common: PermName``."""

    INHERIT = 0x1
    WRITE = 0x2
    READ = 0x4
