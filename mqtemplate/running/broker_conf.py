"""A property file of RocketMQ's broker, such as ``broker.conf``, as settings of our server.

The reader of property files takes Java's form (``java.util.Properties``): ``key=value``, comments, long lines, escapes.

Source of the keys, of versions 4.9 and 5.5: the fields and setters of ``BrokerConfig``, ``BrokerIdentity``,
``MessageStoreConfig``, ``NettyServerConfig``, ``NettyClientConfig`` and ``AuthConfig``; RocketMQ reads a key by the
setter of its name (``MixAll.properties2Object``).
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import NamedTuple

from mqtemplate.context.config.files import read_text
from mqtemplate.context.config.tree import ConfigNode
from mqtemplate.errors import ConfigurationError
from mqtemplate.processes import home_folder
from mqtemplate.user_code import did_you_mean

_KNOWN = """
abortFile accessMessageInMemoryHotRatio accessMessageInMemoryMaxRatio accountStatsEnable accountStatsPrintZeroValues
ackMessageThreadPoolNums ackThreadPoolQueueCapacity aclCacheExpiredSecond aclCacheMaxNum aclCacheRefreshSecond
aclEnable adminBrokerThreadPoolNums adminBrokerThreadPoolQueueCapacity allAckInSyncStateSet
allowRecallWhenBrokerNotWriteable appendAckAsync appendCkAsync appendTopicForTimerDeleteKey asyncLearner
asyncSendEnable authConfigPath authenticationEnabled authenticationMetadataProvider authenticationProvider
authenticationStrategy authenticationWhitelist authorizationEnabled authorizationMetadataProvider
authorizationProvider authorizationStrategy authorizationWhitelist autoCreateSubscriptionGroup autoCreateTopicEnable
autoDeleteUnusedStats autoMessageVersionOnTopicLen batchDispatchRequestThreadPoolNums bindAddress
bitMapLengthConsumeQueueExt bottomMostCompressionTypeForConsumeQueueStore broadcastOffsetExpireMaxSecond
broadcastOffsetExpireSecond brokerClusterName brokerElectionPriority brokerFastFailureEnable brokerHeartbeatInterval
brokerIP1 brokerIP2 brokerId brokerName brokerNotActiveTimeoutMillis brokerPermission brokerRole brokerTopicEnable
cgColdReadThreshold channelExpiredTimeout channelNotActiveInterval checkCRCOnRecover checkCommitLogOffsetOnRecover
checkSyncStateSetPeriod checkTransactionMessageEnable cleanFileForciblyEnable cleanOfflineBrokerInterval
cleanResourceInterval cleanRocksDBDirtyCQIntervalMin cleanSwapedMapInterval clearRetryTopicWhenDeleteTopic
clientAsyncSemaphoreValue clientCallbackExecutorThreads clientChannelMaxIdleTimeSeconds clientCloseSocketIfTimeout
clientManageThreadPoolNums clientManagerThreadPoolQueueCapacity clientOnewaySemaphoreValue
clientPooledByteBufAllocatorEnable clientSocketRcvBufSize clientSocketSndBufSize clientWorkerThreads clusterName
clusterTopicEnable coldCtrStrategyEnable coldDataFlowControlEnable coldDataScanEnable combineAssignOffsetCQType
combineCQEnableCheckSelf combineCQLoadingCQTypes combineCQMaxExtraSearchCommitLogFiles combineCQPreferCQType
combineCQUseRocksdbForLmq commercialBaseCount commercialBigCount commercialEnable commercialSizePerMsg
commercialTimerCount commercialTransCount commitCommitLogLeastPages commitCommitLogThoroughInterval
commitIntervalCommitLog commitLogForceSwapMapInterval commitLogRecoverMaxNum commitLogSwapMapInterval
commitLogSwapMapReserveFileNum compactionCqMappedFileSize compactionMappedFileSize compactionScheduleInternal
compactionThreadNum compatibleWithOldNameSrv compressedRegister configBlackList configManagerVersion
connectTimeoutMillis consumerFallbehindThreshold consumerManageThreadPoolNums consumerManagerThreadPoolQueueCapacity
consumerOffsetUpdateVersionStep controllerAddr controllerHeartBeatTimeoutMills correctLogicMinOffsetForceInterval
correctLogicMinOffsetSleepInterval dLegerGroup dLegerPeers dLegerSelfId dataReadAheadEnable debugLockEnable
defaultMessageRequestMode defaultPopShareQueueNum defaultQueryMaxNum defaultTopicQueueNums
delayOffsetUpdateVersionStep deleteCommitLogFilesInterval deleteConsumeQueueFilesInterval deleteFileBatchMax
deleteWhen destroyMapedFileIntervalForcibly disableCallbackExecutor disableConsumeIfConsumerReadSlowly
disableNettyWorkerGroup disappearTimeAfterStart diskFallRecorded diskMaxUsedSpaceRatio diskSpaceCleanForciblyRatio
diskSpaceWarningLevelRatio dispatchCqCacheNum dispatchCqThreads dispatchFromSenderThread duplicationEnable
enableAcceleratedRecovery enableAsyncReput enableAutoInSyncReplicas enableBatchPush enableBroadcastOffsetStore
enableBuildConsumeQueueConcurrently enableCalcFilterBitMap enableCleanExpiredOffset enableCompaction
enableConnectionMetrics enableConsumeQueueExt enableControllerMode enableCreateSysGroup enableDLegerCommitLog
enableDetailStat enableFastChannelEventProcess enableLagAndDlqMetrics enableLiteEventMode enableLitePopLog enableLmq
enableLmqQuota enableLmqStats enableLogConsumeQueueRepeatedlyBuildWhenRecover enableMessageStoreMetrics
enableMixedMessageType enableMultiDispatch enableNetWorkFlowControl enableNotifyAfterPopOrderLockRelease
enableNotifyBeforePopCalculateLag enablePopBatchAck enablePopBufferMerge enablePopLog enablePopMessageThreshold
enablePopMetrics enablePropertyFilter enableReconnectForGoAway enableRegisterProducer enableRemoteEscape
enableRemotingMetrics enableRequestMetrics enableRetryTopicV2 enableRocksDBLog enableRunningFlagsInFlush
enableScheduleAsyncDeliver enableScheduleMessageStats enableShutdownGracefully enableSingleTopicRegister
enableSkipLongAwaitingAck enableSlaveActingMaster enableSplitMetadata enableSplitRegistration enableStatsMetrics
enableTransactionMetrics enabledAppendPropCRC endTransactionPoolQueueCapacity endTransactionThreadPoolNums
estimateAccumulation expectConsumerNumUseFilter fastFailIfNoBufferInStorePool fetchControllerAddrByDnsLookup
fetchNameSrvAddrByDnsLookup fetchNamesrvAddrByAddressServer fetchNamesrvAddrInterval fileReservedTime
filterDataCleanTimeSpan filterServerNums filterSupportRetry flushCommitLogLeastPages flushCommitLogThoroughInterval
flushCommitLogTimed flushConsumeQueueLeastPages flushConsumeQueueThoroughInterval flushConsumerOffsetHistoryInterval
flushConsumerOffsetInterval flushDelayOffsetInterval flushDiskType flushIntervalCommitLog flushIntervalConsumeQueue
flushLeastPagesWhenWarmMapedFile forceRegister forceVerifyPropCRC forwardTimeout globalColdReadThreshold
haFlowControlEnable haHousekeepingInterval haListenPort haMasterAddress haMaxGapNotInSync haMaxTimeSlaveNotCatchup
haSendHeartbeatInterval haSlaveFallbehindMax haTransferBatchSize heartbeatThreadPoolNums
heartbeatThreadPoolQueueCapacity highSpeedMode inSyncReplicas indexFileReadEnable indexFileWriteEnable
indexRocksDBEnable initAuthenticationUser initPopOffsetByCheckMsgInMem innerClientAuthenticationCredentials
isolateLogEnable iteratorWhenUseRocksdbConsumeQueue listenPort liteEventCheckInterval liteEventFullDispatchDelayTime
liteEventFullDispatchDelayTimeForWildcardGroup liteLagCountMetricsEnable liteLagLatencyCollectEnable
liteLagLatencyMetricsEnable liteLagLatencyTopK litePullMessageEnable litePullMessageThreadPoolNums
litePullThreadPoolQueueCapacity liteSubscriptionCheckInterval liteSubscriptionCheckTimeoutMills liteTtlCheckInterval
loadBalancePollNameServerInterval loadBalanceProcessorThreadPoolNums loadBalanceThreadPoolQueueCapacity
lockInStrictMode logicQueueForceSwapMapInterval logicQueueSwapMapInterval logicQueueSwapMapReserveFileNum
logicalDiskSpaceCleanForciblyThreshold longPollingEnable mappedFileSizeCommitLog mappedFileSizeConsumeQueue
mappedFileSizeConsumeQueueExt mappedFileSizeTimerLog mappedFileSwapEnable mapperFileSizeBatchConsumeQueue
maxAsyncPutMessageRequests maxBatchDeleteFilesNum maxChecksumRange maxClientEventCount maxConsumeQueueScan
maxDelayTime maxErrorRateOfBloomFilter maxFilterMessageSize maxHaTransferByteInSecond maxHashSlotNum maxIndexNum
maxLiteSubscriptionCount maxLmqConsumeQueueNum maxMessageFilterNumForNotification maxMessageSize maxMsgsNumBatch
maxOffsetMapSize maxPopPollingSize maxReconnectIntervalTimeSeconds maxRecoveryCommitlogFiles
maxRocksDBIndexQueryDays maxSlaveResendLength maxStatsIdleTimeInMinutes maxTopicLength
maxTransferBytesOnMessageInDisk maxTransferBytesOnMessageInMemory maxTransferCountOnMessageInDisk
maxTransferCountOnMessageInMemory memTableFlushIntervalMs messageDelayLevel messageIndexEnable messageIndexSafe
messageStorePlugIn metricGrpcExporterIntervalInMills metricGrpcExporterTimeOutInMills
metricLoggingExporterIntervalInMills metricsExportBatchMaxDataPoints metricsExporterType metricsGrpcExporterHeader
metricsGrpcExporterTarget metricsInDelta metricsLabel metricsOtelCardinalityLimit metricsPromExporterHost
metricsPromExporterPort migrateAuthFromV1Enabled minInSyncReplicas minLiteTTl msgTraceTopicName namesrvAddr
notifyConsumerIdsChangedEnable offsetCheckInSlave osPageCacheBusyTimeOutMills persistConsumerOffsetIncrementally
popCkMaxBufferSize popCkOffsetMaxQueueSize popCkStayBufferTime popCkStayBufferTimeOut popConsumerFSServiceInit
popConsumerKVServiceEnable popConsumerKVServiceInit popConsumerKVServiceLog popFromRetryProbability
popFromRetryProbabilityForPriority popInflightMessageThreshold popLongPollingForceNotifyInterval
popPollingMapExpireTimeSeconds popPollingMapSize popPollingSize popResponseReturnActualRetryTopic
popReviveConcurrency popReviveMaxAttemptTimes popReviveMaxReturnSizePerRead popReviveSkipIfGroupAbsent
preferredLeaderId printChannelGroups printChannelGroupsMinNum priorityOrderAsc processReplyMessageThreadPoolNums
pullBatchMaxMessageCount pullMessageThreadPoolNums pullThreadPoolQueueCapacity putConsumeQueueDataByFileChannel
putMessageFutureThreadPoolNums putMessageTimeout putMsgIndexHightWater putThreadPoolQueueCapacity
queryMessageThreadPoolNums queryThreadPoolQueueCapacity readOnlyCommitLogStorePaths readUnCommitted
realTimeNotifyConsumerChange realTimePersistRocksDBConfig recallMessageEnable recheckReputOffsetFromCq
recoverConcurrently recoverThreadPoolNums redeleteHangedFileInterval regionId registerBrokerTimeoutMills
registerNameServerPeriod rejectPullConsumerEnable rejectTransactionMessage replicasPerDiskPartition
replyThreadPoolQueueCapacity retrieveMessageFromPopRetryTopicV1 reviveAckWaitMs reviveInterval reviveMaxSlow
reviveQueueNum reviveScanTime rocketmqHome rocksdbCQDoubleWriteEnable rocksdbCompressionType
rocksdbFlushWalFrequency rocksdbWalFileRollingThreshold sampleCountThreshold sampleSteps scanAvailableNameSrv
scheduleAsyncDeliverMaxPendingLimit scheduleAsyncDeliverMaxResendNum2Blocked searchBcqByCacheEnable
sendHeartbeatTimeoutMillis sendMessageThreadPoolNums sendThreadPoolQueueCapacity serverAsyncSemaphoreValue
serverCallbackExecutorThreads serverChannelMaxIdleTimeSeconds serverLoadBalancerEnable serverNettyWorkerGroupEnable
serverOnewaySemaphoreValue serverPooledByteBufAllocatorEnable serverSelectorThreads serverSocketBacklog
serverSocketRcvBufSize serverSocketSndBufSize serverWorkerThreads sharedByteBufferNum shortPollingTimeMills
shutdownWaitTimeSeconds skipPreOnline skipWhenCKRePutReachMaxTimes slaveReadEnable slaveTimeout socksProxyConfig
spinLockCollisionRetreatOptimalDegree splitMetadataSize splitRegistrationSize startAcceptSendRequestTimeStamp
statRocksDBCQIntervalSec statefulAuthenticationCacheExpiredSecond statefulAuthenticationCacheMaxNum
statefulAuthorizationCacheExpiredSecond statefulAuthorizationCacheMaxNum storeCheckpoint storePathBrokerIdentity
storePathCommitLog storePathConsumeQueue storePathDLedgerCommitLog storePathEpochFile storePathIndex
storePathRootDir storeReplyMessageEnable storeType subscriptionExpiredTimeout syncBrokerMemberGroupPeriod
syncBrokerMetadataPeriod syncControllerMetadataPeriod syncFlushTimeout syncFromLastFile
syncMasterFlushOffsetWhenStartup timerCheckMetricsWhen timerColdDataCheckIntervalMs timerCongestNumEachSlot
timerEnableCheckMetrics timerEnableDisruptor timerEnableRetryUntilSuccess timerFlushIntervalMs
timerGetMessageThreadNum timerInterceptDelayLevel timerMaxDelaySec timerMetricSmallThreshold timerPrecisionMs
timerProgressLogIntervalMs timerPutMessageThreadNum timerRecallToTimeWheelEnable timerRecallToTimelineEnable
timerReputServiceCorePoolSize timerReputServiceMaxPoolSize timerReputServiceQueueCapacity timerRocksDBEnable
timerRocksDBPrecisionMs timerRocksDBRollIntervalHours timerRocksDBRollMaxTps timerRocksDBRollRangeHours
timerRocksDBStopScan timerRocksDBTimeExpiredMaxTps timerRollWindowSlot timerSkipUnknownError timerStopDequeue
timerStopEnqueue timerWarmEnable timerWheelEnable timerWheelSnapshotFlush timerWheelSnapshotIntervalMs
topicQueueLockNum totalReplicas traceOn traceTopicEnable transRocksDBEnable transWriteOriginTransHalfEnable
transactionCheckInterval transactionCheckMax transactionCheckRocksdbCoreThreads transactionCheckRocksdbMaxThreads
transactionCheckRocksdbQueueCapacity transactionMetricFlushInterval transactionOpBatchInterval
transactionOpMsgMaxSize transactionTimeOut transferMsgByHeap transientStorePoolEnable transientStorePoolSize
travelCqFileNumWhenGetMessage updateNameServerAddrPeriod useABSLock useEpollNativeSelector
useMessageFilterForNotification usePIDColdCtrStrategy useReentrantLockWhenPutMessage useSeparateRetryQueue
useSeparateStorePathForRocksdbCQ useServerSideResetOffset useSingleRocksDBForAllConfigs useStaticSubscription useTLS
userCacheExpiredSecond userCacheMaxNum userCacheRefreshSecond validateSystemTopicWhenUpdateTopic
waitTimeMillsInAckQueue waitTimeMillsInAdminBrokerQueue waitTimeMillsInHeartbeatQueue waitTimeMillsInLitePullQueue
waitTimeMillsInPullQueue waitTimeMillsInSendQueue waitTimeMillsInTransactionQueue wakeCommitWhenPutMessage
wakeFlushWhenPutMessage warmMapedFileEnable writeBufferHighWaterMark writeBufferLowWaterMark writeWithoutMmap
"""

KNOWN_NAMES = frozenset(_KNOWN.split())


_THREADS = "this server has its own threads and queues"
_CONNECTIONS = "this server has its own connections; see mqtemplate.server.*"
_REPLICAS = "this broker has no replicas"
_NAME_SERVER = "the name server runs in this process, on mqtemplate.server.name-server; clients need that address"
_MEMORY = "the operating system manages the memory of the files"
_POP = "POP has its own journal here; see mqtemplate.broker.pop-in-flight-max and max-held-pops"
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


# The key ends at the first separator that no backslash escapes: "=", ":", or blanks.
_KEY_AND_VALUE = re.compile(r"(?P<key>(?:\\.|[^\\\s=:])*)\s*[=:]?\s*(?P<value>.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class PropertyEntry(NamedTuple):
    """One key of a file."""

    key: str
    value: str
    line: int


def read_property_file(file: Path) -> list[PropertyEntry]:
    """Return the entries of a file, in order.

    Raises:
        ConfigurationError: The file cannot be read, is not UTF-8, or too long.
    """
    text = read_text(file, "{file} cannot be read: {reason}; give the property file of a broker")
    return [_entry(line, number) for number, line in _logical_lines(text)]


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its number; one that ends with a backslash continues in the next one."""
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.lstrip()
        if not parts and (not stripped or stripped[0] in "#!"):
            continue
        start = start if parts else number
        backslashes = len(stripped) - len(stripped.rstrip("\\"))
        if backslashes % 2:
            parts.append(stripped[:-1])
            continue
        yield start, "".join([*parts, stripped])
        parts = []
    if parts:
        yield start, "".join(parts)


def _entry(line: str, number: int) -> PropertyEntry:
    found = _KEY_AND_VALUE.match(line)
    assert found is not None  # every part of the pattern may be empty
    return PropertyEntry(_unescaped(found["key"]), _unescaped(found["value"]).strip(), number)


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else _CONTROL.get(found[2], found[2]), text)


_KEYS = {
    # key of RocketMQ -> key here
    "autoCreateSubscriptionGroup": "mqtemplate.server.auto-create-subscription-group",
    "autoCreateTopicEnable": "mqtemplate.server.auto-create-topic-enable",
    "brokerClusterName": "mqtemplate.server.cluster-name",
    "brokerName": "mqtemplate.broker.broker-name",
    "cleanFileForciblyEnable": "mqtemplate.broker.clean-file-forcibly-enable",
    "defaultTopicQueueNums": "mqtemplate.server.default-topic-queue-nums",
    "deleteWhen": "mqtemplate.broker.delete-when",
    "diskMaxUsedSpaceRatio": "mqtemplate.broker.disk-max-used-space-ratio",
    "diskSpaceCleanForciblyRatio": "mqtemplate.broker.disk-space-clean-forcibly-ratio",
    "diskSpaceWarningLevelRatio": "mqtemplate.broker.disk-space-warning-level-ratio",
    "enablePropertyFilter": "mqtemplate.server.enable-property-filter",
    "fileReservedTime": "mqtemplate.broker.file-reserved-time",
    "flushConsumerOffsetInterval": "mqtemplate.broker.flush-consumer-offset-interval-ms",
    "flushDiskType": "mqtemplate.broker.flush-disk-type",
    "flushIntervalCommitLog": "mqtemplate.broker.flush-interval-commit-log-ms",
    "mappedFileSizeCommitLog": "mqtemplate.broker.mapped-file-size-commit-log",
    "mappedFileSizeConsumeQueue": "mqtemplate.broker.mapped-file-size-consume-queue",
    "mappedFileSizeTimerLog": "mqtemplate.broker.mapped-file-size-timer-log",
    "maxHashSlotNum": "mqtemplate.broker.max-hash-slot-num",
    "maxIndexNum": "mqtemplate.broker.max-index-num",
    "maxMessageSize": "mqtemplate.broker.max-message-size",
    "messageDelayLevel": "mqtemplate.broker.message-delay-level",
    "recallMessageEnable": "mqtemplate.server.recall-message-enable",
    "storePathRootDir": "mqtemplate.broker.store-path",
    "timerMaxDelaySec": "mqtemplate.broker.timer-max-delay-sec",
    "timerPrecisionMs": "mqtemplate.broker.timer-precision-ms",
    "timerRollWindowSlot": "mqtemplate.broker.timer-roll-window-slot",
    "timerWheelEnable": "mqtemplate.broker.timer-wheel-enable",
    "transactionCheckInterval": "mqtemplate.broker.transaction-check-interval-ms",
    "transactionCheckMax": "mqtemplate.broker.transaction-check-max",
    "transactionTimeOut": "mqtemplate.broker.transaction-timeout-ms",
}
_OWN_KEYS = {
    # key that RocketMQ ignores -> key here
    "deadLetterReservedTime": "mqtemplate.broker.dead-letter-reserved-time",
    "groupReservedTime": "mqtemplate.broker.group-reserved-time",
    "keepUnreadMessages": "mqtemplate.broker.keep-unread-messages",
}
_ADDRESS_KEYS = ("bindAddress", "listenPort", "brokerIP1")
_DEFAULT_PORT = "10911"
_NAME_SERVER_PORT = "9876"

_PLACES = {
    # key of RocketMQ -> place in the store directory, the only one here
    "abortFile": "abort",
    "storeCheckpoint": "checkpoint",
    "storePathCommitLog": "commitlog",
    "storePathConsumeQueue": "consumequeue",
    "storePathIndex": "index",
}
_ALLOWED = {
    # key of RocketMQ -> allowed values, and what to do about another one: to ignore it would be dangerous
    "brokerId": (("0",), "this broker has no replicas, so it cannot be a replica itself; remove the key"),
    "brokerRole": (
        ("ASYNC_MASTER", "SYNC_MASTER"),
        "this broker has no replicas, so it cannot be a replica itself; remove the key",
    ),
    "brokerPermission": (("6",), "limit the rights of accounts instead: mqtemplate.server.acl in application.yml"),
    "aclEnable": (("false",), "set mqtemplate.server.acl in application.yml, and remove the key"),
    "authenticationEnabled": (("false",), "set mqtemplate.server.acl in application.yml, and remove the key"),
    "authorizationEnabled": (("false",), "set mqtemplate.server.acl in application.yml, and remove the key"),
    "useTLS": (("false",), "set mqtemplate.server.tls in application.yml, and remove the key"),
}


@dataclass(frozen=True, slots=True)
class BrokerConf:
    """Content of a property file.

    Attributes:
        root: The keys that act here, as `load_settings` takes them.
        without_meaning: Key of RocketMQ that means nothing here -> reason.
    """

    root: ConfigNode
    without_meaning: Mapping[str, str] = field(default_factory=dict)


def read_broker_conf(file: Path) -> BrokerConf:
    """Read a property file of RocketMQ's broker.

    Raises:
        ConfigurationError: The file cannot be read, or has unknown keys, or values that cannot be honoured; the error
            lists all with their lines.
    """
    # As in Java the last one of several entries wins.
    entries = {entry.key: entry for entry in read_property_file(file) if entry.value}  # an empty one is not given
    problems = [
        f"{file.name}:{entry.line}: {problem}"
        for entry in entries.values()
        if (problem := _problem(entry, entries)) is not None
    ]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigurationError("\n  ".join([f"{file} is not usable: {count}", *problems]))
    root = ConfigNode()
    for name, key in (_KEYS | _OWN_KEYS).items():
        if name in entries:
            entry = entries[name]
            root.put(tuple(key.split(".")), _value(entry), f"{file.name}:{entry.line}")
    _put_addresses(root, entries, file.name)
    acting = {*_KEYS, *_OWN_KEYS, *_ADDRESS_KEYS, *_PLACES}
    return BrokerConf(root, {name: reason_for(name) for name in entries if name not in acting})


def _problem(entry: PropertyEntry, entries: Mapping[str, PropertyEntry]) -> str | None:
    """Return why an entry cannot be honoured; None if it can, or means nothing here."""
    name, value = entry.key, entry.value
    if name not in KNOWN_NAMES and name not in _OWN_KEYS:
        known = [*KNOWN_NAMES, *_OWN_KEYS]
        return f"{name} is not a key of RocketMQ's broker; {did_you_mean(name, known, 'remove it')}"
    if name in _ALLOWED and value not in _ALLOWED[name][0]:
        allowed, advice = _ALLOWED[name]
        return f"{name} must be {' or '.join(allowed)}, got {value!r}: {advice}"
    if name in _PLACES and "storePathRootDir" in entries:
        place = _folder(entries["storePathRootDir"].value) / _PLACES[name]
        if _folder(value) != place:
            return (
                f"{name} must be {place}, got {value!r}: all files of a store are in storePathRootDir; remove the key"
            )
    elif name in _PLACES:
        return (
            f"{name} is set without storePathRootDir; set that, the directory of the whole store, and remove this key"
        )
    return None


def _value(entry: PropertyEntry) -> str:
    if entry.key == "storePathRootDir":
        return str(_folder(entry.value))
    return entry.value.lower() if entry.value in ("True", "False", "TRUE", "FALSE") else entry.value


def _folder(text: str) -> PurePath:
    """Return a path with the variables that RocketMQ's example files use: ``${user.home}`` and ``$HOME``."""
    if "${user.home}" in text or "$HOME" in text:
        home = str(home_folder(text, "write the path without it"))
        text = text.replace("${user.home}", home).replace("$HOME", home)
    return PurePath(os.path.normpath(text))


def _put_addresses(root: ConfigNode, entries: Mapping[str, PropertyEntry], file: str) -> None:
    """Set the addresses. An address for other machines opens the listener sockets to them, as in RocketMQ."""
    given = {name: entries[name] for name in _ADDRESS_KEYS if name in entries}
    if not given:
        return
    line = min(entry.line for entry in given.values())
    origin = f"{file}:{line}"
    port = given["listenPort"].value if "listenPort" in given else _DEFAULT_PORT
    advertised = given["brokerIP1"].value if "brokerIP1" in given else None
    is_for_others = advertised is not None and not _is_loopback(advertised)
    ip = given["bindAddress"].value if "bindAddress" in given else ("0.0.0.0" if is_for_others else "127.0.0.1")
    server = ("mqtemplate", "server")
    root.put((*server, "listen"), _address(ip, port), origin)
    if advertised is not None:
        root.put((*server, "advertise"), _address(advertised, port), origin)
    if is_for_others:
        root.put((*server, "name-server"), _address(ip, _NAME_SERVER_PORT), origin)


def _is_loopback(ip: str) -> bool:
    if ip == "localhost":
        return True
    try:
        return ipaddress.ip_address(ip).is_loopback
    except ValueError:  # a host name
        return False


def _address(ip: str, port: str) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
