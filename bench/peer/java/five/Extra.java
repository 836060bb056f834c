import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.impl.CommunicationMode;
import org.apache.rocketmq.client.impl.producer.DefaultMQProducerImpl;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.exception.RemotingException;
import org.apache.rocketmq.remoting.protocol.header.SendMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;
import org.apache.rocketmq.remoting.protocol.route.BrokerData;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** Features of the client 5.5.0 that 4.9.8 does not have: timers, recall, and RocketMQ's tools. */
final class Extra {
    private static final int ATTEMPTS = 1_200;
    private final String nameServer;
    private DefaultMQAdminExt admin;

    Extra(String nameServer) {
        this.nameServer = nameServer;
        Guarded.interruptWaits(250);
    }

    void connect(String instanceName) throws Exception {
        admin = new DefaultMQAdminExt("peer-admin");
        admin.setNamesrvAddr(nameServer);
        admin.setInstanceName(instanceName + "-admin");
        admin.start();
        for (int attempts = ATTEMPTS; !isRegistered(); attempts--) {
            if (attempts == 0) throw new IllegalStateException("the broker did not register its topics with the name server");
            Thread.sleep(50);
        }
    }

    /**
     * Return true if the name server has the route of all topics of the broker. A broker registers when it starts, before it has
     * created all topics, and then every 10 s at least. It registers at once if its permission is set.
     */
    private boolean isRegistered() throws Exception {
        try {
            Map<String, BrokerData> brokers = admin.examineBrokerClusterInfo().getBrokerAddrTable();
            if (brokers.isEmpty()) return false;
            BrokerData broker = brokers.values().iterator().next();
            if (broker.getBrokerAddrs().isEmpty()) return false; // the previous broker has stopped, this one has not registered
            String address = broker.selectBrokerAddr();
            Set<String> topics = admin.getAllTopicConfig(address, 3_000).getTopicConfigTable().keySet();
            if (admin.fetchAllTopicList().getTopicList().containsAll(topics)) return true;
            Properties permission = new Properties();
            permission.setProperty("brokerPermission", "6");
            admin.updateBrokerConfig(address, permission);
            return false;
        } catch (RemotingException error) {
            return false; // the name server still has the address of the previous broker, or did not answer in time
        }
    }

    void disconnect() {
        admin.shutdown();
    }

    Object run(JSONObject command) throws Exception {
        String group = command.getString("group");
        String topic = command.getString("topic");
        switch (command.getString("command")) {
            case "committed": return committed(group, topic);
            case "topic_status": return topicStatus(topic);
            case "create_topic": return createTopic(topic, command.getIntValue("queues"));
            case "reset_offset": return resetOffset(topic, group, command.getLongValue("timestamp_ms"));
            case "members": return members(group);
            case "mqadmin": return mqadmin(command.getJSONArray("arguments"));
            default: throw new IllegalArgumentException("unknown command: " + command);
        }
    }

    // --- messages -----------------------------------------------------------------------------------------------------------

    static void delay(Message message, JSONObject fields) {
        if (fields.containsKey("delay_sec")) message.setDelayTimeSec(fields.getLongValue("delay_sec"));
        if (fields.containsKey("delay_ms")) message.setDelayTimeMs(fields.getLongValue("delay_ms"));
        if (fields.containsKey("deliver_ms")) message.setDeliverTimeMs(fields.getLongValue("deliver_ms"));
    }

    static String recallHandle(SendResult result) {
        return result.getRecallHandle();
    }

    static String recall(DefaultMQProducer producer, String topic, String handle) throws Exception {
        return producer.recallMessage(topic, handle);
    }

    static void broadcast(DefaultMQPushConsumer consumer) {
        consumer.setMessageModel(MessageModel.BROADCASTING);
    }

    /** The broker assigns the queues, which the consumer pops from or pulls from. */
    static void pop(DefaultMQPushConsumer consumer, long invisibleMs) {
        consumer.setClientRebalance(false);
        consumer.setPopInvisibleTime(invisibleMs);
    }

    /** Send to a topic with a long name. The check in the client rejects %RETRY% topics that the broker accepts. */
    static SendResult sendUnchecked(DefaultMQProducer producer, Message message) throws Exception {
        DefaultMQProducerImpl inner = producer.getDefaultMQProducerImpl();
        String address = inner.getMqClientFactory().findBrokerAddressInPublish("broker-a");
        MessageClientIDSetter.setUniqID(message);
        SendMessageRequestHeader header = new SendMessageRequestHeader();
        header.setProducerGroup(producer.getProducerGroup());
        header.setTopic(message.getTopic());
        header.setDefaultTopic("TBW102");
        header.setDefaultTopicQueueNums(1);
        header.setQueueId(0);
        header.setSysFlag(0);
        header.setBornTimestamp(System.currentTimeMillis());
        header.setFlag(message.getFlag());
        header.setProperties(MessageDecoder.messageProperties2String(message.getProperties()));
        header.setReconsumeTimes(0);
        header.setBatch(false);
        return inner.getMqClientFactory().getMQClientAPIImpl()
            .sendMessage(address, "broker-a", message, header, 10_000, CommunicationMode.SYNC, null, inner);
    }

    // --- tools --------------------------------------------------------------------------------------------------------------

    private Object committed(String group, String topic) throws Exception {
        Map<String, Long> offsets = new HashMap<>();
        admin.examineConsumeStats(group, topic).getOffsetTable().forEach((queue, offset) -> {
            if (queue.getTopic().equals(topic)) offsets.put(String.valueOf(queue.getQueueId()), offset.getConsumerOffset());
        });
        return offsets;
    }

    private Object topicStatus(String topic) throws Exception {
        Map<String, List<Long>> status = new HashMap<>();
        admin.examineTopicStats(topic).getOffsetTable().forEach((queue, offset) -> {
            if (offset.getMaxOffset() > 0) {
                status.put(String.valueOf(queue.getQueueId()), List.of(offset.getMinOffset(), offset.getMaxOffset()));
            }
        });
        return status;
    }

    private Object createTopic(String topic, int queues) throws Exception {
        admin.createTopic("TBW102", topic, queues, null);
        return true;
    }

    /** Return queue ID -> new offset of the group. */
    private Object resetOffset(String topic, String group, long timestampMs) throws Exception {
        Map<String, Long> offsets = new HashMap<>();
        for (Map.Entry<MessageQueue, Long> entry : admin.resetOffsetByTimestamp(topic, group, timestampMs, true).entrySet()) {
            offsets.put(String.valueOf(entry.getKey().getQueueId()), entry.getValue());
        }
        return offsets;
    }

    /** Return the client IDs of the members of a group. */
    private Object members(String group) throws Exception {
        return admin.examineConsumerConnectionInfo(group).getConnectionSet().stream().map(member -> member.getClientId()).sorted().toList();
    }

    /** Return the output of an mqadmin command. */
    private Object mqadmin(JSONArray arguments) {
        PrintStream before = System.out;
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        System.setProperty("rocketmq.namesrv.addr", nameServer);
        System.setOut(new PrintStream(printed, true, StandardCharsets.UTF_8));
        try {
            MQAdminStartup.main0(arguments.toArray(new String[0]), null);
        } finally {
            System.setOut(before);
        }
        return printed.toString(StandardCharsets.UTF_8);
    }
}
