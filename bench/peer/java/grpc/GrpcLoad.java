import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.MessageListener;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.producer.Producer;

/**
 * Load by RocketMQ's gRPC client. It reads commands from standard input, one a line, and prints a line for each: messages per second,
 * p50 and p99 in milliseconds (0 if they were not measured), and the number of messages.
 *
 * - `send THREADS SECONDS`: synchronous sends to the topic `sent`; the time of a send.
 * - `async SECONDS`: asynchronous sends of one thread.
 * - `fill COUNT`: asynchronous sends to the topic `consumed`.
 * - `consume COUNT`: a push consumer of the group `consumers` handles as many messages of that topic.
 * - `idle COUNT PAUSE_MS`: single messages to the topic `idle`; the time from before the send to the listener.
 *
 * Arguments: endpoint, bytes per body.
 */
public final class GrpcLoad {
    /** Asynchronous sends that have no result yet, at most. */
    private static final int WINDOW = 256;
    private static final long TIMEOUT_S = 300;

    private final ClientServiceProvider provider = ClientServiceProvider.loadService();
    private final ClientConfiguration configuration;
    private final byte[] body;

    private GrpcLoad(String endpoint, int bodyBytes) {
        this.configuration = ClientConfiguration.newBuilder().setEndpoints(endpoint).enableSsl(false).build();
        this.body = new byte[bodyBytes];
    }

    public static void main(String[] args) throws Exception {
        GrpcLoad load = new GrpcLoad(args[0], Integer.parseInt(args[1]));
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            try {
                System.out.println(load.run(line.split(" ")));
            } catch (Exception error) {
                error.printStackTrace();
                System.exit(1);
            }
        }
        System.exit(0);
    }

    private String run(String[] words) throws Exception {
        switch (words[0]) {
            case "send": return send(Integer.parseInt(words[1]), nanoseconds(words[2]));
            case "async": return sendAsync("sent", nanoseconds(words[1]), Long.MAX_VALUE);
            case "fill": return sendAsync("consumed", Long.MAX_VALUE, Long.parseLong(words[1]));
            case "consume": return consume(Integer.parseInt(words[1]));
            case "idle": return idle(Integer.parseInt(words[1]), Long.parseLong(words[2]));
            default: throw new IllegalArgumentException("no such command: " + words[0]);
        }
    }

    private static long nanoseconds(String seconds) {
        return (long) (Double.parseDouble(seconds) * 1e9);
    }

    private Producer producer(String topic) throws Exception {
        return provider.newProducerBuilder().setClientConfiguration(configuration).setTopics(topic).build();
    }

    private Message message(String topic) {
        return provider.newMessageBuilder().setTopic(topic).setBody(body).build();
    }

    private PushConsumer consumer(String topic, String group, MessageListener listener) throws Exception {
        return provider.newPushConsumerBuilder().setClientConfiguration(configuration).setConsumerGroup(group)
            .setSubscriptionExpressions(Collections.singletonMap(topic, FilterExpression.SUB_ALL)).setMessageListener(listener).build();
    }

    private String send(int threads, long roundNs) throws Exception {
        AtomicLong sent = new AtomicLong();
        List<long[]> times = Collections.synchronizedList(new ArrayList<>());
        CountDownLatch ended = new CountDownLatch(threads);
        try (Producer producer = producer("sent")) {
            long start = System.nanoTime();
            for (int i = 0; i < threads; i++) {
                new Thread(() -> {
                    long[] own = new long[1 << 20];
                    int count = 0;
                    try {
                        for (long before = System.nanoTime(); before < start + roundNs && count < own.length; count++) {
                            producer.send(message("sent"));
                            long now = System.nanoTime();
                            own[count] = now - before;
                            before = now;
                        }
                    } catch (Exception error) {
                        error.printStackTrace();
                        System.exit(1);
                    }
                    sent.addAndGet(count);
                    times.add(Arrays.copyOf(own, count));
                    ended.countDown();
                }).start();
            }
            ended.await();
            double rate = sent.get() * 1e9 / (System.nanoTime() - start);
            return line(rate, times.stream().flatMapToLong(Arrays::stream).sorted().toArray(), sent.get());
        }
    }

    private String sendAsync(String topic, long roundNs, long count) throws Exception {
        Semaphore window = new Semaphore(WINDOW);
        long sent = 0;
        try (Producer producer = producer(topic)) {
            long start = System.nanoTime();
            for (; sent < count && System.nanoTime() - start < roundNs; sent++) {
                window.acquire();
                producer.sendAsync(message(topic)).whenComplete((receipt, error) -> {
                    if (error != null) {
                        error.printStackTrace();
                        System.exit(1);
                    }
                    window.release();
                });
            }
            window.acquire(WINDOW);
            return line(sent * 1e9 / (System.nanoTime() - start), new long[0], sent);
        }
    }

    private String consume(int count) throws Exception {
        AtomicInteger left = new AtomicInteger(count);
        AtomicLong first = new AtomicLong();
        AtomicLong last = new AtomicLong();
        CountDownLatch ended = new CountDownLatch(1);
        MessageListener listener = view -> {
            first.compareAndSet(0, System.nanoTime());
            if (left.decrementAndGet() == 0) {
                last.set(System.nanoTime());
                ended.countDown();
            }
            return ConsumeResult.SUCCESS;
        };
        try (PushConsumer consumer = consumer("consumed", "consumers", listener)) {
            await(ended, "consumed", left.get());
            TimeUnit.SECONDS.sleep(1); // The last acknowledgements are on their way.
        }
        return line((count - 1) * 1e9 / (last.get() - first.get()), new long[0], count);
    }

    private String idle(int count, long pauseMs) throws Exception {
        long[] times = new long[count];
        AtomicInteger found = new AtomicInteger();
        CountDownLatch ended = new CountDownLatch(1);
        MessageListener listener = view -> {
            long now = System.nanoTime();
            ByteBuffer received = view.getBody();
            if (received.remaining() < Long.BYTES) return ConsumeResult.SUCCESS;
            int at = found.getAndIncrement();
            if (at < count) times[at] = now - received.getLong();
            if (at == count - 1) ended.countDown();
            return ConsumeResult.SUCCESS;
        };
        try (PushConsumer consumer = consumer("idle", "idlers", listener); Producer producer = producer("idle")) {
            TimeUnit.SECONDS.sleep(6); // The consumer looks for its assignment every 5 s.
            long start = System.nanoTime();
            for (int i = 0; i < count; i++) {
                byte[] stamped = ByteBuffer.allocate(body.length).putLong(System.nanoTime()).array();
                producer.send(provider.newMessageBuilder().setTopic("idle").setBody(stamped).build());
                TimeUnit.MILLISECONDS.sleep(pauseMs);
            }
            await(ended, "idle", count - found.get());
            Arrays.sort(times);
            return line(count * 1e9 / (System.nanoTime() - start), times, count);
        }
    }

    private static void await(CountDownLatch ended, String topic, int left) throws InterruptedException {
        if (ended.await(TIMEOUT_S, TimeUnit.SECONDS)) return;
        throw new IllegalStateException("messages of " + topic + " are missing after " + TIMEOUT_S + " s: " + left);
    }

    private static String line(double rate, long[] sortedNs, long count) {
        return String.format("%.1f %.3f %.3f %d", rate, percentile(sortedNs, 0.5), percentile(sortedNs, 0.99), count);
    }

    private static double percentile(long[] sortedNs, double share) {
        return sortedNs.length == 0 ? 0 : sortedNs[(int) (share * (sortedNs.length - 1))] / 1e6;
    }
}
