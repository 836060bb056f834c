"""Keys in the property files of RocketMQ's broker, versions 4.9 and 5.5, and why some mean nothing here.

Source: the fields and setters of ``BrokerConfig``, ``BrokerIdentity``, ``MessageStoreConfig``, ``NettyServerConfig``,
``NettyClientConfig`` and ``AuthConfig``; RocketMQ reads a key by the setter of its name (``MixAll.properties2Object``).
"""

from __future__ import annotations

import re

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
