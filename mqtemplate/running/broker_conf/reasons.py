"""Keys of RocketMQ's broker that mean nothing here, each with its reason."""

from __future__ import annotations

import re

_THREADS = "this server has its own threads and queues"
_CONNECTIONS = "this server has its own connections; see mqtemplate.server.*"
_REPLICAS = "this broker has no replicas"
_NAME_SERVER = "the name server runs in this process, on mqtemplate.server.name-server; clients need that address"
_MEMORY = "the operating system manages the memory of the files"
_POP = "pop consumers are not supported; push and pull consumers are"
_LITE = "lite topics and their queues are not supported"
_ROCKSDB = "the files are RocketMQ's default ones, without RocksDB"
_METRICS = "figures come from the embedded broker; see docs/metrics.md"
_FLUSH = "the broker writes these files as it needs to; flushDiskType decides when a message is on disk"
_TRACE = "the broker writes no trace messages; clients may"
_ACCESS = "access control is mqtemplate.server.acl in application.yml"
_TIMER = "the timer of this broker has its own pace and no brakes"
_STORE = "this broker has its own way to write, read and recover the same files"
_FILTER = "SQL92 selectors are evaluated for each message, without bloom filters"
_COMPACTION = "topics with compaction are not supported"
_OFFSETS = "consumer offsets are written together, every flushConsumerOffsetInterval"
_LIMITS = "this server has limits of its own; see mqtemplate.server.*"
_TRANSACTIONS = "transactions are checked by this broker's own service"
_OTHER = "it belongs to a part of RocketMQ's broker that this one does not have"

_EXACT = {
    "brokerId": _REPLICAS,
    "brokerIP2": _REPLICAS,
    "brokerRole": _REPLICAS,
    "rocketmqHome": "there is no installation of RocketMQ",
    "msgTraceTopicName": _TRACE,
    "traceTopicEnable": _TRACE,
    "traceOn": _TRACE,
    "flushDelayOffsetInterval": "progress of delayed messages is written with each checkpoint",
    "longPollingEnable": "pulls always wait for messages",
    "shortPollingTimeMills": "pulls always wait for messages",
    "messageIndexEnable": "messages are always indexed",
    "messageIndexSafe": "messages are always indexed",
    "brokerPermission": "it is 6 (read and write), as here",
    "clusterTopicEnable": "a topic of the cluster's or broker's name is created by its first message only",
    "brokerTopicEnable": "a topic of the cluster's or broker's name is created by its first message only",
    "checkTransactionMessageEnable": "transactions are always checked",
    "useTLS": "TLS is mqtemplate.server.tls in application.yml",
}
_PATTERNS = (
    # the first that matches
    (r"RocksDB|Rocksdb|rocksdb|Timeline|^combine|storeType|memTable", _ROCKSDB),
    (r"[mM]etrics?|[sS]tats|commercial|highSpeedMode", _METRICS),
    (r"[pP]op[A-Z]|^revive|Ck[A-Z]|CKRe|RetryTopicV|useSeparateRetryQueue|SkipLongAwaitingAck", _POP),
    (r"^lite|Lite|[lL]mq|MultiDispatch|TTl|maxClientEvent", _LITE),
    (
        (
            r"^ha[A-Z]|[sS]lave|[rR]eplica|[iI]nSync|SyncState|dLeger|DLe[dg]|DLedger|[cC]ontroller|[eE]lection|"
            r"BrokerIdentity|EpochFile|RemoteEscape|skipPreOnline|preferredLeader|duplication|syncFromLast|asyncLearner|"
            r"syncBrokerM|syncMaster"
        ),
        _REPLICAS,
    ),
    (r"^auth|^acl|Auth|^user|stateful[AZ]|validateSystemTopic", _ACCESS),
    (r"^timer|Timer|scheduleAsync|ScheduleAsync|ScheduleMessage", _TIMER),
    (
        r"[nN]ame[sS]rv|NameServer|NameSrv|[rR]egist|Dns|notifyConsumer|[sS]plitMeta|brokerHeartbeat|sendHeartbeat",
        _NAME_SERVER,
    ),
    (
        r"Thread|QueueCapacity|Semaphore|FastFail|waitTimeMills|Executor|Concurrently|asyncSend|osPageCacheBusy",
        _THREADS,
    ),
    (
        r"^client|^server|Socket|Channel|socks|writeBuffer|Netty|Epoll|GoAway|Shutdown|bindAddress|connectTimeout",
        _CONNECTIONS,
    ),
    (r"[cC]old|[sS]wap|[wW]arm|[tT]ransientStore|InMemory|InDisk|dataReadAhead|Heap|Mmap|OnMessage|BufferNum", _MEMORY),
    (r"ompaction|OffsetMap", _COMPACTION),
    (r"[fF]ilter|[bB]itMap|expectConsumerNum", _FILTER),
    (r"^transaction|^trans[A-Z]|TransactionMessage", _TRANSACTIONS),
    (r"OffsetUpdateVersion|BroadcastOffset|broadcastOffset|ConsumerOffsetIncr|ExpiredOffset|ResetOffset", _OFFSETS),
    (r"^max|[fF]lowControl|Fallbehind|ReadSlowly|Threshold|BatchMax", _LIMITS),
    (
        (
            r"CommitLog|ConsumeQueue|Cq|CQ|CRC|Recover|Reput|Offset|index|Lock|ABS|Disk|putM|Checksum|BatchPush|Calc|"
            r"readUnC|useMessageVersion|TopicLen|sample|spinLock"
        ),
        _STORE,
    ),
    (r"^flush|^commit[A-Z]|^delete|^destroy|^redelete|^clean|wakeFlush|wakeCommit|Flush", _FLUSH),
)


def reason_for(name: str) -> str:
    """Return the reason why a key of RocketMQ means nothing here."""
    if name in _EXACT:
        return _EXACT[name]
    return next((reason for pattern, reason in _PATTERNS if re.search(pattern, name)), _OTHER)
