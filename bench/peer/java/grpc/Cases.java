import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.function.Predicate;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.ClientException;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.ProducerBuilder;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionChecker;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/**
 * Cases of the conformance tests with RocketMQ's gRPC client. The module tests.conformance.grpc_clients.programs has the list.
 *
 * Arguments: ENDPOINT PREFIX CASES plain|tls [ACCESS_KEY SECRET_KEY]...
 */
public final class Cases {
    private static final long TIMEOUT_NS = 90_000_000_000L;
    /** Messages that one call of `take` receives. */
    private static final int SHARED = 4;
    private static final Duration AWAIT = Duration.ofSeconds(5);
    private static final Duration INVISIBLE = Duration.ofSeconds(10);
    private static final Duration CHANGED = Duration.ofSeconds(15);

    private final ClientServiceProvider provider = ClientServiceProvider.loadService();
    private final ClientConfiguration configuration;
    private final String prefix;
    private final List<Cases> accounts = new ArrayList<>();
    private final List<String> receiveErrors = new ArrayList<>();
    private long receiveNs; // start of the last call of receive

    private Cases(String endpoint, String prefix, boolean tls, String[] keys) {
        ClientConfigurationBuilder builder = ClientConfiguration.newBuilder().setEndpoints(endpoint).enableSsl(tls);
        if (keys.length > 0) builder.setCredentialProvider(new StaticSessionCredentialsProvider(keys[0], keys[1]));
        this.configuration = builder.build();
        this.prefix = prefix;
        if (keys.length == 2) this.accounts.add(this);
        for (int i = 0; keys.length > 2 && i < keys.length; i += 2) {
            this.accounts.add(new Cases(endpoint, prefix, tls, new String[] {keys[i], keys[i + 1]}));
        }
    }

    public static void main(String[] args) {
        String[] keys = Arrays.copyOfRange(args, 4, args.length);
        Cases cases = new Cases(args[0], args[1], args[3].equals("tls"), keys);
        for (String name : args[2].split(",")) {
            Map<String, Object> result = new HashMap<>();
            cases.receiveErrors.clear();
            try {
                result.putAll(cases.run(name));
                result.put("receive_errors", cases.receiveErrors);
            } catch (Exception error) {
                result.put("error", error.toString());
            }
            result.put("case", name);
            System.out.println(JsonText.of(result));
        }
        System.exit(0); // Threads of the client may still run.
    }

    private Map<String, Object> run(String name) throws Exception {
        switch (name) {
            case "normal": return normal();
            case "fifo": return fifo();
            case "delay": return delay();
            case "transaction": return transaction();
            case "simple": return simple();
            case "push": return push();
            case "filter": return filter();
            case "recall": return recall();
            case "rights": return rights();
            case "offer": return offer();
            case "take": return take();
            default: throw new IllegalArgumentException("no such case: " + name);
        }
    }

    // --- clients ------------------------------------------------------------------------------------------------------------------

    private Producer producer(String name, TransactionChecker checker) throws ClientException {
        ProducerBuilder builder = provider.newProducerBuilder().setClientConfiguration(configuration).setTopics(prefix + name);
        if (checker != null) builder.setTransactionChecker(checker);
        return builder.build();
    }

    private SimpleConsumer consumer(String name, String group, FilterExpression expression) throws ClientException {
        return provider.newSimpleConsumerBuilder().setClientConfiguration(configuration).setConsumerGroup(prefix + group + "-group")
            .setAwaitDuration(AWAIT).setSubscriptionExpressions(Collections.singletonMap(prefix + name, expression)).build();
    }

    private SimpleConsumer consumer(String name) throws ClientException {
        return consumer(name, name, FilterExpression.SUB_ALL);
    }

    private MessageBuilder message(String name, String body) {
        return provider.newMessageBuilder().setTopic(prefix + name).setBody(body.getBytes(StandardCharsets.UTF_8));
    }

    /** Receive messages until one is the last, or the time is over. */
    private void receive(SimpleConsumer consumer, IsLast isLast) throws ClientException, InterruptedException {
        long end = System.nanoTime() + TIMEOUT_NS;
        while (System.nanoTime() < end) {
            List<MessageView> messages;
            receiveNs = System.nanoTime();
            try {
                messages = consumer.receive(16, INVISIBLE);
            } catch (ClientException error) {
                receiveErrors.add(error.toString());
                Thread.sleep(500);
                continue;
            }
            for (MessageView message : messages) {
                if (isLast.take(message)) return;
            }
        }
    }

    private interface IsLast {
        boolean take(MessageView message) throws ClientException;
    }

    private List<MessageView> receiveAndAcknowledge(SimpleConsumer consumer, int count) throws Exception {
        List<MessageView> found = new ArrayList<>();
        receive(consumer, message -> {
            consumer.ack(message);
            found.add(message);
            return found.size() == count;
        });
        return found;
    }

    /** Run a push consumer until it has consumed a number of messages. */
    private Deliveries consume(String name, int count, Predicate<Delivery> fails) throws Exception {
        Deliveries deliveries = new Deliveries();
        try (PushConsumer consumer = provider.newPushConsumerBuilder().setClientConfiguration(configuration)
            .setConsumerGroup(prefix + name + "-group")
            .setSubscriptionExpressions(Collections.singletonMap(prefix + name, FilterExpression.SUB_ALL))
            .setMessageListener(view -> fails.test(deliveries.add(view, System.nanoTime())) ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS).build()) {
            deliveries.await(count);
        }
        return deliveries;
    }

    private static String body(MessageView message) {
        return StandardCharsets.UTF_8.decode(message.getBody()).toString();
    }

    private static List<String> bodies(List<MessageView> messages) {
        return messages.stream().map(Cases::body).collect(Collectors.toList());
    }

    // --- cases --------------------------------------------------------------------------------------------------------------------

    private Map<String, Object> normal() throws Exception {
        Message message = message("normal", "hello").setTag("paid").setKeys("k-1", "k-2").addProperty("color", "red").build();
        SendReceipt sent;
        try (Producer producer = producer("normal", null)) {
            sent = producer.send(message);
        }
        MessageView found;
        try (SimpleConsumer consumer = consumer("normal")) {
            found = receiveAndAcknowledge(consumer, 1).get(0);
        }
        Map<String, Object> received = new HashMap<>();
        received.put("id", found.getMessageId().toString());
        received.put("body", body(found));
        received.put("tag", found.getTag().orElse(null));
        received.put("keys", found.getKeys().stream().sorted().collect(Collectors.toList()));
        received.put("properties", found.getProperties());
        received.put("attempt", found.getDeliveryAttempt());
        return Map.of("sent", sent.getMessageId().toString(), "received", received);
    }

    private Map<String, Object> fifo() throws Exception {
        try (Producer producer = producer("fifo", null)) {
            for (int i = 0; i < 4; i++) {
                for (String group : List.of("a", "b")) producer.send(message("fifo", group + " " + i).setMessageGroup(group).build());
            }
        }
        return Map.of("received", consume("fifo", 8, delivery -> false).bodies());
    }

    private Map<String, Object> delay() throws Exception {
        long deliverMs = System.currentTimeMillis() + 3_000;
        try (Producer producer = producer("delay", null); SimpleConsumer consumer = consumer("delay")) {
            producer.send(message("delay", "delayed").setDeliveryTimestamp(deliverMs).build());
            MessageView found = receiveAndAcknowledge(consumer, 1).get(0);
            return Map.of("deliver_ms", deliverMs, "received_ms", System.currentTimeMillis(), "body", body(found));
        }
    }

    private Map<String, Object> transaction() throws Exception {
        List<String> checked = new CopyOnWriteArrayList<>();
        TransactionChecker checker = message -> {
            checked.add(body(message));
            return TransactionResolution.COMMIT;
        };
        try (Producer producer = producer("transaction", checker); SimpleConsumer consumer = consumer("transaction")) {
            for (String body : List.of("committed", "rolled back", "checked")) {
                Transaction transaction = producer.beginTransaction();
                producer.send(message("transaction", body).build(), transaction);
                if (body.equals("committed")) transaction.commit();
                if (body.equals("rolled back")) transaction.rollback();
            }
            List<String> received = bodies(receiveAndAcknowledge(consumer, 2));
            Collections.sort(received);
            return Map.of("received", received, "checked", checked);
        }
    }

    private Map<String, Object> simple() throws Exception {
        try (Producer producer = producer("simple", null)) {
            for (String body : List.of("acked", "changed", "expires")) producer.send(message("simple", body).build());
        }
        Deliveries deliveries = new Deliveries();
        try (SimpleConsumer consumer = consumer("simple")) {
            receive(consumer, message -> {
                Delivery delivery = deliveries.add(message, receiveNs);
                if (delivery.body.equals("acked") || delivery.number > 1) consumer.ack(message);
                else if (delivery.body.equals("changed")) consumer.changeInvisibleDuration(message, CHANGED);
                return deliveries.count() == 5;
            });
        }
        return Map.of("deliveries", deliveries.all());
    }

    private Map<String, Object> push() throws Exception {
        try (Producer producer = producer("push", null)) {
            for (String body : List.of("ok", "fails once", "fails always")) producer.send(message("push", body).build());
        }
        Deliveries deliveries = consume("push", 6, delivery ->
            delivery.body.equals("fails always") || delivery.body.equals("fails once") && delivery.number == 1);
        return Map.of("deliveries", deliveries.all());
    }

    private Map<String, Object> filter() throws Exception {
        try (Producer producer = producer("filter", null)) {
            producer.send(message("filter", "b").setTag("open").addProperty("amount", "50").build());
            producer.send(message("filter", "a").setTag("paid").addProperty("amount", "5").build());
            producer.send(message("filter", "c").setTag("late").addProperty("amount", "500").build());
        }
        return Map.of("tags", selected("filter-tags", new FilterExpression("paid || late")),
            "sql", selected("filter-sql", new FilterExpression("amount > 10", FilterExpressionType.SQL92)));
    }

    private List<String> selected(String group, FilterExpression expression) throws Exception {
        try (SimpleConsumer consumer = consumer("filter", group, expression)) {
            List<String> bodies = bodies(receiveAndAcknowledge(consumer, 2));
            Collections.sort(bodies);
            return bodies;
        }
    }

    private Map<String, Object> recall() throws Exception {
        try (Producer producer = producer("recall", null); SimpleConsumer consumer = consumer("recall")) {
            long now = System.currentTimeMillis();
            SendReceipt sent = producer.send(message("recall", "recalled").setDeliveryTimestamp(now + 8_000).build());
            producer.send(message("recall", "kept").setDeliveryTimestamp(now + 9_000).build());
            String recalled = producer.recallMessage(prefix + "recall", sent.getRecallHandle()).getMessageId().toString();
            List<String> received = bodies(receiveAndAcknowledge(consumer, 1));
            return Map.of("sent", sent.getMessageId().toString(), "recalled", recalled, "received", received);
        }
    }

    private Map<String, Object> offer() throws Exception {
        long deliverMs = System.currentTimeMillis() + 3_000;
        Map<String, Object> sent = new HashMap<>();
        try (Producer producer = producer("shared", null)) {
            Message plain = message("shared", "plain").setTag("paid").setKeys("k-1", "k-2").addProperty("color", "red")
                .addProperty("größe", "2 m").build();
            sent.put("plain", producer.send(plain).getMessageId().toString());
            sent.put("large", producer.send(message("shared", "large ".repeat(20_000)).build()).getMessageId().toString());
            sent.put("ordered", producer.send(message("shared", "ordered").setMessageGroup("g-1").build()).getMessageId().toString());
            Message delayed = message("shared", "delayed").setDeliveryTimestamp(deliverMs).build();
            sent.put("delayed", producer.send(delayed).getMessageId().toString());
        }
        return Map.of("sent", sent, "deliver_ms", deliverMs);
    }

    private Map<String, Object> take() throws Exception {
        List<Map<String, Object>> received = new ArrayList<>();
        try (SimpleConsumer consumer = consumer("shared")) {
            receive(consumer, message -> {
                Map<String, Object> found = new HashMap<>();
                found.put("id", message.getMessageId().toString());
                found.put("body", body(message));
                found.put("tag", message.getTag().orElse(null));
                found.put("keys", message.getKeys().stream().sorted().collect(Collectors.toList()));
                found.put("properties", message.getProperties());
                found.put("group", message.getMessageGroup().orElse(null));
                found.put("received_ms", System.currentTimeMillis());
                received.add(found);
                consumer.ack(message);
                return received.size() == SHARED;
            });
        }
        return Map.of("received", received);
    }

    private Map<String, Object> rights() throws Exception {
        List<CompletableFuture<Map<String, Object>>> outcomes = accounts.stream()
            .map(each -> CompletableFuture.supplyAsync(each::outcomes, command -> new Thread(command).start())).collect(Collectors.toList());
        List<Map<String, Object>> found = new ArrayList<>();
        for (CompletableFuture<Map<String, Object>> each : outcomes) found.add(each.get());
        return Map.of("outcomes", found);
    }

    private Map<String, Object> outcomes() {
        return Map.of("send", outcome(() -> {
            try (Producer producer = producer("rights", null)) {
                producer.send(message("rights", "hello").build());
            }
        }), "receive", outcome(() -> {
            try (SimpleConsumer consumer = consumer("rights")) {
                for (MessageView message : consumer.receive(1, INVISIBLE)) consumer.ack(message);
            }
        }));
    }

    private interface Call {
        void run() throws Exception;
    }

    /** "ok", or the errors of a call and of its causes. */
    private static String outcome(Call call) {
        try {
            call.run();
            return "ok";
        } catch (Exception error) {
            List<String> texts = new ArrayList<>();
            for (Throwable cause = error; cause != null; cause = cause.getCause()) texts.add(cause.toString());
            return String.join("; ", texts);
        }
    }

    // --- deliveries ---------------------------------------------------------------------------------------------------------------

    /** A delivery of a message: the body, its attempt by the client, and how often the body was delivered before, plus one. */
    private static final class Delivery {
        private final String body;
        private final int number;

        Delivery(String body, int number) {
            this.body = body;
            this.number = number;
        }
    }

    private static final class Deliveries {
        private final List<Map<String, Object>> found = new ArrayList<>();
        private final Map<String, Long> firstNs = new HashMap<>();

        /** Add a delivery by a call that started at `startNs`. */
        synchronized Delivery add(MessageView message, long startNs) {
            String body = body(message);
            Long first = firstNs.putIfAbsent(body, startNs);
            long afterMs = first == null ? 0 : (System.nanoTime() - first) / 1_000_000;
            found.add(Map.of("body", body, "attempt", message.getDeliveryAttempt(), "after_ms", afterMs));
            notifyAll();
            return new Delivery(body, (int) found.stream().filter(each -> each.get("body").equals(body)).count());
        }

        synchronized void await(int count) throws InterruptedException {
            long end = System.nanoTime() + TIMEOUT_NS;
            for (long left = TIMEOUT_NS; found.size() < count && left > 0; left = end - System.nanoTime()) wait(left / 1_000_000 + 1);
        }

        synchronized int count() {
            return found.size();
        }

        synchronized List<Map<String, Object>> all() {
            return new ArrayList<>(found);
        }

        synchronized List<Object> bodies() {
            return found.stream().map(each -> each.get("body")).collect(Collectors.toList());
        }
    }
}
