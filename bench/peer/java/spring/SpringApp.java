import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.spring.core.RocketMQTemplate;
import org.apache.rocketmq.spring.support.DefaultRocketMQListenerContainer;
import org.apache.rocketmq.spring.support.RocketMQHeaders;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.SpringBootConfiguration;
import org.springframework.boot.autoconfigure.EnableAutoConfiguration;
import org.springframework.context.ConfigurableApplicationContext;
import org.springframework.context.annotation.Import;
import org.springframework.messaging.Message;
import org.springframework.messaging.support.MessageBuilder;

/**
 * A small Spring Boot application with rocketmq-spring: a template and the listeners of Listeners. Controlled by lines of JSON (see
 * CommandLoop): a command calls a method of the template, or returns the messages that a listener received.
 *
 * Arguments: properties of the application in the form of Spring Boot.
 */
@SpringBootConfiguration
@EnableAutoConfiguration
@Import(Listeners.class)
public class SpringApp {
    private static final long TIMEOUT_MS = 10_000;
    private final ConfigurableApplicationContext context;
    private final RocketMQTemplate template;

    private SpringApp(ConfigurableApplicationContext context) {
        this.context = context;
        this.template = context.getBean(RocketMQTemplate.class);
    }

    /** An object that is sent as JSON. */
    public record Order(String id, int amount) {
    }

    /** Constructor for Spring. The method main uses the other one. */
    SpringApp() {
        this.context = null;
        this.template = null;
    }

    public static void main(String[] args) throws Exception {
        CommandLoop.reserveOutput();
        CommandLoop.serve(new SpringApp(SpringApplication.run(SpringApp.class, args))::run);
    }

    private Object run(JSONObject command) throws Exception {
        String destination = command.getString("destination");
        Message<?> message = message(command);
        switch (command.getString("command")) {
            case "received": return Listeners.received(command.getString("listener"), command.getIntValue("count"), command.getLongValue("timeout_ms"));
            case "has_queues": return hasQueues();
            case "syncSend": return show(template.syncSend(destination, message, TIMEOUT_MS, command.getIntValue("level")));
            case "asyncSend": return asyncSend(destination, message);
            case "sendOneWay":
                template.sendOneWay(destination, message);
                return null;
            case "syncSendOrderly": return show(template.syncSendOrderly(destination, message, command.getString("hash_key")));
            case "batch": return batch(destination, command.getJSONArray("payloads"));
            case "convertAndSend":
                template.convertAndSend(destination, new Order(command.getString("id"), command.getIntValue("amount")));
                return null;
            case "syncSendDelayTimeSeconds": return show(template.syncSendDelayTimeSeconds(destination, message, command.getLongValue("time")));
            case "syncSendDelayTimeMills": return show(template.syncSendDelayTimeMills(destination, message, command.getLongValue("time")));
            case "syncSendDeliverTimeMills": return show(template.syncSendDeliverTimeMills(destination, message, command.getLongValue("time")));
            case "sendMessageInTransaction":
                return template.sendMessageInTransaction(destination, message, command.getString("local")).getLocalTransactionState().name();
            case "sendAndReceive": return template.sendAndReceive(destination, message, String.class, TIMEOUT_MS);
            case "receive": return template.receive(String.class, command.getLongValue("timeout_ms"));
            default: throw new IllegalArgumentException("unknown command: " + command);
        }
    }

    private static Message<?> message(JSONObject command) {
        if (!command.containsKey("payload")) return null;
        MessageBuilder<String> message = MessageBuilder.withPayload(command.getString("payload"));
        if (command.containsKey("keys")) message.setHeader(RocketMQHeaders.KEYS, command.getString("keys"));
        JSONObject headers = command.getJSONObject("headers");
        if (headers != null) headers.forEach(message::setHeader);
        return message.build();
    }

    private Object asyncSend(String destination, Message<?> message) throws Exception {
        CompletableFuture<SendResult> result = new CompletableFuture<>();
        template.asyncSend(destination, message, new SendCallback() {
            @Override public void onSuccess(SendResult sent) {
                result.complete(sent);
            }

            @Override public void onException(Throwable error) {
                result.completeExceptionally(error);
            }
        });
        return show(result.get(TIMEOUT_MS, TimeUnit.MILLISECONDS));
    }

    private Object batch(String destination, JSONArray payloads) {
        List<Message<String>> messages = new ArrayList<>();
        for (String payload : payloads.toJavaList(String.class)) messages.add(MessageBuilder.withPayload(payload).build());
        return show(template.syncSend(destination, messages));
    }

    private static Map<String, Object> show(SendResult result) {
        return Map.of("status", result.getSendStatus().name(), "msg_id", result.getMsgId(), "queue_id", result.getMessageQueue().getQueueId());
    }

    /** Wait until each listener has queues of its topic, so that it receives later messages. Return false after a timeout. */
    private boolean hasQueues() throws InterruptedException {
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(3 * TIMEOUT_MS);
        while (!hasQueuesNow() && System.nanoTime() < deadline) Thread.sleep(20);
        return hasQueuesNow();
    }

    private boolean hasQueuesNow() {
        return context.getBeansOfType(DefaultRocketMQListenerContainer.class).values().stream().allMatch(container ->
            container.getConsumer().getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet().stream()
                .anyMatch(queue -> queue.getTopic().equals(container.getTopic())));
    }
}
