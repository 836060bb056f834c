import com.alibaba.fastjson2.JSONObject;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.annotation.RocketMQMessageListener;
import org.apache.rocketmq.client.annotation.RocketMQTransactionListener;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;
import org.apache.rocketmq.client.common.Pair;
import org.apache.rocketmq.client.core.RocketMQClientTemplate;
import org.apache.rocketmq.client.core.RocketMQListener;
import org.apache.rocketmq.client.core.RocketMQTransactionChecker;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.SpringBootConfiguration;
import org.springframework.boot.autoconfigure.EnableAutoConfiguration;
import org.springframework.messaging.Message;
import org.springframework.messaging.support.MessageBuilder;
import org.springframework.stereotype.Component;

/**
 * An application of rocketmq-v5-client-spring-boot-starter: its template, and one listener for each feature.
 *
 * Arguments: properties of the application.
 */
@SpringBootConfiguration
@EnableAutoConfiguration
public class SpringV5App {
    private static final long TIMEOUT_MS = 30_000;
    private static final Duration INVISIBLE = Duration.ofSeconds(60);
    private static final Map<String, EventLog> LOGS = new ConcurrentHashMap<>();

    /** An object that is sent as JSON. */
    public record Order(String id, int amount) {
    }

    public static void main(String[] args) throws Exception {
        CommandLoop.reserveOutput();
        RocketMQClientTemplate template = SpringApplication.run(SpringV5App.class, args).getBean(RocketMQClientTemplate.class);
        CommandLoop.serve(command -> run(template, command));
    }

    private static Object run(RocketMQClientTemplate template, JSONObject command) throws Exception {
        String destination = command.getString("destination");
        String payload = command.getString("payload");
        switch (command.getString("command")) {
            case "received": return log(command.getString("listener")).await(event -> true, command.getIntValue("count"), command.getLongValue("timeout_ms"));
            case "syncSendNormalMessage": return id(template.syncSendNormalMessage(destination, message(command)));
            case "object":
                return id(template.syncSendNormalMessage(destination, (Object) new Order(command.getString("id"), command.getIntValue("amount"))));
            case "asyncSendNormalMessage": {
                CompletableFuture<SendReceipt> future = new CompletableFuture<>();
                template.asyncSendNormalMessage(destination, payload, future);
                return id(future.get(TIMEOUT_MS, TimeUnit.MILLISECONDS));
            }
            case "syncSendFifoMessage": return id(template.syncSendFifoMessage(destination, payload, command.getString("group")));
            case "syncSendDelayMessage":
                return id(template.syncSendDelayMessage(destination, payload, Duration.ofMillis(command.getLongValue("delay_ms"))));
            case "sendMessageInTransaction": {
                Pair<SendReceipt, Transaction> sent = template.sendMessageInTransaction(destination, payload);
                if ("commit".equals(command.getString("end"))) sent.getTransaction().commit();
                if ("rollback".equals(command.getString("end"))) sent.getTransaction().rollback();
                return id(sent.getSendReceipt());
            }
            case "receive": return receive(template, command.getIntValue("count"));
            default: throw new IllegalArgumentException("unknown command: " + command);
        }
    }

    private static Message<String> message(JSONObject command) {
        MessageBuilder<String> message = MessageBuilder.withPayload(command.getString("payload"));
        JSONObject headers = command.getJSONObject("headers");
        if (headers != null) headers.forEach(message::setHeader);
        return message.build();
    }

    private static String id(SendReceipt receipt) {
        return receipt.getMessageId().toString();
    }

    private static List<String> receive(RocketMQClientTemplate template, int count) throws Exception {
        List<String> bodies = new ArrayList<>();
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(TIMEOUT_MS);
        while (bodies.size() < count && System.nanoTime() < deadline) {
            for (MessageView message : template.receive(16, INVISIBLE)) {
                bodies.add(body(message));
                template.ack(message);
            }
        }
        return bodies;
    }

    private static String body(MessageView message) {
        return StandardCharsets.UTF_8.decode(message.getBody()).toString();
    }

    // --- listeners ----------------------------------------------------------------------------------------------------------------

    private static EventLog log(String listener) {
        return LOGS.computeIfAbsent(listener, name -> new EventLog());
    }

    private static void record(String listener, MessageView message) {
        JSONObject event = new JSONObject();
        event.put("id", message.getMessageId().toString());
        event.put("body", body(message));
        event.put("tag", message.getTag().orElse(null));
        event.put("keys", List.copyOf(message.getKeys()));
        event.put("properties", message.getProperties());
        event.put("attempt", message.getDeliveryAttempt());
        event.put("received_ms", System.currentTimeMillis());
        log(listener).add(event);
    }

    @Component
    @RocketMQMessageListener(topic = "v5-texts", consumerGroup = "v5-texts-group", tag = "paid || refunded")
    static class Tagged implements RocketMQListener {
        @Override public ConsumeResult consume(MessageView message) {
            record("tagged", message);
            return ConsumeResult.SUCCESS;
        }
    }

    @Component
    @RocketMQMessageListener(topic = "v5-texts", consumerGroup = "v5-sql-group", tag = "amount > 10", filterExpressionType = "sql92")
    static class Sql implements RocketMQListener {
        @Override public ConsumeResult consume(MessageView message) {
            record("sql", message);
            return ConsumeResult.SUCCESS;
        }
    }

    @Component
    @RocketMQMessageListener(topic = "v5-ordered", consumerGroup = "v5-ordered-group", tag = "*")
    static class Ordered implements RocketMQListener {
        @Override public ConsumeResult consume(MessageView message) {
            record("ordered", message);
            return ConsumeResult.SUCCESS;
        }
    }

    @Component
    @RocketMQMessageListener(topic = "v5-failing", consumerGroup = "v5-failing-group", tag = "*")
    static class Failing implements RocketMQListener {
        @Override public ConsumeResult consume(MessageView message) {
            record("failing", message);
            return ConsumeResult.FAILURE;
        }
    }

    @Component
    @RocketMQMessageListener(topic = "v5-delayed", consumerGroup = "v5-delayed-group", tag = "*")
    static class Delayed implements RocketMQListener {
        @Override public ConsumeResult consume(MessageView message) {
            record("delayed", message);
            return ConsumeResult.SUCCESS;
        }
    }

    @Component
    @RocketMQMessageListener(topic = "v5-transactions", consumerGroup = "v5-transactions-group", tag = "*")
    static class Committed implements RocketMQListener {
        @Override public ConsumeResult consume(MessageView message) {
            record("committed", message);
            return ConsumeResult.SUCCESS;
        }
    }

    @RocketMQTransactionListener
    static class Checker implements RocketMQTransactionChecker {
        @Override public TransactionResolution check(MessageView message) {
            record("checks", message);
            return TransactionResolution.COMMIT;
        }
    }
}
