import com.alibaba.fastjson2.JSONObject;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.spring.annotation.ConsumeMode;
import org.apache.rocketmq.spring.annotation.MessageModel;
import org.apache.rocketmq.spring.annotation.RocketMQMessageListener;
import org.apache.rocketmq.spring.annotation.RocketMQTransactionListener;
import org.apache.rocketmq.spring.annotation.SelectorType;
import org.apache.rocketmq.spring.core.RocketMQListener;
import org.apache.rocketmq.spring.core.RocketMQLocalTransactionListener;
import org.apache.rocketmq.spring.core.RocketMQLocalTransactionState;
import org.apache.rocketmq.spring.core.RocketMQPushConsumerLifecycleListener;
import org.apache.rocketmq.spring.core.RocketMQReplyListener;
import org.springframework.context.annotation.Configuration;
import org.springframework.messaging.Message;
import org.springframework.stereotype.Component;

/** One listener for each feature of rocketmq-spring. Each records the messages that it receives. */
@Configuration
public class Listeners {
    private static final Map<String, EventLog> LOGS = new ConcurrentHashMap<>();

    static List<JSONObject> received(String listener, int count, long timeoutMs) throws InterruptedException {
        return log(listener).await(event -> true, count, timeoutMs);
    }

    private static EventLog log(String listener) {
        return LOGS.computeIfAbsent(listener, name -> new EventLog());
    }

    private static void record(String listener, Map<String, Object> fields) {
        JSONObject event = new JSONObject(fields);
        event.put("received_timestamp", System.currentTimeMillis());
        log(listener).add(event);
    }

    private static void record(String listener, MessageExt message) {
        record(listener, Map.of(
            "body", new String(message.getBody()), "tags", String.valueOf(message.getTags()), "keys", String.valueOf(message.getKeys()),
            "queue_id", message.getQueueId(), "reconsume_times", message.getReconsumeTimes()));
    }

    @Component
    @RocketMQMessageListener(topic = "spring-texts", consumerGroup = "spring-texts-group", selectorExpression = "paid || refunded")
    static class Tagged implements RocketMQListener<MessageExt> {
        @Override public void onMessage(MessageExt message) {
            record("tagged", message);
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-texts", consumerGroup = "spring-sql-group", selectorType = SelectorType.SQL92,
        selectorExpression = "amount > 10 AND TAGS IS NOT NULL")
    static class Sql implements RocketMQListener<MessageExt> {
        @Override public void onMessage(MessageExt message) {
            record("sql", message);
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-objects", consumerGroup = "spring-objects-group")
    static class Typed implements RocketMQListener<SpringApp.Order> {
        @Override public void onMessage(SpringApp.Order order) {
            record("typed", Map.of("id", order.id(), "amount", order.amount()));
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-ordered", consumerGroup = "spring-ordered-group", consumeMode = ConsumeMode.ORDERLY)
    static class Orderly implements RocketMQListener<MessageExt> {
        @Override public void onMessage(MessageExt message) {
            record("orderly", message);
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-broadcast", consumerGroup = "spring-broadcast-group", messageModel = MessageModel.BROADCASTING)
    static class Broadcast implements RocketMQListener<MessageExt> {
        @Override public void onMessage(MessageExt message) {
            record("broadcast", message);
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-failing", consumerGroup = "spring-failing-group", maxReconsumeTimes = 2,
        delayLevelWhenNextConsume = 1)
    static class Failing implements RocketMQListener<MessageExt>, RocketMQPushConsumerLifecycleListener {
        /** The retry topic of the group is created after the first request for routes. The default interval is 30 s. */
        @Override public void prepareStart(DefaultMQPushConsumer consumer) {
            consumer.setPollNameServerInterval(1_000);
        }

        @Override public void onMessage(MessageExt message) {
            record("failing", message);
            throw new IllegalStateException("expected failure");
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-delayed", consumerGroup = "spring-delayed-group")
    static class Delayed implements RocketMQListener<MessageExt> {
        @Override public void onMessage(MessageExt message) {
            record("delayed", message);
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-paid", consumerGroup = "spring-paid-group")
    static class Committed implements RocketMQListener<MessageExt> {
        @Override public void onMessage(MessageExt message) {
            record("committed", message);
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-requests", consumerGroup = "spring-requests-group")
    static class Replying implements RocketMQReplyListener<String, String> {
        @Override public String onMessage(String request) {
            record("replying", Map.of("body", request));
            return "reply to " + request;
        }
    }

    /** The argument is the state of the local transaction, the header "checked" the state for a check. */
    @Component
    @RocketMQTransactionListener
    static class Transactions implements RocketMQLocalTransactionListener {
        @Override public RocketMQLocalTransactionState executeLocalTransaction(Message message, Object local) {
            return RocketMQLocalTransactionState.valueOf((String) local);
        }

        @Override public RocketMQLocalTransactionState checkLocalTransaction(Message message) {
            String state = String.valueOf(message.getHeaders().get("checked"));
            record("checks", Map.of("body", new String((byte[]) message.getPayload()), "state", state));
            return RocketMQLocalTransactionState.valueOf(state);
        }
    }
}
