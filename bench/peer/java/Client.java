import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Comparator;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.impl.CommunicationMode;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.exception.RemotingException;
import org.apache.rocketmq.remoting.protocol.header.SendMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.route.BrokerData;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * RocketMQ's own client and tools, driven by lines of JSON: one question a line on standard input, one answer a line on standard
 * output. Kept running, since a JVM takes a second to start. A question is {"do": name, ...}; an answer is {"answer": ...} or
 * {"error": text}. Bodies travel as Base64.
 *
 * Arguments: the name server's address.
 */
public final class Client {
    private final String nameServer;
    private DefaultMQProducer producer;
    private DefaultMQPullConsumer consumer;
    private DefaultMQAdminExt admin;
    private int connections;

    private Client(String nameServer) {
        this.nameServer = nameServer;
    }

    public static void main(String[] args) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err);
        Client client = new Client(args[0]);
        BufferedReader questions = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = questions.readLine(); line != null; line = questions.readLine()) {
            JSONObject answer = new JSONObject();
            try {
                answer.put("answer", client.answer(JSON.parseObject(line)));
            } catch (Throwable error) {
                error.printStackTrace();
                answer.put("error", error.toString());
            }
            answers.write((answer.toJSONString() + "\n").getBytes(StandardCharsets.UTF_8));
            answers.flush();
        }
        System.exit(0);
    }

    private Object answer(JSONObject question) throws Exception {
        switch (question.getString("do")) {
            case "connect": return connect();
            case "disconnect": return disconnect();
            case "send": return send(question.getJSONArray("messages"));
            case "send_batch": return sendBatch(question.getJSONArray("messages"));
            case "recall": return producer.recallMessage(question.getString("topic"), question.getString("handle"));
            case "read": return read(question);
            case "consume": return consume(question);
            case "committed": return committed(question.getString("group"), question.getString("topic"));
            case "by_id": return show(admin.viewMessage(question.getString("topic"), question.getString("id")));
            case "by_key": return byKey(question);
            case "topic_status": return topicStatus(question.getString("topic"));
            case "mqadmin": return mqadmin(question.getJSONArray("arguments"));
            default: throw new IllegalArgumentException("no such question: " + question);
        }
    }

    // --- connections: fresh ones for each broker, so that nothing is remembered of an earlier one ---------------------------

    private Object connect() throws Exception {
        disconnect();
        String name = "peer-" + ++connections;
        producer = new DefaultMQProducer("peer-producer");
        producer.setNamesrvAddr(nameServer);
        producer.setInstanceName(name);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        consumer = new DefaultMQPullConsumer("peer-reader");
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName(name);
        consumer.start();
        admin = new DefaultMQAdminExt("peer-admin");
        admin.setNamesrvAddr(nameServer);
        admin.setInstanceName(name + "-admin");
        admin.start();
        for (int patience = 600; !isRegistered(); patience--) {
            if (patience == 0) throw new IllegalStateException("the broker did not tell the name server of its topics");
            Thread.sleep(50);
        }
        return true;
    }

    /** Whether the name server knows the broker and all of its topics, which it is told some time after the broker serves. */
    private boolean isRegistered() throws Exception {
        BrokerData broker = admin.examineBrokerClusterInfo().getBrokerAddrTable().get("broker-a");
        if (broker == null) return false;
        try {
            Set<String> topics = admin.getAllTopicConfig(broker.selectBrokerAddr(), 3_000).getTopicConfigTable().keySet();
            return admin.fetchAllTopicList().getTopicList().containsAll(topics);
        } catch (RemotingException error) {
            return false; // the name server has not noticed that the last broker is gone
        }
    }

    private Object disconnect() {
        if (producer != null) {
            producer.shutdown();
            consumer.shutdown();
            admin.shutdown();
            producer = null;
        }
        return true;
    }

    // --- sending ------------------------------------------------------------------------------------------------------------

    private static Message message(JSONObject given) {
        Message message = new Message(given.getString("topic"), Base64.getDecoder().decode(given.getString("body")));
        if (given.containsKey("tags")) message.setTags(given.getString("tags"));
        if (given.containsKey("keys")) message.setKeys(given.getString("keys"));
        if (given.containsKey("flag")) message.setFlag(given.getIntValue("flag"));
        if (given.containsKey("level")) message.setDelayTimeLevel(given.getIntValue("level"));
        if (given.containsKey("delay_sec")) message.setDelayTimeSec(given.getLongValue("delay_sec"));
        if (given.containsKey("delay_ms")) message.setDelayTimeMs(given.getLongValue("delay_ms"));
        if (given.containsKey("deliver_ms")) message.setDeliverTimeMs(given.getLongValue("deliver_ms"));
        JSONObject properties = given.getJSONObject("properties");
        if (properties != null) properties.forEach((name, value) -> message.putUserProperty(name, (String) value));
        return message;
    }

    private Object send(JSONArray given) throws Exception {
        List<JSONObject> results = new ArrayList<>();
        for (int i = 0; i < given.size(); i++) {
            JSONObject one = given.getJSONObject(i);
            results.add(show(send(message(one), one.getInteger("queue_id"))));
        }
        return results;
    }

    /** A broker keeps %RETRY% topics that are longer than what the client's own check lets pass. */
    private SendResult sendUnchecked(Message message) throws Exception {
        String address = admin.examineBrokerClusterInfo().getBrokerAddrTable().get("broker-a").selectBrokerAddr();
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
        return producer.getDefaultMQProducerImpl().getMqClientFactory().getMQClientAPIImpl()
            .sendMessage(address, "broker-a", message, header, 10_000, CommunicationMode.SYNC, null, producer.getDefaultMQProducerImpl());
    }

    private SendResult send(Message message, Integer queueId) throws Exception {
        if (message.getTopic().length() > 127) return sendUnchecked(message);
        if (queueId == null) return producer.send(message);
        return producer.send(message, (queues, same, id) -> {
            for (MessageQueue queue : queues) if (queue.getQueueId() == (int) id) return queue;
            throw new IllegalArgumentException("no queue " + id + " in " + queues);
        }, queueId);
    }

    private Object sendBatch(JSONArray given) throws Exception {
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < given.size(); i++) messages.add(message(given.getJSONObject(i)));
        return show(producer.send(messages));
    }

    private static JSONObject show(SendResult result) {
        JSONObject shown = new JSONObject();
        shown.put("status", result.getSendStatus().name());
        shown.put("msg_id", result.getMsgId());
        shown.put("offset_msg_id", result.getOffsetMsgId());
        shown.put("queue_id", result.getMessageQueue().getQueueId());
        shown.put("queue_offset", result.getQueueOffset());
        shown.put("recall_handle", result.getRecallHandle());
        return shown;
    }

    // --- reading ------------------------------------------------------------------------------------------------------------

    /** All messages of a topic, once there are "count" of them, "until" is a body among them, or "timeout_ms" has passed. */
    private Object read(JSONObject question) throws Exception {
        String topic = question.getString("topic");
        int count = question.getIntValue("count", 0);
        String until = question.getString("until");
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(question.getLongValue("timeout_ms", 0));
        while (true) {
            List<JSONObject> messages = readNow(topic);
            boolean isThere = until == null || messages.stream().anyMatch(message -> until.equals(message.getString("body")));
            if ((messages.size() >= count && isThere) || System.nanoTime() >= deadline) return messages;
            Thread.sleep(50);
        }
    }

    private List<JSONObject> readNow(String topic) throws Exception {
        List<JSONObject> shown = new ArrayList<>();
        List<MessageQueue> queues = new ArrayList<>(consumer.fetchSubscribeMessageQueues(topic));
        queues.sort(Comparator.naturalOrder());
        for (MessageQueue queue : queues) {
            long at = consumer.minOffset(queue);
            long end = consumer.maxOffset(queue);
            while (at < end) {
                PullResult result;
                try {
                    result = consumer.pull(queue, "*", at, 32);
                } catch (Exception error) {
                    throw new IllegalStateException("at queue offset " + at + " of " + queue + " up to " + end, error);
                }
                at = Math.max(result.getNextBeginOffset(), at + (result.getMsgFoundList() == null ? 1 : 0));
                if (result.getMsgFoundList() != null) result.getMsgFoundList().forEach(message -> shown.add(show(message)));
            }
        }
        return shown;
    }

    private static JSONObject show(MessageExt message) {
        if (message == null) return null;
        JSONObject shown = new JSONObject();
        shown.put("topic", message.getTopic());
        shown.put("queue_id", message.getQueueId());
        shown.put("queue_offset", message.getQueueOffset());
        shown.put("physical_offset", message.getCommitLogOffset());
        shown.put("msg_id", message.getMsgId());
        shown.put("keys", message.getKeys());
        shown.put("tags", message.getTags());
        shown.put("flag", message.getFlag());
        shown.put("sys_flag", message.getSysFlag());
        shown.put("born_timestamp", message.getBornTimestamp());
        shown.put("store_timestamp", message.getStoreTimestamp());
        shown.put("reconsume_times", message.getReconsumeTimes());
        shown.put("body", Base64.getEncoder().encodeToString(message.getBody()));
        shown.put("properties", message.getProperties());
        return shown;
    }

    /**
     * Take part in a group as a push consumer until "count" messages were handled or "timeout_ms" has passed. Bodies in "fail"
     * are given back once each. The offsets of what was handled are committed.
     */
    private Object consume(JSONObject question) throws Exception {
        int count = question.getIntValue("count");
        CountDownLatch left = new CountDownLatch(count);
        ConcurrentLinkedQueue<JSONObject> handled = new ConcurrentLinkedQueue<>();
        Set<String> fail = new HashSet<>(question.containsKey("fail") ? question.getList("fail", String.class) : List.of());
        DefaultMQPushConsumer member = new DefaultMQPushConsumer(question.getString("group"));
        member.setNamesrvAddr(nameServer);
        member.setInstanceName("member-" + ++connections);
        member.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        member.setConsumeThreadMin(1);
        member.setConsumeThreadMax(1);
        member.subscribe(question.getString("topic"), question.containsKey("tags") ? question.getString("tags") : "*");
        member.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            JSONObject shown = show(messages.get(0));
            if (messages.get(0).getReconsumeTimes() == 0 && fail.contains(shown.getString("body"))) {
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            }
            handled.add(shown);
            left.countDown();
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(question.getLongValue("timeout_ms"));
        member.setAwaitTerminationMillisWhenShutdown(5_000);
        member.start();
        left.await(question.getLongValue("timeout_ms"), TimeUnit.MILLISECONDS);
        if (question.getBooleanValue("linger")) Thread.sleep(1_000); // see whether more than expected comes
        // what was handled last may not count yet, and what was given back may still be on its way
        while (System.nanoTime() < deadline && isBusy(member)) Thread.sleep(10);
        member.getDefaultMQPushConsumerImpl().persistConsumerOffset();
        member.shutdown();
        return new ArrayList<>(handled);
    }

    private static boolean isBusy(DefaultMQPushConsumer member) {
        return member.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().values().stream()
            .anyMatch(queue -> queue.getMsgCount().get() > 0);
    }

    private Object committed(String group, String topic) throws Exception {
        JSONObject offsets = new JSONObject();
        admin.examineConsumeStats(group, topic).getOffsetTable()
            .forEach((queue, offset) -> {
                if (queue.getTopic().equals(topic)) offsets.put(String.valueOf(queue.getQueueId()), offset.getConsumerOffset());
            });
        return offsets;
    }

    private Object byKey(JSONObject question) throws Exception {
        List<JSONObject> shown = new ArrayList<>();
        admin.queryMessage(question.getString("topic"), question.getString("key"), 64, 0, Long.MAX_VALUE)
            .getMessageList().forEach(message -> shown.add(show(message)));
        return shown;
    }

    private Object topicStatus(String topic) throws Exception {
        JSONObject status = new JSONObject();
        admin.examineTopicStats(topic).getOffsetTable().forEach((queue, offset) -> {
            if (offset.getMaxOffset() > 0) {
                status.put(String.valueOf(queue.getQueueId()), List.of(offset.getMinOffset(), offset.getMaxOffset()));
            }
        });
        return status;
    }

    /** What one of the tools of mqadmin prints. */
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
