import com.alibaba.fastjson2.JSONObject;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends timers with RocketMQ's client, and measures when they are delivered to their topic.
 *
 * Arguments: name server, topic, mode, count, bytes per body, first due time (epoch ms), span (ms). Sends count timers from 32
 * threads; number n is due at first + n * span / count. Modes:
 *
 * "send" prints {"sent": seconds} and exits. "spike" waits for all messages and prints {"sent": seconds, "last_ms": store timestamp of
 * the last message, minus the last due time}. "lateness" prints before that one line per message: due time, store timestamp.
 */
public final class Timers {
    private Timers() {
    }

    public static void main(String[] args) throws Exception {
        Start.exitOnError();
        String topic = args[1];
        String mode = args[2];
        int count = Integer.parseInt(args[3]);
        long first = Long.parseLong(args[5]);
        long span = Long.parseLong(args[6]);
        long start = System.nanoTime();
        send(args[0], topic, count, new byte[Integer.parseInt(args[4])], first, span);
        JSONObject printed = new JSONObject();
        printed.put("sent", (System.nanoTime() - start) / 1e9);
        if (!mode.equals("send")) {
            printed.put("last_ms", read(args[0], topic, count, mode.equals("lateness")) - (first + span * (count - 1L) / count));
        }
        System.out.println(printed);
        System.exit(0);
    }

    private static void send(String names, String topic, int count, byte[] body, long first, long span) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("timers");
        producer.setNamesrvAddr(names);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        Start.awaitBroker(producer);
        int threads = Math.min(32, count);
        send(producer, topic, body, first); // The first message alone: it creates the topic.
        AtomicInteger next = new AtomicInteger(1);
        CountDownLatch ended = new CountDownLatch(threads);
        for (int i = 0; i < threads; i++) {
            Thread sender = new Thread(() -> {
                try {
                    for (int number = next.getAndIncrement(); number < count; number = next.getAndIncrement()) {
                        send(producer, topic, body, first + span * number / count);
                    }
                } catch (Exception error) {
                    error.printStackTrace();
                    System.exit(1);
                } finally {
                    ended.countDown();
                }
            });
            sender.start();
        }
        ended.await();
        producer.shutdown();
    }

    private static void send(DefaultMQProducer producer, String topic, byte[] body, long due) throws Exception {
        Message message = new Message(topic, body);
        message.setDeliverTimeMs(due);
        SendStatus status = producer.send(message).getSendStatus();
        if (status != SendStatus.SEND_OK) throw new IllegalStateException("not sent: " + status);
    }

    /** Wait for all messages, and return the latest store timestamp. */
    private static long read(String names, String topic, int count, boolean prints) throws Exception {
        DefaultMQPullConsumer reader = new DefaultMQPullConsumer("timers-reader");
        reader.setNamesrvAddr(names);
        reader.start();
        List<MessageQueue> queues = List.copyOf(reader.fetchSubscribeMessageQueues(topic));
        while (total(reader, queues) < count) Thread.sleep(100);
        long newest = 0;
        for (MessageQueue queue : queues) {
            long end = reader.maxOffset(queue);
            for (long at = prints ? 0 : Math.max(0, end - 1); at < end; ) {
                PullResult result = reader.pull(queue, "*", at, 1_000);
                for (MessageExt message : result.getMsgFoundList()) {
                    newest = Math.max(newest, message.getStoreTimestamp());
                    if (prints) System.out.println(message.getProperty("TIMER_DELIVER_MS") + " " + message.getStoreTimestamp());
                }
                at = result.getNextBeginOffset();
            }
        }
        return newest;
    }

    private static long total(DefaultMQPullConsumer reader, List<MessageQueue> queues) throws Exception {
        long total = 0;
        for (MessageQueue queue : queues) total += reader.maxOffset(queue);
        return total;
    }
}
