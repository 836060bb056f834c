import com.alibaba.cloud.stream.binder.rocketmq.constant.RocketMQConst;
import com.alibaba.fastjson2.JSON;
import java.io.PrintStream;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Consumer;
import org.apache.rocketmq.client.producer.MessageQueueSelector;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.SpringBootConfiguration;
import org.springframework.boot.autoconfigure.EnableAutoConfiguration;
import org.springframework.cloud.stream.function.StreamBridge;
import org.springframework.context.ConfigurableApplicationContext;
import org.springframework.context.annotation.Bean;
import org.springframework.messaging.Message;
import org.springframework.messaging.MessageHeaders;
import org.springframework.messaging.support.MessageBuilder;
import org.springframework.util.MimeTypeUtils;

/**
 * A small application of Spring Cloud Stream with the binder for RocketMQ: two functions that consume, and a StreamBridge.
 * tests/conformance/client_programs.py describes its arguments, what it does, and the events that it prints.
 */
@SpringBootConfiguration
@EnableAutoConfiguration
public class StreamApp {
    private static final PrintStream OUTPUT = System.out;
    private static final String PREFIX_OF_HEADERS = "ROCKET_";
    private final Map<String, Integer> deliveries = new ConcurrentHashMap<>();

    public static void main(String[] args) throws Exception {
        System.setOut(System.err);  // Logs go there.
        SpringApplication application = new SpringApplication(StreamApp.class);
        application.setDefaultProperties(properties(args));
        try (ConfigurableApplicationContext context = application.run()) {
            send(context.getBean(StreamBridge.class));
            report("finished", Map.of());
            while (System.in.read() >= 0) {
                // The end of standard input stops the application.
            }
        }
        System.exit(0);
    }

    private static Map<String, Object> properties(String[] args) {
        String prefix = args[1];
        Map<String, Object> properties = new HashMap<>();
        properties.put("spring.main.banner-mode", "off");
        properties.put("logging.level.root", "warn");
        properties.put("spring.cloud.function.definition", "plain;ordered");
        String binder = "spring.cloud.stream.rocketmq.binder.";
        properties.put(binder + "name-server", args[0]);
        if (args.length > 2) {
            properties.put(binder + "access-key", args[2]);
            properties.put(binder + "secret-key", args[3]);
        }
        for (String name : new String[] {"plain", "ordered"}) {
            String in = "bindings." + name + "-in-0.";
            String out = "bindings." + name + "-out-0.";
            properties.put("spring.cloud.stream." + in + "destination", prefix + name);
            properties.put("spring.cloud.stream." + in + "group", prefix + name + "-group");
            properties.put("spring.cloud.stream." + in + "consumer.max-attempts", 1);  // The broker delivers a message again.
            properties.put("spring.cloud.stream." + out + "destination", prefix + name);
            properties.put("spring.cloud.stream.rocketmq." + in + "consumer.consume-from-where", "CONSUME_FROM_FIRST_OFFSET");
            properties.put("spring.cloud.stream.rocketmq." + out + "producer.group", prefix + name + "-producers");
            properties.put("spring.cloud.stream.rocketmq." + out + "producer.send-type", "Sync");
            properties.put("spring.cloud.stream.rocketmq." + out + "producer.send-msg-timeout", 10_000);
        }
        properties.put("spring.cloud.stream.rocketmq.bindings.plain-in-0.consumer.subscription", "paid || late");
        // The default of the binder is 0: the first failure makes a dead letter.
        properties.put("spring.cloud.stream.rocketmq.bindings.plain-in-0.consumer.push.max-reconsume-times", 16);
        properties.put("spring.cloud.stream.rocketmq.bindings.ordered-in-0.consumer.push.orderly", true);
        properties.put("spring.cloud.stream.rocketmq.bindings.ordered-out-0.producer.message-queue-selector", "byKey");
        return properties;
    }

    // --- functions and the queue selector ------------------------------------------------------------

    @Bean
    public Consumer<Message<String>> plain() {
        return message -> received("plain", message);
    }

    @Bean
    public Consumer<Message<String>> ordered() {
        return message -> received("ordered", message);
    }

    @Bean
    public MessageQueueSelector byKey() {
        return (queues, message, headers) -> queues.get(Math.floorMod(((MessageHeaders) headers).get("hash_key").hashCode(), queues.size()));
    }

    private void received(String listener, Message<String> message) {
        String body = message.getPayload();
        MessageHeaders headers = message.getHeaders();
        String id = String.valueOf(headers.get(PREFIX_OF_HEADERS + RocketMQConst.Headers.MESSAGE_ID));
        int earlier = deliveries.merge(id, 1, Integer::sum) - 1;  // The binder does not pass the count of RocketMQ on.
        Map<String, Object> event = new LinkedHashMap<>();
        event.put("listener", listener);
        event.put("body", body);
        event.put("tags", headers.get(PREFIX_OF_HEADERS + RocketMQConst.Headers.TAGS));
        event.put("keys", headers.get(PREFIX_OF_HEADERS + RocketMQConst.Headers.KEYS));
        event.put("reconsume_times", earlier);
        event.put("msg_id", id);
        event.put("delay_ms", System.currentTimeMillis() - (Long) headers.get(PREFIX_OF_HEADERS + RocketMQConst.Headers.BORN_TIMESTAMP));
        report("received", event);
        if (body.equals("fails once") && earlier == 0) throw new IllegalStateException("the first delivery fails");
    }

    // --- sending -------------------------------------------------------------------------------------

    private static void send(StreamBridge bridge) {
        send(bridge, "plain", "sync", Map.of(RocketMQConst.Headers.TAGS, "paid", RocketMQConst.Headers.KEYS, "k-1"));
        send(bridge, "plain", "not selected", Map.of(RocketMQConst.Headers.TAGS, "open"));
        send(bridge, "plain", "delayed", Map.of(RocketMQConst.Headers.TAGS, "late", RocketMQConst.PROPERTY_DELAY_TIME_LEVEL, 1));
        send(bridge, "plain", "fails once", Map.of(RocketMQConst.Headers.TAGS, "paid"));
        for (int number = 0; number < 8; number++) {
            for (String key : new String[] {"a", "b"}) send(bridge, "ordered", key + " " + number, Map.of("hash_key", key));
        }
    }

    private static void send(StreamBridge bridge, String name, String body, Map<String, Object> headers) {
        Map<String, Object> event = new LinkedHashMap<>();
        try {
            // Whatever its type, the binder stores the text as JSON, with quotation marks, and its consumer removes them.
            boolean isSent = bridge.send(name + "-out-0", MessageBuilder.withPayload(body).copyHeaders(headers).build(), MimeTypeUtils.TEXT_PLAIN);
            event.put("body", body);
            event.put("status", isSent ? "SEND_OK" : "not sent");
            event.put("msg_id", null);  // A StreamBridge returns no ID.
            report("sent", event);
        } catch (RuntimeException error) {
            event.put("call", "send");
            event.put("text", String.valueOf(error));
            report("error", event);
        }
    }

    private static synchronized void report(String kind, Map<String, Object> event) {
        Map<String, Object> printed = new LinkedHashMap<>(event);
        printed.put("event", kind);
        OUTPUT.println(JSON.toJSONString(printed, com.alibaba.fastjson2.JSONWriter.Feature.WriteMapNullValue));
        OUTPUT.flush();
    }
}
