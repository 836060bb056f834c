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

/** One listener for each thing that a listener of rocketmq-spring can do. Each notes what it sees. */
@Configuration
public class Listeners {
    private static final Map<String, Record> SEEN = new ConcurrentHashMap<>();

    static List<JSONObject> seen(String listener, int count, long timeoutMs) throws InterruptedException {
        return record(listener).await(event -> true, count, timeoutMs);
    }

    private static Record record(String listener) {
        return SEEN.computeIfAbsent(listener, name -> new Record());
    }

    private static void note(String listener, Map<String, Object> what) {
        JSONObject event = new JSONObject(what);
        event.put("seen_timestamp", System.currentTimeMillis());
        record(listener).add(event);
    }

    private static void note(String listener, MessageExt message) {
        note(listener, Map.of(
            "body", new String(message.getBody()), "tags", String.valueOf(message.getTags()), "keys", String.valueOf(message.getKeys()),
            "queue_id", message.getQueueId(), "reconsume_times", message.getReconsumeTimes()));
    }

    @Component
    @RocketMQMessageListener(topic = "spring-texts", consumerGroup = "spring-texts-group", selectorExpression = "paid || refunded")
    static class Tagged implements RocketMQListener<MessageExt> {
        @Override public void onMessage(MessageExt message) {
            note("tagged", message);
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-texts", consumerGroup = "spring-sql-group", selectorType = SelectorType.SQL92,
        selectorExpression = "amount > 10 AND TAGS IS NOT NULL")
    static class Sql implements RocketMQListener<MessageExt> {
        @Override public void onMessage(MessageExt message) {
            note("sql", message);
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-objects", consumerGroup = "spring-objects-group")
    static class Typed implements RocketMQListener<SpringApp.Order> {
        @Override public void onMessage(SpringApp.Order order) {
            note("typed", Map.of("id", order.id(), "amount", order.amount()));
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-ordered", consumerGroup = "spring-ordered-group", consumeMode = ConsumeMode.ORDERLY)
    static class Orderly implements RocketMQListener<MessageExt> {
        @Override public void onMessage(MessageExt message) {
            note("orderly", message);
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-broadcast", consumerGroup = "spring-broadcast-group", messageModel = MessageModel.BROADCASTING)
    static class Broadcast implements RocketMQListener<MessageExt> {
        @Override public void onMessage(MessageExt message) {
            note("broadcast", message);
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-failing", consumerGroup = "spring-failing-group", maxReconsumeTimes = 2,
        delayLevelWhenNextConsume = 1)
    static class Failing implements RocketMQListener<MessageExt>, RocketMQPushConsumerLifecycleListener {
        /** The group's retry topic is made after its first look at routes; the next is 30 s away unless told otherwise. */
        @Override public void prepareStart(DefaultMQPushConsumer consumer) {
            consumer.setPollNameServerInterval(1_000);
        }

        @Override public void onMessage(MessageExt message) {
            note("failing", message);
            throw new IllegalStateException("as it shall");
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-later", consumerGroup = "spring-later-group")
    static class Later implements RocketMQListener<MessageExt> {
        @Override public void onMessage(MessageExt message) {
            note("later", message);
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-paid", consumerGroup = "spring-paid-group")
    static class Committed implements RocketMQListener<MessageExt> {
        @Override public void onMessage(MessageExt message) {
            note("committed", message);
        }
    }

    @Component
    @RocketMQMessageListener(topic = "spring-questions", consumerGroup = "spring-questions-group")
    static class Answering implements RocketMQReplyListener<String, String> {
        @Override public String onMessage(String question) {
            note("answering", Map.of("body", question));
            return "answer to " + question;
        }
    }

    /** The argument says what the local transaction comes to; a check is told what the header "checked" says. */
    @Component
    @RocketMQTransactionListener
    static class Transactions implements RocketMQLocalTransactionListener {
        @Override public RocketMQLocalTransactionState executeLocalTransaction(Message message, Object local) {
            return RocketMQLocalTransactionState.valueOf((String) local);
        }

        @Override public RocketMQLocalTransactionState checkLocalTransaction(Message message) {
            String told = String.valueOf(message.getHeaders().get("checked"));
            note("checks", Map.of("body", new String((byte[]) message.getPayload()), "told", told));
            return RocketMQLocalTransactionState.valueOf(told);
        }
    }
}
