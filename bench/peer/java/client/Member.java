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
 * A push consumer and the messages that it handled. The options of the command that creates it:
 *
 * "group", "topic"; "tags" or "sql"; "orderly", "broadcasting"; "from" ("first" or "last"); "threads" (default 1); "fail": bodies to
 * send back once; "fail_always": bodies to send back each time; "retry_level": delay level of the retry; "max_reconsume_times";
 * "reply": prefix of the replies to requests, followed by the body of the request; "pop_invisible_ms": let the broker assign the queues,
 * and pop with this invisible time if the mode of the group is POP.
 */
final class Member {
    private final String name;
    private final DefaultMQPushConsumer consumer;
    private final EventLog handled = new EventLog();
    private final Set<String> failOnce;
    private final Set<String> failAlways;
    private final int retryLevel;
    private final String reply;
    private final MQProducer replies;

    Member(String nameServer, String name, JSONObject command, MQProducer replies) throws Exception {
        this.name = name;
        this.replies = replies;
        failOnce = set(command.getJSONArray("fail"));
        failAlways = set(command.getJSONArray("fail_always"));
        retryLevel = command.getIntValue("retry_level", 0);
        reply = command.getString("reply");
        consumer = new DefaultMQPushConsumer(command.getString("group"));
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName(name);
        consumer.setConsumeFromWhere("last".equals(command.getString("from"))
            ? ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET : ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeThreadMin(command.getIntValue("threads", 1));
        consumer.setConsumeThreadMax(command.getIntValue("threads", 1));
        consumer.setAwaitTerminationMillisWhenShutdown(5_000);
        consumer.setMqClientApiTimeout(Client.API_TIMEOUT_MS);
        consumer.setPollNameServerInterval(Client.INTERVAL_MS);
        consumer.setHeartbeatBrokerInterval(Client.INTERVAL_MS);
        consumer.setPersistConsumerOffsetInterval(Client.INTERVAL_MS);
        if (command.containsKey("max_reconsume_times")) consumer.setMaxReconsumeTimes(command.getIntValue("max_reconsume_times"));
        if (command.getBooleanValue("broadcasting")) Extra.broadcast(consumer);
        if (command.containsKey("pop_invisible_ms")) Extra.pop(consumer, command.getLongValue("pop_invisible_ms"));
        subscribe(command);
        if (command.getBooleanValue("orderly")) {
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

    private void subscribe(JSONObject command) throws Exception {
        String topic = command.getString("topic");
        if (command.containsKey("sql")) {
            consumer.subscribe(topic, MessageSelector.bySql(command.getString("sql")));
        } else {
            consumer.subscribe(topic, command.containsKey("tags") ? command.getString("tags") : "*");
        }
    }

    private static Set<String> set(JSONArray texts) {
        return new HashSet<>(texts == null ? List.of() : texts.toJavaList(String.class));
    }

    /** Return true if the message is consumed, false if it is to be sent back. */
    private boolean handle(MessageExt message) {
        JSONObject json = Json.of(message);
        String body = json.getString("body");
        boolean fails = failAlways.contains(body) || (message.getReconsumeTimes() == 0 && failOnce.contains(body));
        json.put("member", name);
        json.put("thread", Thread.currentThread().getName());
        json.put("handled_timestamp", System.currentTimeMillis());
        json.put("failed", fails);
        if (reply != null && !fails) reply(message);
        handled.add(json);
        return !fails;
    }

    private void reply(MessageExt request) {
        try {
            replies.send(MessageUtil.createReplyMessage(request, (reply + Json.text(request.getBody())).getBytes("UTF-8")), 3_000);
        } catch (Exception error) {
            throw new IllegalStateException("the reply failed", error);
        }
    }

    /**
     * Return the consumed messages when there are "count" of them, or after "timeout_ms". With "failed", include messages that were
     * sent back. With "prefix", include only bodies that start with it.
     */
    List<JSONObject> handled(JSONObject command) throws InterruptedException {
        boolean all = command.getBooleanValue("failed");
        String prefix = command.containsKey("prefix") ? command.getString("prefix") : "";
        return handled.await(
            event -> (all || !event.getBooleanValue("failed")) && Json.text(Json.body(event)).startsWith(prefix),
            command.getIntValue("count"), command.getLongValue("timeout_ms"));
    }

    /** Return the IDs of the assigned queues when there are `count` of them, or after the timeout. */
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

    /** Return true if the consumer holds messages that it has not consumed. */
    boolean isBusy() {
        return consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().values().stream()
            .anyMatch(queue -> queue.getMsgCount().get() > 0);
    }

    void close() {
        consumer.getDefaultMQPushConsumerImpl().persistConsumerOffset();
        consumer.shutdown();
    }
}
