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
 * A small application of Spring Boot with rocketmq-spring: a template, and the listeners of Listeners. Driven by lines of JSON (see
 * Lines): a question names a method of the template, or asks what a listener saw.
 *
 * Arguments: properties of the application, as Spring Boot takes them.
 */
@SpringBootConfiguration
@EnableAutoConfiguration
@Import(Listeners.class)
public class SpringApp {
    private static final long PATIENCE_MS = 10_000;
    private final ConfigurableApplicationContext context;
    private final RocketMQTemplate template;

    private SpringApp(ConfigurableApplicationContext context) {
        this.context = context;
        this.template = context.getBean(RocketMQTemplate.class);
    }

    /** What travels as JSON in a body. */
    public record Order(String id, int amount) {
    }

    /** For Spring; the other constructor is for main. */
    SpringApp() {
        this.context = null;
        this.template = null;
    }

    public static void main(String[] args) throws Exception {
        Lines.keepOutputForAnswers();
        Lines.serve(new SpringApp(SpringApplication.run(SpringApp.class, args))::answer);
    }

    private Object answer(JSONObject question) throws Exception {
        String destination = question.getString("destination");
        Message<?> message = message(question);
        switch (question.getString("do")) {
            case "seen": return Listeners.seen(question.getString("listener"), question.getIntValue("count"), question.getLongValue("timeout_ms"));
            case "has_queues": return hasQueues();
            case "syncSend": return show(template.syncSend(destination, message, PATIENCE_MS, question.getIntValue("level")));
            case "asyncSend": return asyncSend(destination, message);
            case "sendOneWay":
                template.sendOneWay(destination, message);
                return null;
            case "syncSendOrderly": return show(template.syncSendOrderly(destination, message, question.getString("hash_key")));
            case "batch": return batch(destination, question.getJSONArray("payloads"));
            case "convertAndSend":
                template.convertAndSend(destination, new Order(question.getString("id"), question.getIntValue("amount")));
                return null;
            case "syncSendDelayTimeSeconds": return show(template.syncSendDelayTimeSeconds(destination, message, question.getLongValue("time")));
            case "syncSendDelayTimeMills": return show(template.syncSendDelayTimeMills(destination, message, question.getLongValue("time")));
            case "syncSendDeliverTimeMills": return show(template.syncSendDeliverTimeMills(destination, message, question.getLongValue("time")));
            case "sendMessageInTransaction":
                return template.sendMessageInTransaction(destination, message, question.getString("local")).getLocalTransactionState().name();
            case "sendAndReceive": return template.sendAndReceive(destination, message, String.class, PATIENCE_MS);
            case "receive": return template.receive(String.class, question.getLongValue("timeout_ms"));
            default: throw new IllegalArgumentException("no such question: " + question);
        }
    }

    private static Message<?> message(JSONObject question) {
        if (!question.containsKey("payload")) return null;
        MessageBuilder<String> message = MessageBuilder.withPayload(question.getString("payload"));
        if (question.containsKey("keys")) message.setHeader(RocketMQHeaders.KEYS, question.getString("keys"));
        JSONObject headers = question.getJSONObject("headers");
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
        return show(result.get(PATIENCE_MS, TimeUnit.MILLISECONDS));
    }

    private Object batch(String destination, JSONArray payloads) {
        List<Message<String>> messages = new ArrayList<>();
        for (String payload : payloads.toJavaList(String.class)) messages.add(MessageBuilder.withPayload(payload).build());
        return show(template.syncSend(destination, messages));
    }

    private static Map<String, Object> show(SendResult result) {
        return Map.of("status", result.getSendStatus().name(), "msg_id", result.getMsgId(), "queue_id", result.getMessageQueue().getQueueId());
    }

    /** Whether each listener has queues of its topic, so that it sees what is sent from now on; given some time. */
    private boolean hasQueues() throws InterruptedException {
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(3 * PATIENCE_MS);
        while (!hasQueuesNow() && System.nanoTime() < deadline) Thread.sleep(20);
        return hasQueuesNow();
    }

    private boolean hasQueuesNow() {
        return context.getBeansOfType(DefaultRocketMQListenerContainer.class).values().stream().allMatch(container ->
            container.getConsumer().getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet().stream()
                .anyMatch(queue -> queue.getTopic().equals(container.getTopic())));
    }
}
