import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.MQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * A push consumer, and what it handled. The question that makes one says:
 *
 * "group", "topic"; "tags" or "sql"; "orderly", "broadcasting"; "from" ("first", else "last"); "threads" (1); "fail": bodies that are
 * given back once; "fail_always": bodies that are given back each time; "retry_level": the delay level they come back with;
 * "max_reconsume_times"; "reply": requests are answered with their own body behind this text.
 */
final class Member {
    private final String name;
    private final DefaultMQPushConsumer consumer;
    private final Record handled = new Record();
    private final Set<String> failOnce;
    private final Set<String> failAlways;
    private final int retryLevel;
    private final String reply;
    private final MQProducer replies;

    Member(String nameServer, String name, JSONObject question, MQProducer replies) throws Exception {
        this.name = name;
        this.replies = replies;
        failOnce = set(question.getJSONArray("fail"));
        failAlways = set(question.getJSONArray("fail_always"));
        retryLevel = question.getIntValue("retry_level", 0);
        reply = question.getString("reply");
        consumer = new DefaultMQPushConsumer(question.getString("group"));
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName(name);
        consumer.setConsumeFromWhere("last".equals(question.getString("from"))
            ? ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET : ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeThreadMin(question.getIntValue("threads", 1));
        consumer.setConsumeThreadMax(question.getIntValue("threads", 1));
        consumer.setAwaitTerminationMillisWhenShutdown(5_000);
        consumer.setPollNameServerInterval(Client.INTERVAL_MS);
        consumer.setHeartbeatBrokerInterval(Client.INTERVAL_MS);
        consumer.setPersistConsumerOffsetInterval(Client.INTERVAL_MS);
        if (question.containsKey("max_reconsume_times")) consumer.setMaxReconsumeTimes(question.getIntValue("max_reconsume_times"));
        if (question.getBooleanValue("broadcasting")) Extra.broadcast(consumer);
        subscribe(question);
        if (question.getBooleanValue("orderly")) {
            consumer.setSuspendCurrentQueueTimeMillis(100);
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) ->
                handle(messages.get(0)) ? ConsumeOrderlyStatus.SUCCESS : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT);
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                context.setDelayLevelWhenNextConsume(retryLevel);
                return handle(messages.get(0)) ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER;
            });
        }
        consumer.start();
    }

    private void subscribe(JSONObject question) throws Exception {
        String topic = question.getString("topic");
        if (question.containsKey("sql")) {
            consumer.subscribe(topic, MessageSelector.bySql(question.getString("sql")));
        } else {
            consumer.subscribe(topic, question.containsKey("tags") ? question.getString("tags") : "*");
        }
    }

    private static Set<String> set(JSONArray texts) {
        return new HashSet<>(texts == null ? List.of() : texts.toJavaList(String.class));
    }

    /** Whether the message is done with. */
    private boolean handle(MessageExt message) {
        JSONObject shown = Show.of(message);
        String body = shown.getString("body");
        boolean fails = failAlways.contains(body) || (message.getReconsumeTimes() == 0 && failOnce.contains(body));
        shown.put("member", name);
        shown.put("thread", Thread.currentThread().getName());
        shown.put("handled_timestamp", System.currentTimeMillis());
        shown.put("failed", fails);
        if (reply != null && !fails) answer(message);
        handled.add(shown);
        return !fails;
    }

    private void answer(MessageExt request) {
        try {
            replies.send(MessageUtil.createReplyMessage(request, (reply + Show.text(request.getBody())).getBytes("UTF-8")), 3_000);
        } catch (Exception error) {
            throw new IllegalStateException("no reply", error);
        }
    }

    /**
     * What it is done with, once it is so much or the time has passed; with "came" also what it gave back, with "begins" only bodies
     * that begin so.
     */
    List<JSONObject> handled(JSONObject question) throws InterruptedException {
        boolean all = question.getBooleanValue("came");
        String begins = question.containsKey("begins") ? question.getString("begins") : "";
        return handled.await(
            event -> (all || !event.getBooleanValue("failed")) && Show.text(Show.body(event)).startsWith(begins),
            question.getIntValue("count"), question.getLongValue("timeout_ms"));
    }

    /** The queues it has, once they are so many or the time has passed. */
    int[] assigned(String topic, int count, long timeoutMs) throws InterruptedException {
        long deadline = System.nanoTime() + timeoutMs * 1_000_000;
        int[] queues = assigned(topic);
        for (; queues.length != count && System.nanoTime() < deadline; queues = assigned(topic)) Thread.sleep(20);
        return queues;
    }

    private int[] assigned(String topic) {
        return consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().entrySet().stream()
            .filter(entry -> entry.getKey().getTopic().equals(topic) && !entry.getValue().isDropped())
            .mapToInt(entry -> entry.getKey().getQueueId()).sorted().toArray();
    }

    /** Whether messages lie in it that are not done with. */
    boolean isBusy() {
        return consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().values().stream()
            .anyMatch(queue -> queue.getMsgCount().get() > 0);
    }

    void close() {
        consumer.getDefaultMQPushConsumerImpl().persistConsumerOffset();
        consumer.shutdown();
    }
}
